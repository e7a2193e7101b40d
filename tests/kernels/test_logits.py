"""What becomes of single logits, in Triton, against fp64: the soft cap's tanh and its derivative, and the weights made again."""

import math

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from tileflash.kernels.triton.features import explicit_weights, own_lse, tanh  # noqa: E402


@triton.jit
def _both(x_ptr, tanh_ptr, derivative_ptr, BLOCK: tl.constexpr):
    positions = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value, derivative = tanh(tl.load(x_ptr + positions))
    tl.store(tanh_ptr + positions, value)
    tl.store(derivative_ptr + positions, derivative)


def test_both_have_few_roundings_from_0_to_far_beyond_the_cap(device: str) -> None:
    sizes = torch.cat([torch.logspace(-30, 1.6, 4000), torch.linspace(0.24, 0.26, 96)])  # 40 is the largest
    x = torch.cat([sizes, -sizes]).to(device)
    found = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    _both[(x.numel() // 1024,)](x, *found, BLOCK=1024)
    exact = torch.tanh(x.double()), torch.cosh(x.double()).pow(-2)  # 1 - tanh^2 would cancel in fp64, too
    for ours, theirs in zip(found, exact, strict=True):
        # exp(2 x) has the rounding of its argument: up to 2 * 40 half units
        assert ((ours.double() - theirs) / theirs).abs().max() < 60 * torch.finfo(torch.float32).eps


def test_infinity_is_the_cap_and_nan_stays(device: str) -> None:
    x = torch.tensor([torch.inf, -torch.inf, 1000.0, torch.nan], device=device)
    value, derivative = torch.empty_like(x), torch.empty_like(x)
    _both[(1,)](x, value, derivative, BLOCK=4)
    assert value[:3].tolist() == [1.0, -1.0, 1.0]
    assert derivative[:3].tolist() == [0.0, 0.0, 0.0]
    assert value[3].isnan()
    assert derivative[3].isnan()


@triton.jit
def _weights(logits_ptr, lse_ptr, weights_ptr, BLOCK: tl.constexpr, FEATURES: tl.constexpr):
    positions = tl.arange(0, BLOCK)
    lse = own_lse(tl.load(lse_ptr + positions), FEATURES)
    tl.store(weights_ptr + positions, explicit_weights(tl.load(logits_ptr + positions), lse))


def test_weights_made_again_are_at_most_1_and_never_nan_by_themselves(device: str) -> None:
    """The backward pass adds up products in another order than the forward pass: a logit may come out above its row's log-sum-exp, and
    at -1e9 the next number is 64 away, whose exp is 6e27."""
    infinity, nan = torch.inf, torch.nan
    lowest = torch.finfo(torch.float32).min
    pairs = [
        (-1e9 + 64, -1e9, 1.0), (1e30, 0.99e30, 1.0), (lowest, lowest, 1.0), (lowest, 3.0, 0.0), (lowest, 3e38, 0.0),
        (-1e9, -1e9 + 64, 1.6e-28), (2.0, 2.5, math.exp(-0.5)), (-infinity, 2.0, 0.0), (-infinity, -infinity, 0.0),
        (5.0, -infinity, 0.0), (5.0, infinity, 0.0), (nan, 1.0, nan), (1.0, nan, nan), (0.0, 0.0, 1.0), (-1.0, 80.0, math.exp(-81)),
        (88.0, 88.5, math.exp(-0.5)),
    ]  # fmt: skip
    logits, lse, want = (
        torch.tensor(values, dtype=torch.float32, device=device) for values in zip(*pairs, strict=True)
    )
    found = torch.full_like(logits, 7.0)
    _weights[(1,)](logits, lse, found, BLOCK=16, FEATURES=4)
    torch.testing.assert_close(found, want, rtol=2e-2, atol=1e-30, equal_nan=True)
    assert not bool((found > 1).any())
