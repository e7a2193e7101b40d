"""The soft cap's tanh and its derivative, in Triton, against fp64."""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from tileflash.kernels.triton.features import tanh  # noqa: E402


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
