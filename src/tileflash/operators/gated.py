"""The product act(gate) * up of a gated MLP (SwiGLU, GEGLU) in one pass forward and one backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tileflash.operators.choice import plain_eager, uses_triton

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


def swiglu(gate: Tensor, up: Tensor, *, backend: str = "auto") -> Tensor:
    """silu(gate) * up (Shazeer, 2020): `gated` with "silu"."""
    return gated(gate, up, "silu", backend=backend)


def gated(gate: Tensor, up: Tensor, activation: str, *, backend: str = "auto") -> Tensor:
    """act(gate) * up; activation "silu", "gelu_tanh" (GELU as GPT-2 has it) or "gelu" (by erf).

    gate and up [..., I] of one dtype, any strides (copied only where the last dimension is not contiguous) -> [..., I] in it. On
    Triton's way (see `linear_cross_entropy` for `backend`) computed in fp32 and rounded once; only gate and up are kept for the
    backward pass. Raises ValueError for what does not fit.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f'activation is "{activation}": it must be one of {", ".join(ACTIVATIONS)}')
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"up is {up.dtype} {tuple(up.shape)}: it must be as gate, {gate.dtype} {tuple(gate.shape)}")
    if not uses_triton(backend, gate.device, gate.dtype):
        return plain_gated(gate, up, activation)
    arguments = (_rows(gate), _rows(up), activation)
    if plain_eager(gate, up):
        return _DirectGated.apply(*arguments).view(gate.shape)
    return torch.ops.tileflash.gated(*arguments).view(gate.shape)


def plain_gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The same by PyTorch's operators."""
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def _rows(tensor: Tensor) -> Tensor:
    """[N, I] with contiguous rows: a view where there is one."""
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.reshape(1, 1)
    return rows if rows.stride(1) == 1 else rows.contiguous()


class _DirectGated(torch.autograd.Function):
    """The kernels without the operators' dispatch."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        from tileflash.kernels.triton.gated import gated_forward

        _setup_context(ctx, (gate, up, activation), None)
        return gated_forward(gate, up, activation)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        from tileflash.kernels.triton.gated import gated_backward

        # With create_graph=True the operator is needed: it refuses when the second derivative is taken.
        backward: Any = torch.ops.tileflash.gated_backward if torch.is_grad_enabled() else gated_backward
        return *backward(_rows(d_out), *ctx.saved_tensors, ctx.activation), None


@torch.library.custom_op("tileflash::gated", mutates_args=())
def _operator(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """`gated_forward` of the kernels as an operator."""
    from tileflash.kernels.triton.gated import gated_forward

    return gated_forward(gate, up, activation)


@_operator.register_fake
def _(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("tileflash::gated_backward", mutates_args=())
def _backward_operator(d_out: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """`gated_backward` of the kernels as an operator."""
    from tileflash.kernels.triton.gated import gated_backward

    return gated_backward(d_out, gate, up, activation)


@_backward_operator.register_fake
def _(d_out: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
    return *torch.ops.tileflash.gated_backward(_rows(d_out), *ctx.saved_tensors, ctx.activation), None


def _refuse(ctx: Any, *_: Tensor) -> None:
    raise RuntimeError('the kernels of gated have no second derivative; backend="plain" has')


_operator.register_autograd(_backward, setup_context=_setup_context)
_backward_operator.register_autograd(_refuse)
