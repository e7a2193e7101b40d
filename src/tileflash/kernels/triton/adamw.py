"""AdamW over all weights in three launches, and sums of gradients in one: kernels that walk over a table of addresses.

A weight is fp32, or split: bf16, and beside it the low 16 bits of its fp32 master. The bf16 part is the master rounded to the nearest,
ties away from zero: bits = (high << 16) + low with low read as a signed number, which has one solution for every master.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tileflash.kernels.compat import PreparedLaunch, current_device, remember

CHUNK = 16384  # elements of one program: enough work behind the three loads that find it
BLOCK = 1024  # elements at a time of `adamw_kernel`: 4 a thread, so that registers leave room for 40 warps
READ_BLOCK = 2048  # and of the others: 8 a thread, 16 bytes of bf16
COLUMNS = 5  # of the table: addresses of weight, low bits, first and second moment; number of elements
WARPS = 8
SUM_BLOCK = 1024  # chunks that `finish_kernel` adds at a time
FINISH_WARPS = 4
SCALARS = 4  # what `finish_kernel` leaves for `adamw_kernel`: see there


@triton.jit
def _chunk(chunks_ptr, table_ptr, gradients_ptr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    """(number of the tensor, first element, elements of this program's chunk, address of the tensor's gradient or 0)."""
    i_program = tl.cast(tl.program_id(0), tl.int64)
    i_tensor = tl.cast(tl.load(chunks_ptr + 2 * i_program), tl.int64)
    first = tl.load(chunks_ptr + 2 * i_program + 1)
    left = tl.load(table_ptr + i_tensor * COLUMNS + 4) - first
    return i_tensor, first, tl.minimum(left, CHUNK).to(tl.int32), tl.load(gradients_ptr + i_tensor)


@triton.jit
def _pointer(address, first, element: tl.constexpr):
    """A pointer to element `first`, a multiple of 16, of a tensor at an address that is a multiple of 16."""
    pointer = tl.cast(address, tl.pointer_type(element), bitcast=True)
    return tl.multiple_of(pointer + first, 16)


@triton.jit
def _load(pointer, i_elements, count, WHOLE: tl.constexpr):
    """Elements of a block; those from `count` on, which only a block that is not WHOLE has, are 0."""
    # A mask that ends anywhere makes every element a load of its own.
    return tl.load(pointer + i_elements) if WHOLE else tl.load(pointer + i_elements, mask=i_elements < count, other=0)


@triton.jit
def _store(pointer, i_elements, b_values, count, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(pointer + i_elements, b_values)
    else:
        tl.store(pointer + i_elements, b_values, mask=i_elements < count)


@triton.jit
def _squares(gradient_ptr, start, count, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    i_elements = start + tl.arange(0, BLOCK)
    b_gradient = _load(gradient_ptr, i_elements, count, WHOLE).to(tl.float32)  # [BLOCK]
    return b_gradient * b_gradient


@triton.jit
def square_sum_kernel(
    chunks_ptr, table_ptr, gradients_ptr, sums_ptr, GRADIENT: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """sums[i] = sum of the squares of chunk i of the gradients."""
    _, first, count, address = _chunk(chunks_ptr, table_ptr, gradients_ptr, COLUMNS, CHUNK)
    b_sum = tl.zeros([BLOCK], dtype=tl.float32)
    if address != 0:
        gradient_ptr = _pointer(address, first, GRADIENT)
        whole = count // BLOCK * BLOCK
        for start in range(0, whole, BLOCK):
            b_sum += _squares(gradient_ptr, start, count, True, BLOCK)
        if whole < count:
            b_sum += _squares(gradient_ptr, whole, count, False, BLOCK)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(b_sum, axis=0))


@triton.jit
def finish_kernel(
    sums_ptr, loss_ptr, loss_limit_ptr, gradient_limit_ptr, rate_ptr, step_ptr, betas_ptr, result_ptr, scalars_ptr, chunks, clip,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: norm, clipping, whether to skip, and the step count, all left on the device.

    result: loss, norm, 1 if skipped. scalars: factor of the gradients, learning rate / (1 - beta1^step), 1 / sqrt(1 - beta2^step),
    rate.
    """
    b_sum = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, chunks, BLOCK):
        i_chunks = start + tl.arange(0, BLOCK)
        b_sum += tl.load(sums_ptr + i_chunks, mask=i_chunks < chunks, other=0.0)
    norm = tl.sqrt_rn(tl.sum(b_sum, axis=0))
    loss = tl.load(loss_ptr)
    # Every comparison with NaN is false, and Inf is above any finite limit: one expression covers all causes.
    healthy = (loss <= tl.load(loss_limit_ptr)) & (norm <= tl.load(gradient_limit_ptr))
    step = tl.load(step_ptr) + tl.where(healthy, 1.0, 0.0)
    tl.store(step_ptr, step)
    # Powers by squaring in fp64 (betas are fp64): 1 - 0.9^1 keeps its digits, and no library function is needed.
    count = step.to(tl.int32)
    power1 = tl.cast(1.0, tl.float64)
    power2 = tl.cast(1.0, tl.float64)
    base1 = tl.load(betas_ptr)
    base2 = tl.load(betas_ptr + 1)
    for _ in range(24):  # fp32 counts up to 2^24
        odd = (count & 1) == 1
        power1 = tl.where(odd, power1 * base1, power1)
        power2 = tl.where(odd, power2 * base2, power2)
        base1 = base1 * base1
        base2 = base2 * base2
        count = count >> 1
    rate = tl.load(rate_ptr)
    factor = 1.0
    if clip > 0:
        factor = tl.minimum(clip / (norm + 1e-6), 1.0)
    tl.store(scalars_ptr, factor)
    tl.store(scalars_ptr + 1, (rate / (1.0 - power1)).to(tl.float32))
    tl.store(scalars_ptr + 2, tl.div_rn(1.0, tl.sqrt_rn((1.0 - power2).to(tl.float32))))
    tl.store(scalars_ptr + 3, rate)
    tl.store(result_ptr, loss)
    tl.store(result_ptr + 1, norm)
    tl.store(result_ptr + 2, tl.where(healthy, 0.0, 1.0))


