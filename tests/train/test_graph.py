"""The captured step without a GPU: what it records, its numbers, what a capture that fails leaves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from support.plain_recorder import OUT_OF_MEMORY, PlainRecorder
from tileflash.models import build_model, model_config, unfused_attention
from tileflash.train import GraphCaptureError
from tileflash.train.data_source import StepBatch
from tileflash.train.errors import is_out_of_memory
from tileflash.train.graph import CapturedStep
from tileflash.train.optimizer import build_optimizer
from tileflash.train.recorder import _reason
from tileflash.train.step import Limits, train_step

OPEN, CLOSED = Limits(3e38, 3e38), Limits(0.0, 3e38)
RATE = 2.0**-7  # the same in fp32, which a captured step has it in
REFUSED = RuntimeError("CUDA error: operation not permitted when stream is capturing\nCompile with ...")


def made() -> tuple[nn.Module, torch.optim.AdamW]:
    """A tiny model, one of whose weights takes no part in the loss, and its optimizer."""
    sizes = {"vocab_size": 67, "n_layer": 2, "n_head": 2, "n_embd": 16, "max_sequence_length": 8}
    model = build_model(model_config("gpt2-tiny", **sizes), attention=unfused_attention, seed=0)
    model.unused = nn.Parameter(torch.ones(3, 3))
    return model, build_optimizer(model, RATE, 0.1)


def batch(seed: int, micro_batches: int) -> StepBatch:
    tokens = torch.randint(67, (micro_batches, 2, 8), generator=torch.Generator().manual_seed(seed))
    targets = tokens.roll(-1, -1)
    targets[:, 1, : seed % 5 + 1] = -100  # another number of valid tokens each time
    return StepBatch(tokens, targets, int((targets != -100).sum()))


def captured(
    model: nn.Module, optimizer: torch.optim.AdamW, micro_batches: int, recorder: PlainRecorder
) -> CapturedStep:
    return CapturedStep(
        model, optimizer, batch(0, micro_batches), dtype=torch.float32, gradient_clip=1.0, recorder=recorder
    )


def everything(model: nn.Module, optimizer: torch.optim.AdamW) -> list[torch.Tensor]:
    """Copies of the weights and of the optimizer's moments and step counts."""
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [tensor.detach().clone() for tensor in [*model.parameters(), *moments]]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_steps_have_the_bits_of_eager_ones_also_around_skipped_ones(micro_batches: int) -> None:
    (eager, eager_optimizer), (model, optimizer) = made(), made()
    recorder = PlainRecorder()
    step = captured(model, optimizer, micro_batches, recorder)
    steps = [(1, OPEN), (2, OPEN), (3, CLOSED), (4, OPEN), (5, Limits(3e38, 1e-6)), (6, OPEN)]
    for seed, limits in steps:
        data = batch(seed, micro_batches)
        expected = train_step(
            eager, eager_optimizer, data.tokens, data.targets, data.valid_tokens,
            dtype=torch.float32, gradient_clip=1.0, limits=limits,
        )  # fmt: skip
        result = step(data, RATE, limits).clone()
        assert torch.equal(result, expected), seed
        assert result[2] == float(limits is not OPEN)
        assert same(everything(model, optimizer), everything(eager, eager_optimizer)), seed
    # However many micro-batches there are, one is recorded, and with more than one the step's end.
    assert recorder.recorded == (1 if micro_batches == 1 else 2)
    assert recorder.replayed == len(steps) * (1 if micro_batches == 1 else micro_batches + 1)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_step_with_nan_leaves_nothing_for_the_next(micro_batches: int) -> None:
    model, optimizer = made()
    step = captured(model, optimizer, micro_batches, PlainRecorder())
    poisoned = model.positions.detach()[0, 0].clone()
    with torch.no_grad():
        model.positions[0, 0] = float("nan")
    assert step(batch(1, micro_batches), RATE, OPEN).tolist()[2] == 1.0
    with torch.no_grad():
        model.positions[0, 0] = poisoned
    loss, norm, skipped = step(batch(1, micro_batches), RATE, OPEN).tolist()
    assert (loss > 0, norm > 0, skipped) == (True, True, 0.0)


def test_gradients_of_several_micro_batches_stay_where_they_are() -> None:
    model, optimizer = made()
    step = captured(model, optimizer, 4, PlainRecorder())
    used = [parameter for parameter in model.parameters() if parameter is not model.unused]
    addresses = [parameter.grad.data_ptr() for parameter in used]
    for seed in (1, 2):
        step(batch(seed, 4), RATE, OPEN)
        assert [parameter.grad.data_ptr() for parameter in used] == addresses
        assert not any(parameter.grad.any() for parameter in used)
    assert model.unused.grad is None  # else it would decay, which it does not in an eager step


def test_gradients_of_one_micro_batch_take_no_memory_between_steps() -> None:
    model, optimizer = made()
    step = captured(model, optimizer, 1, PlainRecorder())
    step(batch(1, 1), RATE, OPEN)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_capturing_changes_no_number(micro_batches: int) -> None:
    model, optimizer = made()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    captured(model, optimizer, micro_batches, PlainRecorder())
    assert same(before, [parameter.detach() for parameter in model.parameters()])
    assert len(optimizer.state) == len(before) - 1
    assert not any(value.any() for state in optimizer.state.values() for value in state.values())


def test_another_shape_is_refused() -> None:
    step = captured(*made(), 4, PlainRecorder())
    with pytest.raises(ValueError, match=r"batch is of \(1, 2, 8\): the captured step's is \(4, 2, 8\)"):
        step(batch(1, 1), RATE, OPEN)


@pytest.mark.parametrize("error", [GraphCaptureError("no"), OUT_OF_MEMORY], ids=["refused", "memory"])
@pytest.mark.parametrize(("micro_batches", "failing"), [(1, 1), (4, 1), (4, 2)])
def test_a_failed_capture_leaves_model_and_optimizer_fit_for_eager_steps(
    micro_batches: int, failing: int, error: Exception
) -> None:
    (eager, eager_optimizer), (model, optimizer) = made(), made()
    with pytest.raises(type(error)):
        captured(model, optimizer, micro_batches, PlainRecorder(failing, error))
    assert [(group["lr"], group["capturable"]) for group in optimizer.param_groups] == [(RATE, False)] * 2
    assert all(parameter.grad is None for parameter in model.parameters())
    data = batch(1, micro_batches)
    for each, its_optimizer in ((eager, eager_optimizer), (model, optimizer)):
        train_step(
            each, its_optimizer, data.tokens, data.targets, data.valid_tokens,
            dtype=torch.float32, gradient_clip=1.0, limits=OPEN,
        )  # fmt: skip
    assert same(everything(model, optimizer), everything(eager, eager_optimizer))


def test_the_reason_is_the_first_error_of_a_capture() -> None:
    def ending(told: str) -> RuntimeError:
        try:
            try:
                raise REFUSED
            except RuntimeError:
                raise RuntimeError(told)  # noqa: B904  what a capture's end does
        except RuntimeError as error:
            return error

    refused = "RuntimeError: CUDA error: operation not permitted when stream is capturing"
    assert _reason(ending("CUDA error: operation failed due to a previous error during capture\nmore")) == refused
    assert _reason(ending("no kernel for this")) == "RuntimeError: no kernel for this"
    assert _reason(NotImplementedError()) == "NotImplementedError: "


def test_memory_that_cuda_itself_lacks_is_out_of_memory() -> None:
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ..."))
    assert not is_out_of_memory(REFUSED)
