"""LayerNorm and RMSNorm of rows, with the residual add in front of them: one kernel forward, one backward.

Statistics and sums are in fp32. Backward, a program walks over rows and keeps its part of the gradients of weight and bias; the parts
are added afterwards in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tileflash.kernels.compat import PreparedLaunch, current_device, remember

LARGEST_WIDTH = 16384  # a row is one tile
_CPU_PROGRAMS = 3  # in the interpreter: a few, so that tests walk


@triton.jit
def norm_forward_kernel(
    x_ptr, update_ptr, weight_ptr, bias_ptr, update_bias_ptr, stream_ptr, out_ptr, mean_ptr, rstd_ptr, stride_x, stride_update, C,
    epsilon, BLOCK: tl.constexpr, CENTERED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_UPDATE: tl.constexpr,
    HAS_UPDATE_BIAS: tl.constexpr,
):  # fmt: skip
    """One row: stream = x + update (+ update_bias), out = norm(stream) * weight + bias. CENTERED: LayerNorm, else RMSNorm."""
    i_row = tl.cast(tl.program_id(0), tl.int64)
    i_columns = tl.arange(0, BLOCK)
    inside = i_columns < C
    b_stream = tl.load(x_ptr + i_row * stride_x + i_columns, mask=inside, other=0.0)  # [BLOCK]
    if HAS_UPDATE:
        b_update = tl.load(update_ptr + i_row * stride_update + i_columns, mask=inside, other=0.0)
        b_sum = b_stream.to(tl.float32) + b_update.to(tl.float32)
        if HAS_UPDATE_BIAS:
            b_sum += tl.load(update_bias_ptr + i_columns, mask=inside, other=0.0).to(tl.float32)
        # Rounded to what is stored, so that the backward pass sees the same numbers.
        b_stream = b_sum.to(stream_ptr.dtype.element_ty)
        tl.store(stream_ptr + i_row * C + i_columns, b_stream, mask=inside)
    b_values = b_stream.to(tl.float32)
    if CENTERED:
        mean = tl.sum(b_values, axis=0) / C
        tl.store(mean_ptr + i_row, mean)
        b_values = tl.where(inside, b_values - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(b_values * b_values, axis=0) / C + epsilon)
    tl.store(rstd_ptr + i_row, rstd)
    b_out = b_values * rstd * tl.load(weight_ptr + i_columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        b_out += tl.load(bias_ptr + i_columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + i_row * C + i_columns, b_out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward_kernel(
    d_out_ptr, d_stream_ptr, stream_ptr, weight_ptr, mean_ptr, rstd_ptr, d_x_ptr, d_update_ptr, d_weight_ptr, d_bias_ptr,
    d_update_bias_ptr, stride_d_out, stride_d_stream, stride_stream, rows, programs, C,
    BLOCK: tl.constexpr, CENTERED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_D_STREAM: tl.constexpr, HAS_D_UPDATE: tl.constexpr,
    HAS_UPDATE_BIAS: tl.constexpr,
):  # fmt: skip
    """Rows i, i + programs, ...: the gradient of x and of the update (the same, in its own dtype), and this program's part
    [C] of the gradients of weight, bias and the update's bias."""
    i_program = tl.program_id(0)
    i_columns = tl.arange(0, BLOCK)
    inside = i_columns < C
    b_weight = tl.load(weight_ptr + i_columns, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    b_d_weight = tl.zeros([BLOCK], dtype=tl.float32)
    b_d_bias = tl.zeros([BLOCK], dtype=tl.float32)
    b_d_update_bias = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(i_program, rows, programs):
        i_row = tl.cast(row, tl.int64)
        b_d_out = tl.load(d_out_ptr + i_row * stride_d_out + i_columns, mask=inside, other=0.0).to(tl.float32)
        b_values = tl.load(stream_ptr + i_row * stride_stream + i_columns, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + i_row)
        if CENTERED:
            b_values = tl.where(inside, b_values - tl.load(mean_ptr + i_row), 0.0)
        b_normed = b_values * rstd
        b_d_weight += b_d_out * b_normed
        b_d_normed = b_d_out * b_weight
        b_d_x = b_d_normed - b_normed * (tl.sum(b_d_normed * b_normed, axis=0) / C)
        if CENTERED:
            b_d_x -= tl.sum(b_d_normed, axis=0) / C
        if HAS_BIAS:
            b_d_bias += b_d_out
        b_d_x *= rstd
        if HAS_D_STREAM:
            b_d_x += tl.load(d_stream_ptr + i_row * stride_d_stream + i_columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_UPDATE_BIAS:
            b_d_update_bias += b_d_x
        tl.store(d_x_ptr + i_row * C + i_columns, b_d_x.to(d_x_ptr.dtype.element_ty), mask=inside)
        if HAS_D_UPDATE:
            tl.store(d_update_ptr + i_row * C + i_columns, b_d_x.to(d_update_ptr.dtype.element_ty), mask=inside)
    tl.store(d_weight_ptr + tl.cast(i_program, tl.int64) * C + i_columns, b_d_weight, mask=inside)
    if HAS_BIAS:
        tl.store(d_bias_ptr + tl.cast(i_program, tl.int64) * C + i_columns, b_d_bias, mask=inside)
    if HAS_UPDATE_BIAS:
        tl.store(d_update_bias_ptr + tl.cast(i_program, tl.int64) * C + i_columns, b_d_update_bias, mask=inside)


@triton.jit
def add_parts_kernel(parts_ptr, sums_ptr, programs, C, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """sums[k] [C], in its own dtype, of parts[k] [programs, C], in a fixed order; a program for each k and COLUMNS columns."""
    blocks = (C + COLUMNS - 1) // COLUMNS
    i_sum = tl.program_id(0) // blocks
    i_columns = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    i_rows = tl.arange(0, ROWS)
    b_sum = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(0, programs, ROWS):
        inside = (start + i_rows < programs)[:, None] & (i_columns < C)[None, :]
        offsets = (i_sum * programs + start + i_rows)[:, None] * C + i_columns[None, :]
        b_sum += tl.load(parts_ptr + offsets, mask=inside, other=0.0)  # [ROWS, COLUMNS]
    tl.store(sums_ptr + i_sum * C + i_columns, tl.sum(b_sum, axis=0).to(sums_ptr.dtype.element_ty), mask=i_columns < C)


PARTS_ROWS, PARTS_COLUMNS, PARTS_WARPS = (
    128,
    32,
    4,
)  # 32 loads of a thread on their way at a time, and programs for 48 processors

_launches: dict[Any, PreparedLaunch] = {}


def block_and_warps(width: int) -> tuple[int, int]:
    """Columns of a tile and warps of a program for rows of `width`: 8 columns a thread, up to 16 warps."""
    block = max(32, triton.next_power_of_2(width))
    return block, min(16, max(1, block // 256))


def norm_forward(
    x: Tensor, update: Tensor | None, weight: Tensor, bias: Tensor | None, epsilon: float, centered: bool, dtype: torch.dtype,
    update_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """stream [N, C] (empty [0] without an update), out [N, C] in `dtype`, mean (empty [0] if not centered) and rstd [N] fp32.

    x and update [N, C], rows contiguous; weight, bias and update_bias (added with the update) [C], contiguous. The stream has the wider
    dtype of the first two.
    """
    (rows, width), device = x.shape, x.device
    stream_dtype = x.dtype if update is None else torch.promote_types(x.dtype, update.dtype)
    stream = torch.empty(0 if update is None else x.shape, dtype=stream_dtype, device=device)
    out = torch.empty(x.shape, dtype=dtype, device=device)
    mean = torch.empty(rows if centered else 0, dtype=torch.float32, device=device)
    rstd = torch.empty(rows, dtype=torch.float32, device=device)
    if out.numel() == 0:
        return stream, out, mean, rstd
    # Addresses that nobody reads stand for what there is not.
    added, shift = x if update is None else update, weight if bias is None else bias
    added_bias = weight if update_bias is None else update_bias
    key = (
        x.shape, x.stride(0), x.dtype, added.stride(0), added.dtype, weight.dtype, shift.dtype, dtype, device, epsilon, centered,
        update is None, bias is None, update_bias is None, added_bias.dtype,
    )  # fmt: skip
    launch = _launches.get(key)
    if launch is None:
        block, warps = block_and_warps(width)
        scalars = (
            x.stride(0),
            added.stride(0),
            width,
            float(epsilon),
            block,
            centered,
            bias is not None,
            update is not None,
            update_bias is not None,
        )
        launch = remember(_launches, key, PreparedLaunch(norm_forward_kernel, rows, scalars, warps, 1))
    with current_device(x):
        launch((x, added, weight, shift, added_bias, stream, out, mean, rstd), x.get_device())
    return stream, out, mean, rstd


def norm_backward(
    d_out: Tensor, d_stream: Tensor | None, stream: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, update_dtype: torch.dtype,
    x_dtype: torch.dtype, has_bias: bool, has_update_bias: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """d_x [N, C] in `x_dtype`, the same in `update_dtype` where that is another (else empty [0]), and in weight's dtype the gradients of
    weight, bias and update_bias, of those that there are: one tensor [1 to 3, C], so that one launch adds the parts of all.

    d_out, d_stream (None: 0) and stream [N, C], rows contiguous; `mean` is empty where the norm is not centered.
    """
    (rows, width), device = stream.shape, stream.device
    centered, twice = mean.numel() > 0, update_dtype != x_dtype
    d_x = torch.empty(stream.shape, dtype=x_dtype, device=device)
    d_update = torch.empty(stream.shape if twice else 0, dtype=update_dtype, device=device)
    if d_x.numel() == 0:
        return d_x, d_update, torch.zeros(1 + has_bias + has_update_bias, width, dtype=weight.dtype, device=device)
    block, warps = block_and_warps(width)
    programs = min(rows, _programs(device, block))
    parts = torch.empty(1 + has_bias + has_update_bias, programs, width, dtype=torch.float32, device=device)
    added = d_out if d_stream is None else d_stream
    key = (
        stream.shape, d_out.stride(0), d_out.dtype, added.stride(0), added.dtype, stream.stride(0), stream.dtype, weight.dtype, x_dtype,
        update_dtype, device, centered, has_bias, d_stream is None, has_update_bias,
    )  # fmt: skip
    launch = _launches.get(key)
    if launch is None:
        scalars = (
            d_out.stride(0), added.stride(0), stream.stride(0), rows, programs, width,
            block, centered, has_bias, d_stream is not None, twice, has_update_bias,
        )  # fmt: skip
        launch = remember(_launches, key, PreparedLaunch(norm_backward_kernel, programs, scalars, warps, 1))
    with current_device(stream):
        launch(
            (d_out, added, stream, weight, mean, rstd, d_x, d_update, parts[0], parts[int(has_bias)], parts[-1]),
            stream.get_device(),
        )
    return d_x, d_update, _add_parts(parts, weight.dtype)


def _add_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums [K, C] in `dtype` of parts fp32 [K, programs, C]."""
    number, programs, width = parts.shape
    sums = torch.empty(number, width, dtype=dtype, device=parts.device)
    key = (parts.shape, dtype, parts.device)
    launch = _launches.get(key)
    if launch is None:
        grid = number * triton.cdiv(width, PARTS_COLUMNS)
        scalars = (programs, width, PARTS_ROWS, PARTS_COLUMNS)
        launch = remember(_launches, key, PreparedLaunch(add_parts_kernel, grid, scalars, PARTS_WARPS, 1))
    with current_device(parts):
        launch((parts, sums), parts.get_device())
    return sums


def _programs(device: torch.device, block: int) -> int:
    """As many programs as the GPU has room for at a time, about: more rows in flight where rows are short."""
    if device.type == "cpu":
        return _CPU_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count * max(1, min(8, 8192 // block))
