"""Linear + cross entropy: the loss of hidden @ weight^T against targets, with logits that are never whole.

The gradients are made in the forward pass, while a chunk's logits are at hand: three matrix products in all, where making the logits
again in the backward pass would take four. Idea: Liger Kernel (Hsu et al., 2024, section 3.2).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from tileflash.operators.choice import compute_dtype, plain_eager, uses_triton
from tileflash.operators.linear_cross_entropy_chunks import Options, compute, scales_late

DEFAULT_MEMORY_BUDGET_BYTES = 512 * 2**20
_NO_SECOND_DERIVATIVE = (
    "linear_cross_entropy has no second derivative; torch.nn.functional.cross_entropy of torch.nn.functional.linear has"
)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    divisor: float | Tensor = 1.0,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    memory_budget_bytes: int = DEFAULT_MEMORY_BUDGET_BYTES,
    backend: str = "auto",
) -> Tensor:
    """Sum of the cross entropies of hidden @ weight^T against targets, divided by `divisor`; differentiable in hidden and weight.

    Args:
        hidden: [..., C], bf16, fp16, fp32 or fp64.
        weight: [V, C], of hidden's dtype or, under autocast, of any.
        targets: int64 [...], classes; those equal to `ignore_index` take no part.
        divisor: a number, or a tensor of one element on hidden's device, which is not waited for. Not differentiated.
        vocab_size: the classes are the first so many rows of `weight`; the rest is padding, whose gradient is 0. Default: V.
        label_smoothing: this share of each target is spread over all classes (Szegedy et al., 2016), as PyTorch does; classes whose
            logit is -inf are left out, so that the loss stays finite.
        z_loss: adds z_loss * logsumexp(logits)^2 for each target (Chowdhery et al., 2022, section 5).
        memory_budget_bytes: of the logits that exist at a time; at least one row's do.
        backend: "auto" (Triton's kernel on a GPU, else plain PyTorch), "triton", "plain".

    Products are computed in autocast's dtype where it is on, else in hidden's; softmax, loss and sums over chunks in fp32 (fp64 for
    fp64). Returns fp32 (fp64) []. A target out of range, or whose own logit is -inf, or a row of -inf alone, gives no finite loss.
    The gradient can be taken once: retain_graph=True does not allow a second backward pass. Raises ValueError for what does not fit.
    """
    dtype = compute_dtype(hidden.device, hidden.dtype)
    _check(hidden, weight, targets, vocab_size, label_smoothing, z_loss, memory_budget_bytes, dtype)
    for name, tensor in (("weight", weight), ("targets", targets), ("divisor", divisor)):
        if isinstance(tensor, Tensor) and tensor.device != hidden.device:
            raise ValueError(f"{name} is on {tensor.device}: it must be on hidden's {hidden.device}")
    if isinstance(divisor, Tensor) and divisor.numel() != 1:
        raise ValueError(f"divisor is {tuple(divisor.shape)}: it must be a number, or a tensor of one element")
    uses_triton(backend, hidden.device, dtype)  # refuses now what it would refuse later
    wide = torch.promote_types(dtype, torch.float32)
    if isinstance(divisor, Tensor):
        divisor = divisor.detach().to(wide).reshape(())
    else:
        divisor = torch.full((), float(divisor), dtype=wide, device=hidden.device)
    differentiated = torch.is_grad_enabled()
    options = Options(
        weight.shape[0] if vocab_size is None else vocab_size, ignore_index, float(label_smoothing), float(z_loss), dtype,
        memory_budget_bytes, backend, differentiated and hidden.requires_grad, differentiated and weight.requires_grad,
    )  # fmt: skip
    tensors = (hidden.reshape(-1, hidden.shape[-1]), weight, targets.reshape(-1), divisor)
    if not plain_eager(hidden, weight, targets, divisor):
        return torch.ops.tileflash.linear_cross_entropy(*tensors, *options)[0]
    if options.hidden_gradient or options.weight_gradient:
        return _DirectLoss.apply(*tensors, options)
    return compute(*tensors, options)[0]


def _check(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int | None, label_smoothing: float, z_loss: float,
    memory_budget_bytes: int, dtype: torch.dtype,
) -> None:  # fmt: skip
    if hidden.dim() < 1 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden is {tuple(hidden.shape)} and weight {tuple(weight.shape)}: they must be [..., C] and [V, C]"
        )
    if targets.shape != hidden.shape[:-1] or targets.dtype != torch.int64:
        raise ValueError(
            f"targets is {targets.dtype} {tuple(targets.shape)}: it must be int64 {tuple(hidden.shape[:-1])}"
        )
    if weight.dtype != hidden.dtype and not torch.is_autocast_enabled(hidden.device.type):
        raise ValueError(f"weight is {weight.dtype}: without autocast it must be hidden's {hidden.dtype}")
    if not dtype.is_floating_point:
        raise ValueError(f"hidden is {hidden.dtype}: it must be a floating dtype")
    if vocab_size is not None and not 1 <= vocab_size <= weight.shape[0]:
        raise ValueError(f"vocab_size is {vocab_size}: it must be 1 to {weight.shape[0]}, the rows of weight")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing}: it must be 0 to 1")
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"z_loss is {z_loss}: it must be finite and at least 0")
    if memory_budget_bytes < 1:
        raise ValueError(f"memory_budget_bytes is {memory_budget_bytes}: it must be at least 1")


class _DirectLoss(torch.autograd.Function):
    """The way without the operator's dispatch. The gradients wait in the context, and the backward pass gives them away."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, divisor: Tensor, options: Options) -> Tensor:
        loss, *gradients = compute(hidden, weight, targets, divisor, options)
        ctx.options, ctx.dtypes = options, (hidden.dtype, weight.dtype)
        # Not saved_for_backward: what is saved may be asked for again, and so must not be scaled in place.
        ctx.gradients = gradients
        ctx.save_for_backward(divisor)
        return loss

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # create_graph=True; the gradients are not connected to what they were made from
            raise RuntimeError(_NO_SECOND_DERIVATIVE)
        (divisor,) = ctx.saved_tensors
        if ctx.gradients is None:
            raise RuntimeError(
                "linear_cross_entropy has given its gradients away in an earlier backward pass; for a second one use "
                "torch.nn.functional.cross_entropy, or compute the loss again"
            )
        gradients, ctx.gradients = ctx.gradients, None
        factor = d_loss / divisor if scales_late(ctx.options.dtype) else d_loss
        asked = (ctx.options.hidden_gradient, ctx.options.weight_gradient)
        scaled = []
        for gradient, wanted, dtype in zip(gradients, asked, ctx.dtypes, strict=True):
            if wanted and gradient.numel():
                _scale(gradient, factor, ctx.options)
            scaled.append(gradient.to(dtype) if wanted else None)
        return *scaled, None, None, None


def _scale(gradient: Tensor, factor: Tensor, options: Options) -> None:
    if gradient.dtype != torch.float64 and uses_triton(options.backend, gradient.device, options.dtype):
        from tileflash.kernels.triton.cross_entropy import scale_in_place

        scale_in_place(gradient, factor)
    else:
        gradient.mul_(factor)


@torch.library.custom_op("tileflash::linear_cross_entropy", mutates_args=())
def _operator(
    hidden: Tensor, weight: Tensor, targets: Tensor, divisor: Tensor, vocab_size: int, ignore_index: int,
    label_smoothing: float, z_loss: float, dtype: torch.dtype, memory_budget_bytes: int, backend: str,
    hidden_gradient: bool, weight_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`compute` as an operator: for torch.compile, fake tensors and whoever counts FLOPs."""
    options = Options(
        vocab_size, ignore_index, label_smoothing, z_loss, dtype, memory_budget_bytes, backend, hidden_gradient, weight_gradient,
    )  # fmt: skip
    return compute(hidden, weight, targets, divisor, options)


@_operator.register_fake
def _(
    hidden: Tensor, weight: Tensor, targets: Tensor, divisor: Tensor, vocab_size: int, ignore_index: int,
    label_smoothing: float, z_loss: float, dtype: torch.dtype, memory_budget_bytes: int, backend: str,
    hidden_gradient: bool, weight_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    late = scales_late(dtype)
    gradients = (
        tensor.new_empty(tensor.shape if wanted else (0,), dtype=torch.float32 if late else tensor.dtype)
        for tensor, wanted in ((hidden, hidden_gradient), (weight, weight_gradient))
    )
    return divisor.new_empty(()), *gradients  # type: ignore[return-value]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, weight, _, divisor, *options = inputs
    ctx.set_materialize_grads(False)
    ctx.options, ctx.dtypes = Options(*options), (hidden.dtype, weight.dtype)
    ctx.save_for_backward(divisor, *output[1:])


def _backward(ctx: Any, d_loss: Tensor | None, *d_gradients: Tensor | None) -> tuple[Any, ...]:
    if any(gradient is not None for gradient in d_gradients):
        raise RuntimeError(_NO_SECOND_DERIVATIVE)
    divisor, *gradients = ctx.saved_tensors
    nothing = (None,) * (2 + len(Options._fields))
    if d_loss is None:
        return None, None, *nothing
    factor = d_loss / divisor if scales_late(ctx.options.dtype) else d_loss
    asked = (ctx.options.hidden_gradient, ctx.options.weight_gradient)
    scaled = (
        (gradient * factor).to(dtype) if wanted else None
        for gradient, wanted, dtype in zip(gradients, asked, ctx.dtypes, strict=True)
    )
    return *scaled, *nothing


_operator.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.tileflash.linear_cross_entropy)
def _flops(hidden: Any, weight: Any, targets: Any, divisor: Any, *options: Any, **_: Any) -> int:
    asked = Options(*options)
    return 2 * hidden[0] * hidden[1] * weight[0] * (1 + asked.hidden_gradient + asked.weight_gradient)
