"""Loss and gradients of linear + cross entropy, computed in chunks of rows, so that the logits are never whole."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tileflash.operators.choice import uses_triton

_STRIDE_ALIGNMENT = (
    64  # elements between rows of logits: what tensor cores and wide loads want, whatever the vocabulary
)
_ROW_ALIGNMENT = 128  # rows of a chunk: whole tiles of a matrix product


class Options(NamedTuple):
    """What `linear_cross_entropy` was asked for, in the order of the operator's schema."""

    vocab_size: int
    ignore_index: int
    label_smoothing: float
    z_loss: float
    dtype: torch.dtype  # of the matrix products and of the logits
    memory_budget_bytes: int
    backend: str
    hidden_gradient: bool
    weight_gradient: bool


def scales_late(dtype: torch.dtype) -> bool:
    """Whether the gradients are divided by the divisor only in the backward pass, where the loss's own gradient is known.

    A probability divided by tens of thousands of tokens is below what fp16 can hold; a loss scale, which fp16 comes with, brings it
    back only afterwards.
    """
    return dtype == torch.float16


def rows_per_chunk(rows: int, columns: int, itemsize: int, memory_budget_bytes: int) -> int:
    """Rows whose logits fill at most the budget (one row at least), in chunks of about the same size.

    A multiple of 128 where the budget has room for it.
    """
    stride = -(-columns // _STRIDE_ALIGNMENT) * _STRIDE_ALIGNMENT
    most = max(1, memory_budget_bytes // (stride * itemsize))
    if rows <= most:
        return max(rows, 1)
    if most < _ROW_ALIGNMENT:
        return most
    most = most // _ROW_ALIGNMENT * _ROW_ALIGNMENT
    equal = -(-rows // -(-rows // most))  # rows of a chunk when all have as many
    return min(most, -(-equal // _ROW_ALIGNMENT) * _ROW_ALIGNMENT)


@torch.no_grad()
def compute(
    hidden: Tensor, weight: Tensor, targets: Tensor, divisor: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, d_hidden, d_weight) of hidden [N, C], weight [V, C], targets int64 [N], divisor fp32 [].

    loss fp32 []; d_hidden [N, C] in hidden's dtype, d_weight [V, C] in weight's dtype (where `scales_late` both fp32 and not yet
    divided), each empty [0] where it was not asked for.
    """
    # Every dtype is chosen here; autocast would take products that are meant to be in fp32 down to bf16.
    with torch.autocast(hidden.device.type, enabled=False):
        return _compute(hidden, weight, targets, divisor, options)


def _compute(
    hidden: Tensor, weight: Tensor, targets: Tensor, divisor: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    late = scales_late(options.dtype)
    wide = torch.promote_types(options.dtype, torch.float32)
    rows, columns = hidden.shape[0], weight.shape[0]
    multiplied = weight.to(options.dtype)
    device = hidden.device
    d_hidden = torch.empty(
        hidden.shape if options.hidden_gradient else 0, dtype=torch.float32 if late else hidden.dtype, device=device
    )
    losses = torch.empty(rows, dtype=wide, device=device)
    chunk = rows_per_chunk(rows, columns, options.dtype.itemsize, options.memory_budget_bytes)
    # One chunk's product is rounded once in any case: to a bf16 weight's gradient at once, with no fp32 one beside it.
    alone = rows <= chunk and not late and weight.dtype == options.dtype
    d_weight = torch.empty(
        weight.shape if options.weight_gradient else 0, dtype=weight.dtype if alone else wide, device=device
    )
    stride = -(-columns // _STRIDE_ALIGNMENT) * _STRIDE_ALIGNMENT
    buffer = torch.empty(chunk, stride, dtype=options.dtype, device=device)
    make_gradient = options.hidden_gradient or options.weight_gradient
    gradient_divisor = torch.ones_like(divisor) if late else divisor
    if rows == 0 and options.weight_gradient:
        d_weight.zero_()
    for begin in range(0, rows, chunk):
        end = min(begin + chunk, rows)
        part = hidden[begin:end].to(options.dtype)  # [R, C]
        logits = buffer[: end - begin, :columns]  # [R, V]
        torch.mm(part, multiplied.t(), out=logits)
        _rows(logits, targets[begin:end], gradient_divisor, losses[begin:end], options, make_gradient)
        if options.hidden_gradient:
            _product(logits, multiplied, d_hidden[begin:end], add=False)
        if options.weight_gradient:
            _product(logits.t(), part, d_weight, add=begin > 0)
    loss = losses.sum() / divisor
    return loss, d_hidden, d_weight if late else d_weight.to(weight.dtype)


def _rows(
    logits: Tensor, targets: Tensor, divisor: Tensor, losses: Tensor, options: Options, make_gradient: bool
) -> None:
    """Losses of a chunk, and its gradient in place of its logits."""
    numbers = (options.vocab_size, options.ignore_index, options.label_smoothing, options.z_loss, make_gradient)
    if uses_triton(options.backend, logits.device, logits.dtype):
        from tileflash.kernels.triton.cross_entropy import cross_entropy_rows

        cross_entropy_rows(logits, targets, divisor, losses, *numbers)
    else:
        plain_rows(logits, targets, divisor, losses, *numbers)


def plain_rows(
    logits: Tensor, targets: Tensor, divisor: Tensor, losses: Tensor, classes: int, ignored: int, smoothing: float,
    z_loss: float, make_gradient: bool,
) -> None:  # fmt: skip
    """`cross_entropy_rows` of the kernels in plain PyTorch, in fp32 (fp64 for fp64): the formulas, to be read and compared with."""
    wide = logits[:, :classes].to(losses.dtype)  # [R, V]
    counted = targets != ignored
    known = (targets >= 0) & (targets < classes)
    index = torch.where(known, targets, 0)[:, None]
    largest = wide.amax(1)
    shift = torch.where(largest == -torch.inf, 0.0, largest)  # -inf - (-inf) is NaN
    shifted = wide - shift[:, None]
    log_sum = shifted.exp().sum(1).log()
    lse = shift + log_sum
    loss = log_sum - torch.where(known, shifted.gather(1, index)[:, 0], torch.nan)
    possible = wide != -torch.inf
    spread = smoothing / possible.sum(1, keepdim=True, dtype=wide.dtype) if smoothing else None
    if spread is not None:
        mean = torch.where(possible, wide, 0.0).sum(1) * spread[:, 0]
        loss = (1.0 - smoothing) * loss + smoothing * lse - mean
    loss = loss + z_loss * lse * lse
    losses.copy_(torch.where(counted, loss, 0.0))
    if not make_gradient:
        return
    gradient = torch.exp(shifted - log_sum[:, None]) * (1.0 + 2.0 * z_loss * lse)[:, None]
    if spread is not None:
        gradient -= possible * spread
    gradient.scatter_add_(1, index, known.to(gradient.dtype)[:, None] * (smoothing - 1.0))
    gradient /= divisor
    logits[:, :classes] = torch.where(counted[:, None], gradient, 0.0).to(logits.dtype)
    logits[:, classes:] = 0


def _product(a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
    """out = a @ b, or with `add` out += a @ b, rounded to out's dtype only at the end."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif not _multiplies_into_fp32(a.device.type) or out.dtype != torch.float32:
        product = a.to(out.dtype) @ b.to(out.dtype)
        out.add_(product) if add else out.copy_(product)
    elif not add:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    elif _adds_into_fp32(a.device.type):
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:
        out.add_(torch.mm(a, b, out_dtype=torch.float32))


@lru_cache
def _multiplies_into_fp32(device_type: str) -> bool:
    """Whether PyTorch multiplies bf16 matrices into an fp32 one; on a CPU it does not."""
    a = torch.zeros(16, 16, dtype=torch.bfloat16, device=device_type)
    try:
        torch.mm(a, a, out_dtype=torch.float32)
    except (NotImplementedError, RuntimeError, TypeError):  # the last: there is no such argument
        return False
    return True


@lru_cache
def _adds_into_fp32(device_type: str) -> bool:
    """Whether it also adds the product to an fp32 matrix: some versions want the summand in bf16."""
    a = torch.zeros(16, 16, dtype=torch.bfloat16, device=device_type)
    out = torch.zeros(16, 16, device=device_type)
    try:
        torch.addmm(out, a, a, out_dtype=torch.float32, out=out)
    except (NotImplementedError, RuntimeError, TypeError):  # the last: there is no such argument
        return False
    return True
