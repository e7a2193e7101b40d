"""Launches the portable attention kernels: outputs, tile sizes, grids. Tensors are [B, S, H, D], the last dimension contiguous."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tileflash.kernels.compat import CachedLauncher, is_interpreted
from tileflash.kernels.triton.attention_backward import (
    attention_backward_delta_kernel,
    attention_backward_dkdv_kernel,
    attention_backward_dq_kernel,
)
from tileflash.kernels.triton.attention_forward import attention_forward_kernel
from tileflash.kernels.triton.configurations import SPLIT_KEY_PASS_FROM, Kernel, Tile, select_tile

_forward = CachedLauncher(attention_forward_kernel)
_delta = CachedLauncher(attention_backward_delta_kernel)
_dkdv = CachedLauncher(attention_backward_dkdv_kernel)
_dq = CachedLauncher(attention_backward_dq_kernel)

INTERPRETED = is_interpreted(attention_forward_kernel)
# What K and V of the heads worked on together may fill of the L2 cache.
_L2_SHARE_BYTES = 24 * 2**20
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class _Plan:
    """What does not change between two calls of one kind."""

    forward: Tile
    key_passes: tuple[tuple[Tile, bool, bool], ...]  # (tile, make d_k, make d_v): one pass, or two for wide heads
    dq: Tile
    block_d: int
    block_dv: int
    kv_group: int
    precision: str
    head_group: int


@lru_cache(maxsize=4096)
def _plan(
    device: torch.device,
    dtype: torch.dtype,
    shape_q: tuple[int, ...],
    shape_k: tuple[int, ...],
    head_dim_v: int,
    banded: bool,
) -> _Plan:
    head_dim = shape_q[3]
    block_d, block_dv = (max(16, 1 << (size - 1).bit_length()) for size in (head_dim, head_dim_v))
    kv_group = shape_q[2] // max(1, shape_k[2])
    capability = (0, 0) if INTERPRETED else torch.cuda.get_device_capability(device)
    widest = max(block_d, block_dv)

    def tile(kernel: Kernel) -> Tile:
        return select_tile(kernel, widest, dtype, capability, banded)

    split = widest >= SPLIT_KEY_PASS_FROM
    key_passes = ((tile("dk"), True, False), (tile("dv"), False, True)) if split else ((tile("dkdv"), True, True),)
    bytes_per_kv_head = shape_k[1] * (head_dim + head_dim_v) * dtype.itemsize
    head_group = max(1, _L2_SHARE_BYTES // max(1, bytes_per_kv_head)) * kv_group if banded else 1
    precision = "upcast" if INTERPRETED and dtype is not torch.float32 else "ieee"
    return _Plan(tile("forward"), key_passes, tile("dq"), block_d, block_dv, kv_group, precision, head_group)


def _rows_contiguous(tensor: Tensor) -> Tensor:
    """The tensor itself where its last dimension is contiguous, else a copy."""
    return tensor if tensor.stride(3) == 1 or tensor.shape[3] == 1 else tensor.contiguous()


def _aligned(*tensors: Tensor) -> bool:
    """Whether all tensors start at a multiple of 16 bytes, which decides how Triton compiles the loads."""
    return not any(tensor.data_ptr() & 15 for tensor in tensors)


def _key(plan: _Plan, aligned: bool, has_low: bool, has_high: bool, *tensors: Tensor) -> tuple[object, ...]:
    """Equal for two calls that Triton compiles alike: all that its specialisation looks at."""
    first = tensors[0]
    return (plan, aligned, has_low, has_high, first.dtype, first.device.index, *(tensor.stride() for tensor in tensors))


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, low: int | None, high: int | None
) -> tuple[Tensor, Tensor]:
    """out [B, Sq, Hq, Dv] in q's dtype and lse [B, Hq, Sq] fp32 of q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv].

    Query i sees key j where low <= j - i <= high (None: no bound). `scale` > 0 multiplies the logits.
    """
    q, k, v = _rows_contiguous(q), _rows_contiguous(k), _rows_contiguous(v)
    batch, query_length, heads, head_dim = q.shape
    key_length, head_dim_v = k.shape[1], v.shape[3]
    out = torch.empty((batch, query_length, heads, head_dim_v), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, query_length), dtype=torch.float32, device=q.device)
    if out.numel() == 0 and lse.numel() == 0:
        return out, lse
    has_low, has_high = low is not None, high is not None
    plan = _plan(q.device, q.dtype, tuple(q.shape), tuple(k.shape), head_dim_v, has_low or has_high)
    tile = plan.forward
    arguments = (
        q, k, v, out, lse,
        q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2),
        v.stride(0), v.stride(1), v.stride(2), out.stride(0), out.stride(1), out.stride(2),
        query_length, key_length, heads, batch * heads, plan.head_group, head_dim, head_dim_v,
        scale * _LOG2_E, low or 0, high or 0,
        tile.block_m, tile.block_n, plan.block_d, plan.block_dv,
        plan.kv_group, plan.block_d == head_dim, plan.block_dv == head_dim_v, has_low, has_high, plan.precision,
    )  # fmt: skip
    grid_size = -(-query_length // tile.block_m) * batch * heads
    key = _key(plan, _aligned(q, k, v), has_low, has_high, q, k, v, out)
    _forward(key, grid_size, q.device.index, arguments, {"num_warps": tile.num_warps, "num_stages": tile.num_stages})
    return out, lse


def attention_backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float, low: int | None, high: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """d_q, d_k, d_v in the inputs' shapes and dtypes, contiguous; d_out [B, Sq, Hq, Dv] in any strides, d_lse [B, Hq, Sq] or None."""
    q, k, v, out, d_out = (_rows_contiguous(tensor) for tensor in (q, k, v, out, d_out))
    batch, query_length, heads, head_dim = q.shape
    key_length, kv_heads, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    d_q, d_k, d_v = (torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (q, k, v))
    if lse.numel() == 0 or key_length == 0:
        return d_q.zero_(), d_k.zero_(), d_v.zero_()
    has_low, has_high = low is not None, high is not None
    plan = _plan(q.device, q.dtype, tuple(q.shape), tuple(k.shape), head_dim_v, has_low or has_high)
    even_d, even_dv = plan.block_d == head_dim, plan.block_dv == head_dim_v
    aligned = _aligned(q, k, v, out, d_out)
    device_index = q.device.index

    arguments: tuple[object, ...]
    delta = torch.empty_like(lse)
    delta_rows = 64 if plan.block_dv <= 128 else 32
    arguments = (
        out, d_out, d_lse.contiguous() if d_lse is not None else delta, delta,
        out.stride(0), out.stride(1), out.stride(2), d_out.stride(0), d_out.stride(1), d_out.stride(2),
        query_length, heads, head_dim_v, delta_rows, plan.block_dv, even_dv, d_lse is not None,
    )  # fmt: skip
    key = _key(plan, aligned, d_lse is not None, even_dv, out, d_out)
    _delta(key, -(-query_length // delta_rows) * batch * heads, device_index, arguments, {"num_warps": 4})

    inputs = (q, k, v, d_out, lse, delta)
    strides = (
        q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2),
        v.stride(0), v.stride(1), v.stride(2), d_out.stride(0), d_out.stride(1), d_out.stride(2),
    )  # fmt: skip
    scalars = (head_dim, head_dim_v, scale, scale * _LOG2_E, low or 0, high or 0)
    flags = (plan.kv_group, even_d, even_dv, has_low, has_high, plan.precision)
    key = _key(plan, aligned, has_low, has_high, q, k, v, d_out, d_q, d_k, d_v)

    for tile, make_dk, make_dv in plan.key_passes:
        arguments = (
            *inputs, d_k, d_v, *strides, d_k.stride(0), d_k.stride(1), d_k.stride(2), d_v.stride(0), d_v.stride(1), d_v.stride(2),
            query_length, key_length, kv_heads, batch * kv_heads, max(1, plan.head_group // plan.kv_group), *scalars,
            tile.block_m, tile.block_n, plan.block_d, plan.block_dv, *flags, make_dk, make_dv,
        )  # fmt: skip
        grid_size = -(-key_length // tile.block_n) * batch * kv_heads
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        _dkdv((key, make_dk, make_dv), grid_size, device_index, arguments, options)

    tile = plan.dq
    arguments = (
        *inputs, d_q, *strides, d_q.stride(0), d_q.stride(1), d_q.stride(2),
        query_length, key_length, heads, batch * heads, plan.head_group, *scalars,
        tile.block_m, tile.block_n, plan.block_d, plan.block_dv, *flags,
    )  # fmt: skip
    grid_size = -(-query_length // tile.block_m) * batch * heads
    _dq(key, grid_size, device_index, arguments, {"num_warps": tile.num_warps, "num_stages": tile.num_stages})
    return d_q, d_k, d_v
