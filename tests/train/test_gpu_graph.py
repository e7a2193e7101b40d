"""On a GPU: a captured run has the bits of an eager one, whatever the number of micro-batches, and a capture may fail.

Bits are compared where nothing rounds differently: deterministic operators, a learning rate that is the same in fp32,
numbers of tokens that are powers of two.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tileflash.models import build_model, model_config, unfused_attention
from tileflash.train import GraphCaptureError, TrainConfig, TrainingOutOfMemoryError, train
from tileflash.train.data_source import StepBatch
from tileflash.train.errors import is_out_of_memory
from tileflash.train.graph import CapturedStep
from tileflash.train.optimizer import build_optimizer
from tileflash.train.setup import prepare_setup
from tileflash.train.step import Limits, train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch sees"),
]

Make = Callable[..., TrainConfig]
OPEN, CLOSED = Limits(3e38, 3e38), Limits(0.0, 3e38)
REFUSAL = "CUDA error: operation not permitted when stream is capturing"


@pytest.fixture
def exact(tiny: Make) -> Make:
    """A TrainConfig of a run whose captured and eager steps round alike; one micro-batch is 32 tokens."""

    def make(micro_batches: int = 4, **changes: object) -> TrainConfig:
        settings = {
            "device": "cuda",
            "deterministic": True,
            "learning_rate": 2.0**-7,
            "final_learning_rate_fraction": 1,
            "total_batch_size": 32 * micro_batches,
        }
        return tiny(**{**settings, **changes})

    return make


@pytest.fixture
def replays(monkeypatch) -> list[torch.cuda.CUDAGraph]:
    """The graph of every replay, in order."""
    done: list[torch.cuda.CUDAGraph] = []
    replay = torch.cuda.CUDAGraph.replay

    def noted(self: torch.cuda.CUDAGraph) -> None:
        done.append(self)
        replay(self)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", noted)
    return done


@pytest.mark.skipif(torch.version.hip is not None, reason="AMD GPUs capture only when asked to")
def test_by_default_steps_are_captured(exact: Make, replays: list[torch.cuda.CUDAGraph]) -> None:
    assert prepare_setup(exact()).cuda_graph is True
    train(exact(1, num_iteration=3))
    assert (len(replays), len(set(map(id, replays)))) == (3, 1)
    replays.clear()
    train(exact(64, num_iteration=3))  # two graphs, not one of 64 micro-batches
    assert (len(replays), len(set(map(id, replays)))) == (3 * 65, 2)
    replays.clear()
    train(exact(num_iteration=3, cuda_graph=False))
    assert replays == []


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_captured_run_has_the_bits_of_an_eager_one_with_looks_at_the_model_between_steps(
    tmp_path: Path, exact: Make, token_file: Path, numbers, read_events, micro_batches: int, dtype: str
) -> None:
    settings = {"val_loss_every": 2, "input_val_bin": str(token_file), "sample_every": 3, "tokenizer": "bytes"}
    for captured in (False, True):
        log = str(tmp_path / str(captured))
        train(exact(micro_batches, **settings, dtype=dtype, cuda_graph=captured, num_iteration=8, log_json=log))
    eager, graph = tmp_path / "False", tmp_path / "True"
    assert numbers(graph) == numbers(eager)
    for kind in ("validation", "sample"):
        assert read_events(graph, kind) == read_events(eager, kind) != []
    assert all("text" in event for event in read_events(graph, "sample"))


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
def test_captured_and_eager_runs_go_on_from_each_other_with_the_same_bits(
    tmp_path: Path, exact: Make, numbers, micro_batches: int, first: bool, second: bool
) -> None:
    train(exact(micro_batches, output=str(tmp_path / "whole"), cuda_graph=False))
    output = str(tmp_path / "part")
    train(exact(micro_batches, output=output, cuda_graph=first, num_iteration=3))
    train(exact(micro_batches, output=output, cuda_graph=second, resume=True))
    assert numbers(tmp_path / "part" / "log.jsonl") == numbers(tmp_path / "whole" / "log.jsonl")


def made(attention=unfused_attention) -> tuple[torch.nn.Module, torch.optim.AdamW]:
    model = build_model(model_config("gpt2-tiny"), attention=attention, device="cuda", seed=0)
    return model, build_optimizer(model, 1e-3, 0.1)


def batch(seed: int, micro_batches: int, samples: int = 4) -> StepBatch:
    tokens = torch.randint(257, (micro_batches, samples, 64), generator=torch.Generator().manual_seed(seed))
    targets = tokens.roll(-1, -1)
    targets[:, 1, : seed + 3] = -100
    return StepBatch(tokens.cuda(), targets.cuda(), int((targets != -100).sum()))


def eager_step(
    model: torch.nn.Module, optimizer: torch.optim.AdamW, data: StepBatch, limits: Limits = OPEN
) -> list[float]:
    result = train_step(
        model, optimizer, data.tokens, data.targets, data.valid_tokens,
        dtype=torch.bfloat16, gradient_clip=1.0, limits=limits,
    )  # fmt: skip
    return result.tolist()


def test_skipped_steps_of_several_micro_batches_change_nothing_and_leave_no_gradient() -> None:
    (model, optimizer), eager = made(), made()
    step = CapturedStep(model, optimizer, batch(0, 4), dtype=torch.bfloat16, gradient_clip=1.0)
    for seed, limits in ((1, OPEN), (2, CLOSED), (3, Limits(3e38, 1e-6)), (4, OPEN)):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        result = step(batch(seed, 4), 1e-3, limits).tolist()
        expected = eager_step(*eager, batch(seed, 4), limits)
        assert result == pytest.approx(expected, rel=1e-3)
        assert result[2] == float(limits is not OPEN)
        unchanged = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert all(unchanged) if limits is not OPEN else not any(unchanged)
        assert not any(parameter.grad.any() for parameter in model.parameters())


def test_many_micro_batches_need_no_more_memory_captured(tmp_path: Path) -> None:
    peaks = []
    for captured in (False, True):
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        settings = {"batch_size": 16, "sequence_length": 512, "total_batch_size": 4 * 16 * 512, "num_iteration": 3}
        where = {"device": "cuda", "dtype": "bfloat16", "data_directory": str(tmp_path), "cuda_graph": captured}
        train(TrainConfig(model="gpt2-tiny", tensorboard=False, **settings, **where))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 1.05 * peaks[0]


def waiting(*tensors: torch.Tensor, **options: object) -> torch.Tensor:
    """Attention that waits for the GPU, which no capture allows."""
    torch.cuda.current_stream().synchronize()
    return unfused_attention(*tensors, **options)


def greedy(*tensors: torch.Tensor, **options: object) -> torch.Tensor:
    """Attention that asks for 16 TiB during a capture."""
    if torch.cuda.is_current_stream_capturing():
        torch.empty(2**44, dtype=torch.uint8, device="cuda")
    return unfused_attention(*tensors, **options)


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("attention", [waiting, greedy])
def test_a_failed_capture_leaves_nothing_in_the_way(attention: Callable[..., torch.Tensor], micro_batches: int) -> None:
    def settled_bytes() -> int:
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # the stream of each capture has some
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    model, optimizer = made(attention)
    data = batch(0, micro_batches, samples=256)  # logits of 16 MiB
    eager_step(model, optimizer, data)  # the moments are there
    weights, before = [parameter.detach().clone() for parameter in model.parameters()], settled_bytes()
    with pytest.raises(RuntimeError) as caught:
        CapturedStep(model, optimizer, data, dtype=torch.bfloat16, gradient_clip=1.0)
    told = (isinstance(caught.value, GraphCaptureError), is_out_of_memory(caught.value))
    del caught  # it holds tensors
    assert told == (attention is waiting, attention is greedy)
    assert settled_bytes() <= before + 4 * 2**20
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.rand(8, device="cuda").isfinite().all()  # of the default generator
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert eager_step(model, optimizer, data)[2] == 0.0
    # And another capture works.
    step = CapturedStep(*made(), data, dtype=torch.bfloat16, gradient_clip=1.0)
    assert step(data, 1e-3, OPEN).tolist() == pytest.approx(eager_step(*made(), data), rel=1e-3)


def test_a_real_failure_of_the_default_is_told_and_the_run_goes_on(
    tmp_path: Path, exact: Make, monkeypatch, numbers, read_events, capsys
) -> None:
    monkeypatch.setattr("tileflash.train.setup.unfused_attention", waiting)
    train(exact(log_json=str(tmp_path / "eager"), cuda_graph=False))
    train(exact(log_json=str(tmp_path / "graph")))
    assert numbers(tmp_path / "graph") == numbers(tmp_path / "eager")
    (event,) = read_events(tmp_path / "graph", "not_captured")
    assert REFUSAL in event["reason"]
    assert "Steps run eagerly" in capsys.readouterr().out
    with pytest.raises(GraphCaptureError, match=f"cuda_graph is set and the step could not be captured .*{REFUSAL}"):
        train(exact(cuda_graph=True))


def test_pytorch_that_cannot_capture_at_all_is_told_too(
    tmp_path: Path, exact: Make, monkeypatch, numbers, read_events
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no graphs here")

    train(exact(log_json=str(tmp_path / "eager"), cuda_graph=False))
    monkeypatch.setattr(torch.cuda, "graph", refuse)
    train(exact(log_json=str(tmp_path / "graph")))
    assert numbers(tmp_path / "graph") == numbers(tmp_path / "eager")
    assert [event["reason"] for event in read_events(tmp_path / "graph", "not_captured")] == [
        "RuntimeError: no graphs here"
    ]


@pytest.mark.parametrize("wanted", [None, True])
def test_memory_that_runs_out_in_a_capture_is_told_as_in_an_eager_step(
    exact: Make, monkeypatch, wanted: bool | None
) -> None:
    monkeypatch.setattr("tileflash.train.setup.unfused_attention", greedy)
    with pytest.raises(TrainingOutOfMemoryError, match=r"(?s)16384.00 GiB more were asked for; .* --batch-size 1"):
        train(exact(cuda_graph=wanted))


def test_memory_that_runs_out_before_the_capture_is_told_as_well(tmp_path: Path) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    # What is held already, and 64 MiB: enough for the weights, not for the warm-up, whose scores take 256 MiB a layer.
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 64 * 2**20) / total)
    settings = {"batch_size": 64, "sequence_length": 512, "total_batch_size": 2 * 64 * 512}
    where = {"device": "cuda", "dtype": "float32", "data_directory": str(tmp_path)}
    try:
        with pytest.raises(TrainingOutOfMemoryError, match=r"out of memory on cuda:0: .* more were asked for"):
            train(TrainConfig(model="gpt2-tiny", tensorboard=False, **settings, **where))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
