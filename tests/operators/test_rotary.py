"""The rotary embedding of q and k against the models' own; on a CPU the kernel runs in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tileflash.models.layers import RotaryEmbedding
from tileflash.models.operators import apply_rotary
from tileflash.operators.rotary import rotary

Angles = tuple[Tensor, Tensor]


def angles(device: str, length: int, head_dim: int) -> tuple[Angles, Angles]:
    """cos and sin for `rotary` [S, D / 2], and as the models have them [S, 1, D]."""
    cos, sin = RotaryEmbedding(head_dim, 500_000.0, None).to(device)(length)
    return (cos[:, 0, : head_dim // 2], sin[:, 0, head_dim // 2 :]), (cos, sin)


def inputs(device: str, dtype: torch.dtype, heads: tuple[int, int], length: int, head_dim: int) -> Tensor:
    """q, k and v of 2 sequences side by side, as a projection leaves them: [2, S, Hq + 2 Hk, D]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, length, heads[0] + 2 * heads[1], head_dim, generator=generator).to(device, dtype)


@pytest.mark.parametrize("backend", ["plain", "triton"])
@pytest.mark.parametrize(
    ("dtype", "heads", "length", "head_dim"),
    [
        (torch.float32, (4, 2), 7, 16), (torch.bfloat16, (3, 1), 5, 24), (torch.float16, (1, 1), 1, 2), (torch.bfloat16, (2, 2), 3, 128),
    ],
)  # fmt: skip
def test_it_is_what_the_models_do(
    device: str, poisoned_memory: None, backend: str, dtype: torch.dtype, heads: tuple[int, int], length: int, head_dim: int
) -> None:  # fmt: skip
    found = []
    qkv = inputs(device, dtype, heads, length, head_dim).requires_grad_()
    ours, theirs = angles(device, length, head_dim)
    for fused in (True, False):
        q, k, v = qkv.split([heads[0], heads[1], heads[1]], dim=2)
        if fused:
            q, k = rotary(q, k, *ours, backend=backend)
        else:
            q, k = apply_rotary(q, *theirs), apply_rotary(k, *theirs)
        weights = torch.randn(2, length, 64, head_dim, generator=torch.Generator().manual_seed(1)).to(device, dtype)
        loss = (q * weights[:, :, : heads[0]]).sum() + (k * weights[:, :, : heads[1]]).sum() + v.sum()
        found.append((q.detach(), k.detach(), torch.autograd.grad(loss, qkv)[0]))
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[
        dtype
    ]  # an fma may round the other way
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype == dtype
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_any_strides(device: str) -> None:
    (cos, sin), _ = angles(device, 6, 16)
    q = torch.randn(2, 3, 6, 16, generator=torch.Generator().manual_seed(0)).to(device).transpose(1, 2)
    k = (
        torch.randn(16, 2, 6, 1, generator=torch.Generator().manual_seed(1))
        .to(device)
        .permute(1, 2, 3, 0)
        .expand(2, 6, 4, 16)
    )
    for one, other in zip(rotary(q, k, cos, sin, backend="triton"), rotary(q, k, cos, sin), strict=True):
        torch.testing.assert_close(one, other)


def test_turning_back_is_the_gradient_of_any_order(device: str) -> None:
    (cos, sin), _ = angles(device, 4, 8)
    q = torch.randn(1, 4, 2, 8, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    out, _ = rotary(q, q.detach(), cos, sin, backend="triton")
    gradient = torch.autograd.grad(out.square().sum() / 2, q, create_graph=True)[0]
    torch.testing.assert_close(gradient, q)
    torch.testing.assert_close(torch.autograd.grad(gradient.square().sum() / 2, q)[0], q)


def test_compiled_whole_it_is_the_same(device: str) -> None:
    (cos, sin), _ = angles(device, 4, 8)

    def function(q: Tensor, k: Tensor) -> Tensor:
        q, k = rotary(q, k, cos, sin, backend="triton")
        return (q * k).square().sum()

    found = []
    for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        q, k = (torch.randn(1, 4, 2, 8, generator=torch.Generator().manual_seed(i)).to(device) for i in range(2))
        run(q.requires_grad_(), k.requires_grad_()).backward()
        found.append((q.grad, k.grad))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_the_operator_is_registered_right_and_empty_is_empty() -> None:
    (cos, sin), _ = angles("cpu", 4, 8)
    q = torch.randn(1, 4, 2, 8)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.tileflash.rotary, (q, q[:, :, :1], cos, sin, False), test_utils=tests)
    assert rotary(q[:0], q[:0], cos, sin, backend="triton")[0].shape == (0, 4, 2, 8)


def test_what_does_not_fit_is_told() -> None:
    (cos, sin), _ = angles("cpu", 4, 8)
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"they must be .B, S, Hq, D. and .B, S, Hk, D. with an even D"):
        rotary(q, q[..., 1:], cos, sin)
    with pytest.raises(ValueError, match=r"sin is torch.float64 \(4, 4\): it must be float32 \(4, 4\)"):
        rotary(q, q, cos, sin.double())
