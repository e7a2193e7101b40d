"""Cross entropy of rows of logits: the loss of each row, and the gradient written over the logits.

A row is read twice. The first pass makes its maximum and its sum of exponentials, the second writes the gradient; it goes through the
row backwards, so that it begins with what the first pass left in the L2 cache.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tileflash.kernels.compat import PreparedLaunch, current_device, remember
from tileflash.kernels.triton.tile import LN_2, LOG2_E

LARGEST_BLOCK = 8192  # columns in one tile: 16 for each thread of 16 warps
COLUMN_ALIGNMENT = 16  # so many columns are read at once; a row's stride is a multiple of it
_SCALE_BLOCK = 4096
_SCALE_PROGRAMS = 1024


@triton.jit
def _row_tile(row_ptr, start, classes, columns, LANES: tl.constexpr):
    """Logits start .. start + 8 * LANES of a row in fp32, -inf beyond `classes`, with their columns; both [LANES, 8]."""
    i_columns = start + tl.arange(0, LANES)[:, None] * 8 + tl.arange(0, 8)[None, :]
    # The mask's edge is a multiple of 16 columns, not the number of classes: else every element would be a load of its own.
    b_logits = tl.load(row_ptr + i_columns, mask=i_columns < columns, other=0.0).to(tl.float32)
    return tl.where(i_columns < classes, b_logits, float("-inf")), i_columns


@triton.jit
def cross_entropy_kernel(
    logits_ptr, targets_ptr, divisor_ptr, losses_ptr, stride_row, classes, columns, ignored, smoothing, z_loss,
    LANES: tl.constexpr, HAS_SMOOTHING: tl.constexpr, MAKE_GRADIENT: tl.constexpr,
):  # fmt: skip
    """Row i of logits [N, columns]: losses[i], and with MAKE_GRADIENT d_logits[i] / divisor in place of logits[i].

    Columns from `classes` on are padding: read as -inf, left with the gradient 0. One program a row.
    """
    i_row = tl.program_id(0)
    row_ptr = logits_ptr + tl.cast(i_row, tl.int64) * stride_row
    BLOCK: tl.constexpr = 8 * LANES
    blocks = (columns + BLOCK - 1) // BLOCK
    target = tl.load(targets_ptr + i_row)
    if target == ignored:
        tl.store(losses_ptr + i_row, 0.0)
        if MAKE_GRADIENT:
            for i_block in range(blocks):
                i_columns = i_block * BLOCK + tl.arange(0, LANES)[:, None] * 8 + tl.arange(0, 8)[None, :]
                b_zeros = tl.zeros([LANES, 8], dtype=logits_ptr.dtype.element_ty)
                tl.store(row_ptr + i_columns, b_zeros, mask=i_columns < columns)
        return
    known = (target >= 0) & (target < classes)
    # Read before the second pass overwrites it; the reductions between the two wait for every thread.
    target_logit = tl.load(row_ptr + target, mask=known, other=float("nan")).to(tl.float32)

    # Each lane of 8 columns keeps its own maximum and sum, so that the loop has no barrier and one exponential an element.
    b_max = tl.full([LANES], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([LANES], dtype=tl.float32)
    b_total = tl.zeros([LANES], dtype=tl.float32)
    b_count = tl.zeros([LANES], dtype=tl.float32)
    for i_block in range(blocks):
        b_logits, _ = _row_tile(row_ptr, i_block * BLOCK, classes, columns, LANES)  # [LANES, 8]
        b_new = tl.maximum(b_max, tl.max(b_logits, axis=1))
        b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)  # -inf - (-inf) is NaN
        # Differences first: a large logit times log2 e may be beyond fp32.
        b_powers = tl.exp2((b_logits - b_shift[:, None]) * LOG2_E)
        b_sum = b_sum * tl.exp2((b_max - b_shift) * LOG2_E) + tl.sum(b_powers, axis=1)
        b_max = b_new
        if HAS_SMOOTHING:
            b_possible = b_logits != float("-inf")
            b_total += tl.sum(tl.where(b_possible, b_logits, 0.0), axis=1)
            b_count += tl.sum(b_possible.to(tl.float32), axis=1)
    row_max = tl.max(b_max, axis=0)
    row_shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    row_sum = tl.sum(b_sum * tl.exp2((b_max - row_shift) * LOG2_E), axis=0)
    log2_sum = tl.log2(row_sum)
    lse = row_shift + log2_sum * LN_2

    loss = log2_sum * LN_2 - (target_logit - row_shift)
    spread = 0.0
    if HAS_SMOOTHING:
        count = tl.sum(b_count, axis=0)
        spread = smoothing / count
        loss = (1.0 - smoothing) * loss + smoothing * lse - spread * tl.sum(b_total, axis=0)
    loss += z_loss * lse * lse
    tl.store(losses_ptr + i_row, loss)

    if MAKE_GRADIENT:
        inverse = 1.0 / tl.load(divisor_ptr)
        weight = (1.0 + 2.0 * z_loss * lse) * inverse
        for i_reverse in range(blocks):
            start = (blocks - 1 - i_reverse) * BLOCK
            b_logits, i_columns = _row_tile(row_ptr, start, classes, columns, LANES)  # [LANES, 8]
            b_gradient = tl.exp2((b_logits - row_shift) * LOG2_E - log2_sum) * weight
            if HAS_SMOOTHING:
                b_gradient -= tl.where(b_logits != float("-inf"), spread * inverse, 0.0)
                b_gradient -= tl.where(i_columns == target, (1.0 - smoothing) * inverse, 0.0)
            else:
                b_gradient -= tl.where(i_columns == target, inverse, 0.0)
            # What is not a number must not reach the padding, whose rows of the weight's gradient stay 0.
            b_gradient = tl.where(i_columns < classes, b_gradient, 0.0)
            tl.store(row_ptr + i_columns, b_gradient.to(logits_ptr.dtype.element_ty), mask=i_columns < columns)


@triton.jit
def scale_kernel(values_ptr, factor_ptr, number, programs, BLOCK: tl.constexpr):
    """values[:number] *= factor, in place; nothing is read or written where the factor is 1."""
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        begin = tl.cast(tl.program_id(0), tl.int64) * BLOCK
        for start in range(begin, number, tl.cast(programs, tl.int64) * BLOCK):
            i_values = start + tl.arange(0, BLOCK)
            inside = i_values < number
            b_values = tl.load(values_ptr + i_values, mask=inside).to(tl.float32)
            tl.store(values_ptr + i_values, (b_values * factor).to(values_ptr.dtype.element_ty), mask=inside)


_launches: dict[Any, PreparedLaunch] = {}


def lanes_and_warps(columns: int) -> tuple[int, int]:
    """Lanes of 8 columns in a tile, and warps of a program, for rows of so many columns."""
    block = min(LARGEST_BLOCK, max(256, triton.next_power_of_2(columns)))
    return block // 8, max(1, block // 512)


def cross_entropy_rows(
    logits: Tensor, targets: Tensor, divisor: Tensor, losses: Tensor, classes: int, ignored: int, smoothing: float,
    z_loss: float, make_gradient: bool,
) -> None:  # fmt: skip
    """Fill `losses` [N] fp32; with `make_gradient` turn logits [N, columns] into their gradient divided by `divisor`.

    Rows of `logits` (bf16, fp16 or fp32) lie a multiple of 16 elements apart, at least `columns`; what is behind the columns in a row
    may be overwritten. `targets` [N] int64; `divisor` fp32, no dimension. Nothing waits for the GPU.
    """
    rows, columns = logits.shape
    stride = logits.stride(0)
    wide = -(-columns // COLUMN_ALIGNMENT) * COLUMN_ALIGNMENT
    assert stride % COLUMN_ALIGNMENT == 0
    assert stride >= wide
    assert logits.stride(1) == 1
    key = (rows, columns, stride, logits.dtype, logits.device, classes, ignored, smoothing, z_loss, make_gradient)
    launch = _launches.get(key)
    if launch is None:
        lanes, warps = lanes_and_warps(columns)
        scalars = (
            stride,
            classes,
            wide,
            ignored,
            float(smoothing),
            float(z_loss),
            lanes,
            smoothing != 0,
            make_gradient,
        )
        launch = remember(_launches, key, PreparedLaunch(cross_entropy_kernel, rows, scalars, warps, 2))
    with current_device(logits):
        launch((logits, targets, divisor, losses), logits.get_device())


def scale_in_place(values: Tensor, factor: Tensor) -> None:
    """values (contiguous, any shape) *= factor (fp32, no dimension), without a look at the host and for free where it is 1."""
    number = values.numel()
    key = (number, values.dtype, values.device)
    launch = _launches.get(key)
    if launch is None:
        programs = min(_SCALE_PROGRAMS, -(-number // _SCALE_BLOCK))
        launch = remember(
            _launches, key, PreparedLaunch(scale_kernel, programs, (number, programs, _SCALE_BLOCK), 8, 1)
        )
    with current_device(values):
        launch((values, factor), values.get_device())


def supports(dtype: torch.dtype) -> bool:
    """Whether the kernels take logits of this dtype."""
    return dtype in (torch.bfloat16, torch.float16, torch.float32)
