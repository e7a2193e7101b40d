"""One step: the loss of all valid tokens, clipping, skipping on the device, decay of matrices alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tileflash.models import build_model, model_config, unfused_attention
from tileflash.train import TrainConfig
from tileflash.train.optimizer import build_optimizer
from tileflash.train.setup import cuda_graph_in_force, find_device, prepare_setup
from tileflash.train.step import Limits, compute, forward_backward, token_loss_sum, train_step

OPEN = Limits(3e38, 3e38)


def tiny_model(seed: int = 0) -> nn.Module:
    config = model_config("gpt2-tiny", vocab_size=67, n_layer=2, n_head=2, n_embd=16, max_sequence_length=8)
    return build_model(config, attention=unfused_attention, seed=seed)


def unequal_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """tokens, targets [2, 8]: the first sample has all targets, the second but one."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(67, (2, 8), generator=generator)
    targets = torch.randint(67, (2, 8), generator=generator)
    targets[1, :7] = -100
    return tokens, targets


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_loss_and_gradient_do_not_depend_on_the_cut_into_micro_batches() -> None:
    tokens, targets = unequal_batch()
    whole, parts = tiny_model(), tiny_model()
    one = forward_backward(whole, tokens[None], targets[None], 9, torch.float32)  # 1 x B=2
    two = forward_backward(parts, tokens[:, None], targets[:, None], 9, torch.float32)  # 2 x B=1
    reference = F.cross_entropy(whole(tokens).double().flatten(0, 1), targets.flatten(), ignore_index=-100)
    torch.testing.assert_close(one.double(), reference, rtol=1e-6, atol=0)
    torch.testing.assert_close(two, one, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients(parts), gradients(whole), rtol=1e-4, atol=1e-7)
    # The usual mistake, a mean of means, would be told apart by far.
    means = [
        F.cross_entropy(whole(t[None]).flatten(0, 1), y, ignore_index=-100)
        for t, y in zip(tokens, targets, strict=True)
    ]
    assert abs(float(torch.stack(means).mean().detach()) - float(one)) > 1e-3


def test_a_step_with_no_valid_token_has_loss_zero() -> None:
    tokens = torch.zeros(1, 1, 8, dtype=torch.int64)
    loss = forward_backward(tiny_model(), tokens, torch.full_like(tokens, -100), 0, torch.float32)
    assert float(loss) == 0.0


def test_loss_is_computed_in_fp32_whatever_the_logits_are() -> None:
    logits = 30 * torch.randn(1, 5, 67, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.arange(5)[None]
    loss = token_loss_sum(logits, targets)
    reference = F.cross_entropy(logits.double()[0], targets[0], reduction="sum")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), reference, rtol=1e-6, atol=0)


def test_bfloat16_computes_in_bfloat16_over_fp32_weights() -> None:
    model = tiny_model()
    tokens, targets = unequal_batch()
    assert compute(model, tokens, torch.bfloat16).dtype == torch.bfloat16
    low = forward_backward(model, tokens[None], targets[None], 9, torch.bfloat16)
    assert all(
        p.dtype == torch.float32 and p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters()
    )
    exact = forward_backward(tiny_model(), tokens[None], targets[None], 9, torch.float32)
    torch.testing.assert_close(low, exact, rtol=2e-2, atol=0)


def step(model: nn.Module, optimizer: torch.optim.AdamW, limits: Limits = OPEN, clip: float = 1.0) -> list[float]:
    tokens, targets = unequal_batch()
    result = train_step(
        model, optimizer, tokens[None], targets[None], 9, dtype=torch.float32, gradient_clip=clip, limits=limits
    )
    assert all(p.grad is None for p in model.parameters())
    return result.tolist()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("limits", [Limits(1e-3, 3e38), Limits(3e38, 1e-6)], ids=["loss", "gradient"])
def test_a_step_beyond_the_limits_leaves_weights_and_moments_bit_for_bit(limits: Limits) -> None:
    model = tiny_model()
    optimizer = build_optimizer(model, 1e-2, 0.1)
    assert step(model, optimizer)[2] == 0.0
    before = weights(model)
    moments = {key: {name: value.clone() for name, value in state.items()} for key, state in optimizer.state.items()}
    assert step(model, optimizer, limits)[2] == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    for key, state in optimizer.state.items():
        assert all(torch.equal(state[name], moments[key][name]) for name in ("step", "exp_avg", "exp_avg_sq"))
    # And the one after it is as if the skipped one had not been.
    other = tiny_model()
    other_optimizer = build_optimizer(other, 1e-2, 0.1)
    for _ in range(2):
        step(other, other_optimizer)
    step(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(weights(other), weights(model), strict=True))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nan_or_inf_skips_the_step(poison: float) -> None:
    model = tiny_model()
    optimizer = build_optimizer(model, 1e-2, 0.1)
    tokens, _ = unequal_batch()
    with torch.no_grad():
        model.embedding.weight[tokens[0, 0]] = poison
    before = weights(model)
    loss, norm, skipped = step(model, optimizer)
    assert skipped == 1.0
    assert not (abs(loss) < 1e30 and abs(norm) < 1e30)
    assert all(torch.equal(a, b) or not a.isfinite().all() for a, b in zip(before, weights(model), strict=True))