@triton.jit
def _clear(gradient_ptr, count, GRADIENT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    for start in range(0, CHUNK, BLOCK):
        _store(gradient_ptr, start + tl.arange(0, BLOCK), tl.zeros([BLOCK], dtype=GRADIENT), count, False)


@triton.jit
def _update(
    high_ptr, low_ptr, weight_ptr, mean_ptr, square_ptr, gradient_ptr, start, count, factor, step_size, inverse, shrink,
    beta1, rest1, beta2, rest2, epsilon,
    SPLIT: tl.constexpr, GRADIENT: tl.constexpr, CLEAR: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one weight."""
    i_elements = start + tl.arange(0, BLOCK)
    b_gradient = _load(gradient_ptr, i_elements, count, WHOLE).to(tl.float32) * factor  # [BLOCK]
    b_mean = _load(mean_ptr, i_elements, count, WHOLE)
    b_square = _load(square_ptr, i_elements, count, WHOLE)
    if SPLIT:
        b_high = _load(high_ptr, i_elements, count, WHOLE).to(tl.int32)
        b_low = _load(low_ptr, i_elements, count, WHOLE).to(tl.int32)
        b_weight = ((b_high << 16) + b_low).to(tl.float32, bitcast=True)
    else:
        b_weight = _load(weight_ptr, i_elements, count, WHOLE)
    b_weight -= shrink * b_weight
    b_mean = beta1 * b_mean + rest1 * b_gradient
    b_square = beta2 * b_square + rest2 * b_gradient * b_gradient
    b_weight -= tl.div_rn(step_size * b_mean, tl.sqrt_rn(b_square) * inverse + epsilon)
    _store(mean_ptr, i_elements, b_mean, count, WHOLE)
    _store(square_ptr, i_elements, b_square, count, WHOLE)
    if SPLIT:
        b_bits = b_weight.to(tl.int32, bitcast=True)
        # Rounding the bits of some NaN would give a number.
        b_bits = tl.where(b_weight == b_weight, b_bits, 0x7FC00000)
        _store(low_ptr, i_elements, b_bits.to(tl.int16), count, WHOLE)
        _store(high_ptr, i_elements, ((b_bits + 0x8000) >> 16).to(tl.int16), count, WHOLE)
    else:
        _store(weight_ptr, i_elements, b_weight, count, WHOLE)
    if CLEAR:
        _store(gradient_ptr, i_elements, tl.zeros([BLOCK], dtype=GRADIENT), count, WHOLE)


@triton.jit
def adamw_kernel(
    chunks_ptr, table_ptr, gradients_ptr, decays_ptr, scalars_ptr, result_ptr, beta1, rest1, beta2, rest2, epsilon,
    SPLIT: tl.constexpr, GRADIENT: tl.constexpr, CLEAR: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk of one weight; nothing but the gradient (with CLEAR filled with zeros) is written where the step is skipped."""
    i_tensor, first, count, address = _chunk(chunks_ptr, table_ptr, gradients_ptr, COLUMNS, CHUNK)
    if address != 0:
        gradient_ptr = _pointer(address, first, GRADIENT)
        if tl.load(result_ptr + 2) != 0.0:
            if CLEAR:
                _clear(gradient_ptr, count, GRADIENT, CHUNK, BLOCK)
        else:
            row_ptr = table_ptr + i_tensor * COLUMNS
            weight = tl.load(row_ptr)
            high_ptr = _pointer(weight, first, tl.int16)
            low_ptr = _pointer(tl.load(row_ptr + 1), first, tl.int16)
            weight_ptr = _pointer(weight, first, tl.float32)
            mean_ptr = _pointer(tl.load(row_ptr + 2), first, tl.float32)
            square_ptr = _pointer(tl.load(row_ptr + 3), first, tl.float32)
            factor = tl.load(scalars_ptr)
            step_size = tl.load(scalars_ptr + 1)
            inverse = tl.load(scalars_ptr + 2)
            shrink = tl.load(scalars_ptr + 3) * tl.load(decays_ptr + i_tensor)
            whole = count // BLOCK * BLOCK
            for start in range(0, whole, BLOCK):
                _update(
                    high_ptr, low_ptr, weight_ptr, mean_ptr, square_ptr, gradient_ptr, start, count, factor, step_size, inverse, shrink,
                    beta1, rest1, beta2, rest2, epsilon, SPLIT, GRADIENT, CLEAR, True, BLOCK,
                )  # fmt: skip
            if whole < count:
                _update(
                    high_ptr, low_ptr, weight_ptr, mean_ptr, square_ptr, gradient_ptr, whole, count, factor, step_size, inverse, shrink,
                    beta1, rest1, beta2, rest2, epsilon, SPLIT, GRADIENT, CLEAR, False, BLOCK,
                )  # fmt: skip


@triton.jit
def _add(sum_ptr, gradient_ptr, start, count, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    i_elements = start + tl.arange(0, BLOCK)
    b_gradient = _load(gradient_ptr, i_elements, count, WHOLE).to(tl.float32)  # [BLOCK]
    _store(sum_ptr, i_elements, _load(sum_ptr, i_elements, count, WHOLE) + b_gradient, count, WHOLE)


@triton.jit
def add_kernel(
    chunks_ptr, table_ptr, gradients_ptr, sums_ptr, GRADIENT: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The fp32 tensors at the addresses in `sums` += the gradients."""
    i_tensor, first, count, address = _chunk(chunks_ptr, table_ptr, gradients_ptr, COLUMNS, CHUNK)
    if address != 0:
        gradient_ptr = _pointer(address, first, GRADIENT)
        sum_ptr = _pointer(tl.load(sums_ptr + i_tensor), first, tl.float32)
        whole = count // BLOCK * BLOCK
        for start in range(0, whole, BLOCK):
            _add(sum_ptr, gradient_ptr, start, count, True, BLOCK)
        if whole < count:
            _add(sum_ptr, gradient_ptr, whole, count, False, BLOCK)


class WeightTable(NamedTuple):
    """What the kernels walk over, on the device. T tensors in C chunks of `CHUNK` elements.

    chunks int32 [C, 2]: number of the tensor, first element; table int64 [T, COLUMNS]; decays fp32 [T].
    """

    chunks: Tensor
    table: Tensor
    decays: Tensor


def make_table(rows: list[tuple[int, int, int, int, int]], decays: list[float], device: torch.device) -> WeightTable:
    """`rows`: see `COLUMNS`; addresses are multiples of 16, 0 where there is no such tensor."""
    chunks = [(number, first) for number, row in enumerate(rows) for first in range(0, row[4], CHUNK)]
    return WeightTable(
        torch.tensor(chunks, dtype=torch.int32).reshape(-1, 2).to(device),
        torch.tensor(rows, dtype=torch.int64).reshape(-1, COLUMNS).to(device),
        torch.tensor(decays, dtype=torch.float32).to(device),
    )


_launches: dict[Any, PreparedLaunch] = {}
_ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


def _launch(kernel: Any, grid: int, tensors: tuple[Tensor, ...], scalars: tuple[Any, ...], warps: int = WARPS) -> None:
    key = (kernel.__name__, grid, scalars, tensors[0].device)
    launch = _launches.get(key)
    if launch is None:
        launch = remember(_launches, key, PreparedLaunch(kernel, grid, scalars, warps, 1))
    with current_device(tensors[0]):
        launch(tensors, tensors[0].get_device())


def square_sums(table: WeightTable, gradients: Tensor, gradient_dtype: torch.dtype, sums: Tensor) -> None:
    """sums fp32 [C] = the sum of squares of each chunk; `gradients` int64 [T]: addresses (0: none) of bf16 or fp32."""
    tensors = (table.chunks, table.table, gradients, sums)
    _launch(square_sum_kernel, len(table.chunks), tensors, (_ELEMENTS[gradient_dtype], COLUMNS, CHUNK, READ_BLOCK))


def finish_norm(
    sums: Tensor, loss: Tensor, limits: tuple[Tensor, Tensor], rate: Tensor, step: Tensor, betas: Tensor, result: Tensor,
    scalars: Tensor, clip: float,
) -> None:  # fmt: skip
    """See `finish_kernel`; `loss`, `limits` (of loss and norm), `rate` and `step` fp32 [], `betas` fp64 [2], `result` fp32 [3],
    `scalars` fp32 [SCALARS]."""
    tensors = (sums, loss, *limits, rate, step, betas, result, scalars)
    _launch(finish_kernel, 1, tensors, (len(sums), float(clip), SUM_BLOCK), warps=FINISH_WARPS)


def update(
    table: WeightTable, gradients: Tensor, gradient_dtype: torch.dtype, scalars: Tensor, result: Tensor, betas: tuple[float, float],
    epsilon: float, *, split: bool, clear: bool,
) -> None:  # fmt: skip
    """AdamW's step on every weight whose gradient has an address; `clear` fills the gradients with zeros."""
    tensors = (table.chunks, table.table, gradients, table.decays, scalars, result)
    numbers = (betas[0], 1 - betas[0], betas[1], 1 - betas[1], epsilon)
    constants = (split, _ELEMENTS[gradient_dtype], clear, COLUMNS, CHUNK, BLOCK)
    _launch(adamw_kernel, len(table.chunks), tensors, (*numbers, *constants))


def add_gradients(table: WeightTable, gradients: Tensor, gradient_dtype: torch.dtype, sums: Tensor) -> None:
    """The fp32 tensors whose addresses are in `sums` int64 [T] += the gradients."""
    tensors = (table.chunks, table.table, gradients, sums)
    _launch(add_kernel, len(table.chunks), tensors, (_ELEMENTS[gradient_dtype], COLUMNS, CHUNK, READ_BLOCK))
