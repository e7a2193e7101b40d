"""act(gate) * up, element by element, with act one of SiLU, GELU by tanh and GELU by erf; forward and backward in fp32 registers."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tileflash.kernels.compat import PreparedLaunch, current_device, remember
from tileflash.kernels.triton.tile import LOG2_E

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
LARGEST_BLOCK = 2048  # columns of a program: 16 for each thread of 4 warps
_SILU = tl.constexpr(0)
_GELU_TANH = tl.constexpr(1)
_TANH_SCALE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
_CUBIC = tl.constexpr(0.044715)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_DENSITY = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)
_BENT = tl.constexpr(16.0)  # beyond it GELU is 0 or x to the last bit


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-x * LOG2_E))


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    """(act(x), act'(x)). Constants stand on the right, where Triton's interpreter knows them."""
    if ACTIVATION == _SILU:
        gate = _sigmoid(x)
        value = x * gate
        slope = gate + value * (1.0 - gate)
    elif ACTIVATION == _GELU_TANH:
        # (1 + tanh(u)) / 2 is sigmoid(2 u), which does not cancel where it is small.
        bent = tl.minimum(tl.maximum(x, -_BENT), _BENT)  # whose cube is finite
        square = bent * bent * _CUBIC
        gate = _sigmoid((bent + bent * square) * _TANH_SCALE)
        value = x * gate
        slope = gate + value * (1.0 - gate) * ((square * 3.0 + 1.0) * _TANH_SCALE)
    else:
        gate = tl.erf(x * _SQRT_HALF) * 0.5 + 0.5
        value = x * gate
        slope = gate + x * _DENSITY * tl.exp2(x * x * -0.5 * LOG2_E)
    return value, slope


@triton.jit
def gated_forward_kernel(
    gate_ptr, up_ptr, out_ptr, stride_gate, stride_up, columns, blocks, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr
):  # fmt: skip
    """BLOCK columns of one row of out = act(gate) * up; out is contiguous."""
    i_row = tl.cast(tl.program_id(0) // blocks, tl.int64)
    i_columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = i_columns < columns
    b_gate = tl.load(gate_ptr + i_row * stride_gate + i_columns, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    b_up = tl.load(up_ptr + i_row * stride_up + i_columns, mask=inside, other=0.0).to(tl.float32)
    b_value, _ = _activate(b_gate, ACTIVATION)
    tl.store(out_ptr + i_row * columns + i_columns, (b_value * b_up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gated_backward_kernel(
    d_out_ptr, gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, stride_d_out, stride_gate, stride_up, columns, blocks,
    BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one row of d_gate = d_out * up * act'(gate) and d_up = d_out * act(gate), both contiguous."""
    i_row = tl.cast(tl.program_id(0) // blocks, tl.int64)
    i_columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = i_columns < columns
    b_d_out = tl.load(d_out_ptr + i_row * stride_d_out + i_columns, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    b_gate = tl.load(gate_ptr + i_row * stride_gate + i_columns, mask=inside, other=0.0).to(tl.float32)
    b_up = tl.load(up_ptr + i_row * stride_up + i_columns, mask=inside, other=0.0).to(tl.float32)
    b_value, b_slope = _activate(b_gate, ACTIVATION)
    i_out = i_row * columns + i_columns
    tl.store(d_gate_ptr + i_out, (b_d_out * b_up * b_slope).to(d_gate_ptr.dtype.element_ty), mask=inside)
    tl.store(d_up_ptr + i_out, (b_d_out * b_value).to(d_up_ptr.dtype.element_ty), mask=inside)


_launches: dict[Any, PreparedLaunch] = {}


def block_and_warps(columns: int) -> tuple[int, int]:
    """Columns and warps of a program."""
    block = min(LARGEST_BLOCK, max(32, triton.next_power_of_2(columns)))
    return block, max(1, block // 512)


def gated_forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) * up [N, I] in gate's dtype; gate and up [N, I] of one dtype, rows contiguous."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _launch(gated_forward_kernel, (gate, up, out), (gate, up), activation)
    return out


def gated_backward(d_out: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """d_gate and d_up [N, I], contiguous, in gate's dtype; d_out [N, I], rows contiguous."""
    d_gate, d_up = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    _launch(gated_backward_kernel, (d_out, gate, up, d_gate, d_up), (d_out, gate, up), activation)
    return d_gate, d_up


def _launch(kernel: Any, tensors: tuple[Tensor, ...], strided: tuple[Tensor, ...], activation: str) -> None:
    gate = tensors[-1]
    if gate.numel() == 0:
        return
    rows, columns = gate.shape
    strides = tuple(tensor.stride(0) for tensor in strided)
    key = (len(tensors), rows, columns, strides, strided[0].dtype, gate.dtype, gate.device, activation)
    launch = _launches.get(key)
    if launch is None:
        block, warps = block_and_warps(columns)
        blocks = -(-columns // block)
        scalars = (*strides, columns, blocks, block, ACTIVATIONS.index(activation))
        launch = remember(_launches, key, PreparedLaunch(kernel, rows * blocks, scalars, warps, 1))
    with current_device(gate):
        launch(tensors, gate.get_device())