def test_one_step_is_adamw_as_its_paper_has_it_with_clipping() -> None:
    model = tiny_model()
    optimizer = build_optimizer(model, 1e-2, 0.1)
    reference = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    tokens, targets = unequal_batch()
    copy = tiny_model()
    forward_backward(copy, tokens[None], targets[None], 9, torch.float32)
    norm = gradients(copy).double().norm()
    _, told_norm, _ = step(model, optimizer, clip=0.25)
    assert told_norm == pytest.approx(float(norm), rel=1e-5)
    assert norm > 0.25  # else nothing is clipped here
    for (name, parameter), (_, twin) in zip(model.named_parameters(), copy.named_parameters(), strict=True):
        gradient = twin.grad.double() * (0.25 / norm)
        first, second = 0.1 * gradient / (1 - 0.9), 0.05 * gradient**2 / (1 - 0.95)
        decay = 0.1 if parameter.dim() >= 2 else 0.0
        expected = reference[name] * (1 - 1e-2 * decay) - 1e-2 * first / (second.sqrt() + 1e-8)
        # Where the gradient is nearly 0 the sign of the update hangs on rounding.
        clear = gradient.abs() > 1e-6
        torch.testing.assert_close(parameter.detach().double()[clear], expected[clear], rtol=1e-4, atol=1e-6, msg=name)


def test_only_matrices_decay_and_shared_weights_come_once() -> None:
    model = tiny_model()
    decayed, kept = build_optimizer(model, 1e-3, 0.1).param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert decayed["betas"] == kept["betas"] == (0.9, 0.95)  # as documented; a first step does not depend on them
    assert all(parameter.dim() >= 2 for parameter in decayed["params"])
    assert all(parameter.dim() < 2 for parameter in kept["params"])
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))


def test_numbers_may_lie_on_the_device() -> None:
    """A captured step reads its divisor, limits and learning rate from tensors."""
    results = []
    for wrap in (lambda number: number, torch.tensor):
        model = build_model(model_config("gpt2-tiny"), attention=unfused_attention, seed=0)
        optimizer = build_optimizer(model, 1e-3, 0.1)
        for group in optimizer.param_groups:
            group["lr"] = wrap(1e-3)
        tokens = torch.arange(128).view(1, 2, 64)
        result = train_step(
            model, optimizer, tokens, tokens.roll(-1, -1), wrap(128),
            dtype=torch.float32, gradient_clip=1.0, limits=Limits(wrap(1e3), wrap(1e3)),
        )  # fmt: skip
        results.append((result, [parameter.detach() for parameter in model.parameters()]))
    torch.testing.assert_close(results[0], results[1])


def test_a_captured_step_is_refused_without_a_gpu() -> None:
    with pytest.raises(ValueError, match="cuda_graph is set and the device is cpu"):
        prepare_setup(TrainConfig(model="gpt2-tiny", cuda_graph=True, device="cpu"))


@pytest.mark.parametrize(
    ("asked", "device", "in_force"),
    [(None, "cpu", False), (False, "cpu", False), (None, "cuda", True), (False, "cuda:1", False), (True, "cuda", True)],
)
def test_whether_a_step_is_captured(asked: bool | None, device: str, in_force: bool) -> None:
    assert cuda_graph_in_force(asked, torch.device(device)) is in_force


def test_a_device_is_found_without_being_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)

    def touched(*arguments: object) -> None:
        raise AssertionError("a context on the GPU takes its memory")

    for name in ("current_device", "set_device", "init", "_lazy_init"):
        monkeypatch.setattr(f"torch.cuda.{name}", touched)
    assert find_device("auto") == find_device("cuda") == torch.device("cuda")
    assert find_device("cuda:1") == torch.device("cuda", 1)
    assert find_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match='device is "cuda:2": there are 2 GPUs, numbered from 0'):
        find_device("cuda:2")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert find_device("auto") == torch.device("cpu")
    for name, told in {"cuda": "sees no GPU here", "tpu": "must be auto, cpu, cuda or cuda:N"}.items():
        with pytest.raises(ValueError, match=told):
            find_device(name)
