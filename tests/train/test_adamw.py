"""FusedAdamW against PyTorch's AdamW on fp32 masters, in plain PyTorch and by the kernels in Triton's interpreter."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from tileflash.train.adamw import FusedAdamW
from tileflash.train.masters import join_master, split_master
from tileflash.train.step import Limits, finish_step

SHAPES = [(300, 70), (70,), (5,), (1,), (33, 500)]  # more than a chunk, less than 16, and no multiple of 16
OPEN = Limits(3e38, 3e38)
BACKENDS = ["plain", "triton"]


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator) * 0.02) for shape in SHAPES]


def groups(parameters: list[nn.Parameter]) -> list[dict[str, object]]:
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def made(backend: str, *, split: bool, sum_in_fp32: bool = True) -> tuple[list[nn.Parameter], FusedAdamW]:
    parameters = weights()
    return parameters, FusedAdamW(groups(parameters), split=split, sum_in_fp32=sum_in_fp32, backend=backend)


def give_gradients(parameters: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def finish(
    optimizer: FusedAdamW, limits: Limits = OPEN, loss: float = 1.0, clip: float = 1.0, keep: bool = False
) -> list[float]:
    result = finish_step(
        nn.Module(), optimizer, torch.tensor(loss), gradient_clip=clip, limits=limits, keep_gradients=keep
    )
    return result.tolist()


def masters(parameters: list[nn.Parameter], optimizer: FusedAdamW) -> list[torch.Tensor]:
    if not optimizer.split:
        return [parameter.detach() for parameter in parameters]
    return [join_master(parameter, optimizer.state[parameter]["low_bits"]) for parameter in parameters]


def assert_within_ulps(got: torch.Tensor, wanted: torch.Tensor, size: float, ulps: float) -> None:
    """Units in the last place of the larger of the wanted number and `size`."""
    unit = torch.maximum(wanted.abs(), torch.full_like(wanted, size)) * 2.0**-23
    assert ((got - wanted).abs() <= ulps * unit).all()


@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_are_pytorchs_on_fp32_masters(backend: str, split: bool, clip: float) -> None:
    ours, optimizer = made(backend, split=split)
    theirs = weights()
    reference = torch.optim.AdamW(groups(theirs), lr=1e-3, betas=(0.9, 0.95), fused=True)
    for step in range(4):
        give_gradients(ours, step)
        for weight, other in zip(ours, theirs, strict=True):
            other.grad = weight.grad.float()
        loss, norm, skipped = finish(optimizer, clip=clip)
        assert (loss, skipped) == (1.0, 0.0)
        assert all(weight.grad is None for weight in ours)
        gradients = [other.grad for other in theirs]
        exact = math.sqrt(sum(float((gradient.double() ** 2).sum()) for gradient in gradients))
        assert norm == pytest.approx(exact, rel=1e-5)
        if clip:
            for gradient in gradients:
                gradient.mul_(clip / (norm + 1e-6))
        reference.step()
        for weight, other, master in zip(ours, theirs, masters(ours, optimizer), strict=True):
            # Decay and update round once each, here and there; against fp64 both drift by 2 units a step.
            assert_within_ulps(master, other.detach(), 1e-3, 2.0 if step == 0 else 4.0 * (step + 1))
            if split:
                assert torch.equal(weight.detach(), split_master(master)[0])
                assert (weight.float() - master).abs().le(master.abs() * 2.0**-8).all()


def test_in_plain_pytorch_they_are_the_same_bits() -> None:
    ours, optimizer = made("plain", split=True)
    theirs = weights()
    reference = torch.optim.AdamW(groups(theirs), lr=1e-3, betas=(0.9, 0.95), fused=True)
    for step in range(3):
        give_gradients(ours, step)
        for weight, other in zip(ours, theirs, strict=True):
            other.grad = weight.grad.float()
        finish(optimizer, clip=0.0)
        reference.step()
    for master, other in zip(masters(ours, optimizer), theirs, strict=True):
        assert torch.equal(master, other)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_beyond_the_limits_changes_nothing(backend: str, split: bool, keep: bool) -> None:
    ours, optimizer = made(backend, split=split)
    give_gradients(ours, 0)
    finish(optimizer)
    before = [tensor.clone() for weight in ours for tensor in (weight.detach(), *optimizer.state[weight].values())]
    cases = [(Limits(0.5, 3e38), 1.0), (Limits(3e38, 0.5), 1.0), (OPEN, math.nan), (OPEN, math.inf)]
    for limits, loss in cases:
        give_gradients(ours, 1)
        gradients = [weight.grad for weight in ours]
        assert finish(optimizer, limits, loss, keep=keep)[2] == 1.0
        assert all((weight.grad is gradient) == keep for weight, gradient in zip(ours, gradients, strict=True))
        assert not keep or not any(gradient.any() for gradient in gradients)
    give_gradients(ours, 1)
    ours[0].grad[3, 5] = math.nan
    assert finish(optimizer)[2] == 1.0
    after = [tensor for weight in ours for tensor in (weight.detach(), *optimizer.state[weight].values())]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_micro_batches_are_summed_in_fp32(backend: str) -> None:
    """256 times 1 + 2^-7: in bf16 the sum would stay at 256."""
    results = []
    for sum_in_fp32 in (True, False):
        ours, optimizer = made(backend, split=True, sum_in_fp32=sum_in_fp32)
        for part in (256.0, 1.0, 1.0, 1.0):
            for weight in ours:
                gradient = torch.full_like(weight, part)
                weight.grad = gradient if weight.grad is None else weight.grad + gradient
            optimizer.gather()
            assert (ours[0].grad is None) == sum_in_fp32
        results.append(finish(optimizer, clip=0.0)[1])
    elements = sum(math.prod(shape) for shape in SHAPES)
    assert results == pytest.approx([259 * math.sqrt(elements), 256 * math.sqrt(elements)], rel=1e-4)
    # The next step's sums begin at 0.
    give_gradients(ours, 0)
    optimizer.gather()
    assert finish(optimizer, clip=0.0)[1] == pytest.approx(math.sqrt(elements), rel=0.02)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_any_layout_and_none(backend: str) -> None:
    ours, optimizer = made(backend, split=True)
    give_gradients(ours, 0)
    plain = [weight.grad.clone() for weight in ours]
    ours[0].grad = plain[0].t().contiguous().t()
    ours[4].grad = torch.cat([torch.zeros(1, dtype=torch.bfloat16), plain[4].flatten()])[1:].view(33, 500)
    ours[1].grad = None
    other, reference = made(backend, split=True)
    for number, weight in enumerate(other):
        weight.grad = None if number == 1 else plain[number]
    assert finish(optimizer) == finish(reference)
    for a, b in zip(masters(ours, optimizer), masters(other, reference), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(masters(ours, optimizer)[1], split_join(weights()[1]))


def split_join(tensor: torch.Tensor) -> torch.Tensor:
    return join_master(*split_master(tensor.detach()))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_taken_up_goes_on_with_the_same_bits(backend: str, split: bool) -> None:
    ours, optimizer = made(backend, split=split)
    give_gradients(ours, 0)
    finish(optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    other, successor = made(backend, split=split)
    with torch.no_grad():
        for weight, source in zip(other, ours, strict=True):
            weight.copy_(source)
    successor.load_state_dict(state)
    for parameters, each in ((ours, optimizer), (other, successor)):
        give_gradients(parameters, 1)
        finish(each)
    for a, b in zip(masters(ours, optimizer), masters(other, successor), strict=True):
        assert torch.equal(a, b)
    del state["state"][1]["exp_avg_sq"]
    with pytest.raises(ValueError, match=r"state_dict has no exp_avg_sq for weight 1 of \(33, 500\)"):
        successor.load_state_dict(state)
    with pytest.raises(ValueError, match=r"state_dict has groups of \[2\] weights: they must be of \[2, 3\]"):
        successor.load_state_dict({"state": {}, "param_groups": state["param_groups"][:1]})


def test_step_is_that_of_every_optimizer() -> None:
    ours, optimizer = made("plain", split=False)
    theirs = weights()
    reference = torch.optim.AdamW(groups(theirs), lr=1e-3, betas=(0.9, 0.95), fused=True)
    give_gradients(ours, 0)
    give_gradients(theirs, 0)
    assert optimizer.step(lambda: 3.0) == 3.0
    reference.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert ours[0].grad is not None


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="parameters is empty"):
        FusedAdamW([{"params": []}])
    with pytest.raises(ValueError, match=r"a weight is torch.bfloat16 \(3,\) on cpu: all must be float32"):
        FusedAdamW([nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))])
    ours, optimizer = made("plain", split=False)
    optimizer.param_groups[1]["lr"] = 0.5
    give_gradients(ours, 0)
    with pytest.raises(ValueError, match="the groups have different learning rates"):
        finish(optimizer)


def test_a_master_is_its_two_halves_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=generator).to(torch.int32)
    ties = (torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16) + 0x8000  # both neighbours are as near
    edges = torch.tensor([0, 1, -1, 0x7F7FFFFF, 0x7F800000, -0x00800000, -0x00800001, 0x7FFFFFFF, 0x7F808000]).to(
        torch.int32
    )
    master = torch.cat([bits, ties, edges]).view(torch.float32)
    weight, low_bits = split_master(master)
    joined = join_master(weight, low_bits)
    number = ~master.isnan()
    assert torch.equal(joined[number].view(torch.int32), master[number].view(torch.int32))
    assert joined[~number].isnan().all()
    assert weight[~number].isnan().all()
    tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(weight[number & ~tie], master[number & ~tie].to(torch.bfloat16))
