"""The rotary position embedding of q and k in one launch, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tileflash.operators.choice import plain_eager, uses_triton


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """q and k with each pair (i, i + D / 2) of dimensions turned by its position's angle (Su et al., 2021; Hugging Face's layout).

    q [B, S, Hq, D] and k [B, S, Hk, D], any strides (copied only where the last dimension is not contiguous) -> the same, contiguous.
    cos and sin [S, D / 2] fp32; not differentiated. Products in fp32 at least. `backend` as in `linear_cross_entropy`. Raises
    ValueError for what does not fit.
    """
    half = q.shape[-1] // 2
    if q.dim() != 4 or k.dim() != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3] or q.shape[3] % 2:
        raise ValueError(
            f"q is {tuple(q.shape)} and k {tuple(k.shape)}: they must be [B, S, Hq, D] and [B, S, Hk, D] with an even D"
        )
    for name, angles in (("cos", cos), ("sin", sin)):
        if angles.shape != (q.shape[1], half) or angles.dtype != torch.float32:
            raise ValueError(
                f"{name} is {angles.dtype} {tuple(angles.shape)}: it must be float32 ({q.shape[1]}, {half})"
            )
    if not uses_triton(backend, q.device, torch.promote_types(q.dtype, k.dtype)):
        return plain_rotary(q, cos, sin), plain_rotary(k, cos, sin)
    arguments = (_rows(q), _rows(k), _rows(cos), _rows(sin))
    if plain_eager(q, k, cos, sin):
        return _DirectRotary.apply(*arguments)
    return torch.ops.tileflash.rotary(*arguments, False)


def plain_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, S, H, D] rotated, by PyTorch's operators."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]  # [S, 1, D / 2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class _DirectRotary(torch.autograd.Function):
    """The kernel without the operator's dispatch."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        from tileflash.kernels.triton.rotary import rotate

        ctx.save_for_backward(cos, sin)
        return rotate(q, k, cos, sin, False)

    @staticmethod
    def backward(ctx: Any, d_q: Tensor, d_k: Tensor) -> tuple[Any, ...]:
        from tileflash.kernels.triton.rotary import rotate

        # A rotation is linear: with create_graph=True the operator is its own derivative, of any order.
        turn: Any = torch.ops.tileflash.rotary if torch.is_grad_enabled() else rotate
        return *turn(_rows(d_q), _rows(d_k), *ctx.saved_tensors, True), None, None


@torch.library.custom_op("tileflash::rotary", mutates_args=())
def _operator(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> tuple[Tensor, Tensor]:
    """`rotate` of the kernels as an operator."""
    from tileflash.kernels.triton.rotary import rotate

    return rotate(q, k, cos, sin, backward)


@_operator.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[2:4])
    ctx.turned = inputs[4]


def _backward(ctx: Any, d_q: Tensor, d_k: Tensor) -> tuple[Any, ...]:
    turned = torch.ops.tileflash.rotary(_rows(d_q), _rows(d_k), *ctx.saved_tensors, not ctx.turned)
    return *turned, None, None, None


_operator.register_autograd(_backward, setup_context=_setup_context)
