"""LayerNorm and RMSNorm with the residual add in front: one pass over memory forward, one backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tileflash.operators.choice import compute_dtype, plain_eager, uses_triton

_LARGEST_WIDTH = 16384  # of the kernels


def layer_norm(
    x: Tensor, update: Tensor | None, weight: Tensor, bias: Tensor | None, epsilon: float, *, update_bias: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(x + update, its LayerNorm): the residual stream after an update, and what the next sub-layer reads (Ba et al., 2016).

    x and update [..., C], each bf16, fp16, fp32 or fp64, update None for no add; weight and bias (None: none) [C];
    update_bias [C] is added with the update, so that the matrix product before needs no bias, nor a launch for its gradient. The
    sum has the wider dtype of the two, the norm autocast's dtype where it is on, else the sum's. Statistics in fp32 at least.
    Differentiable in all tensors through both results. `backend` as in `linear_cross_entropy`. Raises ValueError for shapes that do not
    fit.
    """
    return _norm(x, update, weight, bias, epsilon, True, backend, update_bias)


def rms_norm(
    x: Tensor, update: Tensor | None, weight: Tensor, epsilon: float, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """(x + update, its RMSNorm), as `layer_norm`, with neither mean nor bias (Zhang and Sennrich, 2019)."""
    return _norm(x, update, weight, None, epsilon, False, backend)


def plain_norm(
    x: Tensor, update: Tensor | None, weight: Tensor, bias: Tensor | None, epsilon: float, centered: bool,
    update_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same by PyTorch's operators, which know the derivatives, of any order."""
    if update_bias is not None:
        assert update is not None
        update = update + update_bias.to(update.dtype)
    stream = x if update is None else x + update
    wide = torch.promote_types(stream.dtype, torch.float32)
    dtype = compute_dtype(stream.device, stream.dtype)
    shape = (stream.shape[-1],)
    with torch.autocast(x.device.type, enabled=False):
        values, gain = stream.to(wide), weight.to(wide)
        if centered:
            normed = F.layer_norm(values, shape, gain, None if bias is None else bias.to(wide), epsilon)
        else:
            normed = F.rms_norm(values, shape, gain, epsilon)
    return stream, normed.to(dtype)


def _norm(
    x: Tensor, update: Tensor | None, weight: Tensor, bias: Tensor | None, epsilon: float, centered: bool, backend: str,
    update_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    width = x.shape[-1]
    if update is not None and update.shape != x.shape:
        raise ValueError(f"update is {tuple(update.shape)}: it must be x's {tuple(x.shape)}")
    if update_bias is not None and update is None:
        raise ValueError("update_bias is given and update is not: there must be both")
    for name, tensor in (("weight", weight), ("bias", bias), ("update_bias", update_bias)):
        if tensor is not None and tensor.shape != (width,):
            raise ValueError(f"{name} is {tuple(tensor.shape)}: it must be ({width},)")
    widest = x.dtype if update is None else torch.promote_types(x.dtype, update.dtype)
    if not uses_triton(backend, x.device, widest) or width > _LARGEST_WIDTH:
        return plain_norm(x, update, weight, bias, epsilon, centered, update_bias)
    rows = _rows(x)
    added = None if update is None else _rows(update)
    shift, added_bias = (None if tensor is None else tensor.contiguous() for tensor in (bias, update_bias))
    dtype = compute_dtype(x.device, widest)
    arguments = (rows, added, weight.contiguous(), shift, epsilon, centered, dtype, added_bias)
    if plain_eager(x, update, weight, bias, update_bias):
        stream, out = _DirectNorm.apply(*arguments)
    else:
        stream, out, *_ = torch.ops.tileflash.norm(*arguments)
    return x if update is None else stream.view(x.shape), out.view(x.shape)


def _rows(tensor: Tensor) -> Tensor:
    """[N, C] with contiguous rows: a view where there is one."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, update, weight, bias = inputs[:4]
    update_bias = inputs[7]
    stream, _, mean, rstd = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x if update is None else stream, weight, mean, rstd)
    ctx.update_dtype = None if update is None else update.dtype
    ctx.x_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
    ctx.update_bias_dtype = None if update_bias is None else update_bias.dtype


def _differentiate(ctx: Any, d_stream: Tensor | None, d_out: Tensor | None, backward: Any) -> tuple[Any, ...]:
    """Gradients of the eight arguments by `backward`, which has the arguments of `norm_backward`."""
    stream, weight, mean, rstd = ctx.saved_tensors
    if d_stream is not None and d_stream.numel() == 0:
        d_stream = None
    if d_out is None:
        d_out = torch.zeros_like(stream)
    d_out, d_stream = (None if tensor is None else _rows(tensor) for tensor in (d_out, d_stream))
    update_dtype = ctx.x_dtype if ctx.update_dtype is None else ctx.update_dtype
    has_bias, has_update_bias = ctx.bias_dtype is not None, ctx.update_bias_dtype is not None
    d_x, d_update, d_parameters = backward(
        d_out, d_stream, stream, weight, mean, rstd, update_dtype, ctx.x_dtype, has_bias, has_update_bias
    )
    if ctx.update_dtype is None:
        d_update = None
    elif update_dtype == ctx.x_dtype:
        d_update = d_x
    d_bias = d_parameters[1].to(ctx.bias_dtype) if has_bias else None
    d_update_bias = d_parameters[-1].to(ctx.update_bias_dtype) if has_update_bias else None
    return d_x, d_update, d_parameters[0], d_bias, None, None, None, d_update_bias


class _DirectNorm(torch.autograd.Function):
    """The kernels without the operators' dispatch."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        from tileflash.kernels.triton.norm import norm_forward

        output = norm_forward(*arguments)
        _setup_context(ctx, arguments, output)
        return output[:2]

    @staticmethod
    def backward(ctx: Any, d_stream: Tensor | None, d_out: Tensor | None) -> tuple[Any, ...]:
        from tileflash.kernels.triton.norm import norm_backward

        # With create_graph=True the operator is needed: it refuses when the second derivative is taken.
        operator = torch.ops.tileflash.norm_backward
        return _differentiate(ctx, d_stream, d_out, operator if torch.is_grad_enabled() else norm_backward)


@torch.library.custom_op("tileflash::norm", mutates_args=())
def _operator(
    x: Tensor, update: Tensor | None, weight: Tensor, bias: Tensor | None, epsilon: float, centered: bool, dtype: torch.dtype,
    update_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`norm_forward` of the kernels as an operator."""
    from tileflash.kernels.triton.norm import norm_forward

    return norm_forward(x, update, weight, bias, epsilon, centered, dtype, update_bias)


@_operator.register_fake
def _(
    x: Tensor, update: Tensor | None, weight: Tensor, bias: Tensor | None, epsilon: float, centered: bool, dtype: torch.dtype,
    update_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rows = x.shape[0]
    stream = (
        x.new_empty(0) if update is None else x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, update.dtype))
    )
    return (
        stream, x.new_empty(x.shape, dtype=dtype), x.new_empty(rows if centered else 0, dtype=torch.float32),
        x.new_empty(rows, dtype=torch.float32),
    )  # fmt: skip


@torch.library.custom_op("tileflash::norm_backward", mutates_args=())
def _backward_operator(
    d_out: Tensor, d_stream: Tensor | None, stream: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, update_dtype: torch.dtype,
    x_dtype: torch.dtype, has_bias: bool, has_update_bias: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`norm_backward` of the kernels as an operator."""
    from tileflash.kernels.triton.norm import norm_backward

    return norm_backward(d_out, d_stream, stream, weight, mean, rstd, update_dtype, x_dtype, has_bias, has_update_bias)


@_backward_operator.register_fake
def _(
    d_out: Tensor, d_stream: Tensor | None, stream: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, update_dtype: torch.dtype,
    x_dtype: torch.dtype, has_bias: bool, has_update_bias: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    twice = update_dtype != x_dtype
    return (
        stream.new_empty(stream.shape, dtype=x_dtype), stream.new_empty(stream.shape if twice else (0,), dtype=update_dtype),
        weight.new_empty(1 + has_bias + has_update_bias, weight.shape[0]),
    )  # fmt: skip


def _backward(ctx: Any, d_stream: Tensor | None, d_out: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    return _differentiate(ctx, d_stream, d_out, torch.ops.tileflash.norm_backward)


def _refuse(ctx: Any, *_: Tensor) -> None:
    raise RuntimeError('the kernels of layer_norm and rms_norm have no second derivative; backend="plain" has')


_operator.register_autograd(_backward, setup_context=_setup_context)
_backward_operator.register_autograd(_refuse)
