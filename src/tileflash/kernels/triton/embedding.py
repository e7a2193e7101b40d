"""Rows added to a matrix where tokens say, several to the same row in a fixed order: the gradient of an embedding."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tileflash.kernels.compat import PreparedLaunch, current_device, remember

ROWS, COLUMNS, WARPS = 16, 256, 4  # a tile of a run of equal tokens: 32 elements a thread


@triton.jit
def add_rows_kernel(sums_ptr, sorted_ptr, order_ptr, rows_ptr, number, C, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """sums[sorted[p]] += rows[order[p]] + ... over the run of equal tokens that begins at p, for COLUMNS columns; the program of a
    position inside a run does nothing."""
    blocks = (C + COLUMNS - 1) // COLUMNS
    position = tl.program_id(0) // blocks
    token = tl.load(sorted_ptr + position)
    before = tl.load(sorted_ptr + position - 1, mask=position > 0, other=-1)
    if token != before:
        i_columns = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
        inside = i_columns < C
        b_sum = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        start = position
        last = token
        while last == token:
            i_run = start + tl.arange(0, ROWS)
            b_tokens = tl.load(sorted_ptr + i_run, mask=i_run < number, other=-1)  # [ROWS]
            b_order = tl.load(order_ptr + i_run, mask=i_run < number, other=0)
            # Sorted: what is equal stands before what is not.
            seen = (b_tokens == token)[:, None] & inside[None, :]
            b_sum += tl.load(rows_ptr + b_order[:, None] * C + i_columns[None, :], mask=seen, other=0.0).to(tl.float32)
            start += ROWS
            last = tl.load(sorted_ptr + start, mask=start < number, other=-1)
        sum_ptr = sums_ptr + token * C + i_columns
        b_total = tl.load(sum_ptr, mask=inside, other=0.0).to(tl.float32) + tl.sum(b_sum, axis=0)
        tl.store(sum_ptr, b_total.to(sums_ptr.dtype.element_ty), mask=inside)


_launches: dict[Any, PreparedLaunch] = {}


def add_rows(sums: Tensor, tokens: Tensor, rows: Tensor) -> None:
    """sums[tokens[i]] += rows[i], in fp32, rounded once; the same bits from run to run.

    sums [V, C] and rows [N, C], contiguous, bf16, fp16 or fp32 each; tokens int64 [N], all within [0, V).
    """
    if rows.numel() == 0:
        return
    ordered, order = torch.sort(tokens, stable=True)
    number, width = rows.shape
    key = (number, width, sums.dtype, rows.dtype, rows.device)
    launch = _launches.get(key)
    if launch is None:
        grid = number * triton.cdiv(width, COLUMNS)
        launch = remember(
            _launches, key, PreparedLaunch(add_rows_kernel, grid, (number, width, ROWS, COLUMNS), WARPS, 1)
        )
    with current_device(rows):
        launch((sums, ordered, order, rows), rows.get_device())
