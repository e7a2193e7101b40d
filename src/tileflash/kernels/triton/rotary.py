"""The rotary position embedding of q and k in one launch; backward is the same rotation the other way round."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tileflash.kernels.compat import PreparedLaunch, current_device, remember


@triton.jit
def _rotate(
    x_ptr, out_ptr, stride_head, heads, half, b_cos, b_sin, HEADS: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """The heads of one token: pairs (i, i + half) turned by their angles; out is contiguous."""
    i_heads = tl.arange(0, HEADS)[:, None]
    i_columns = tl.arange(0, HALF)[None, :]
    inside = (i_heads < heads) & (i_columns < half)
    source = x_ptr + i_heads * stride_head + i_columns
    target = out_ptr + i_heads * (2 * half) + i_columns
    b_first = tl.load(source, mask=inside, other=0.0).to(tl.float32)  # [HEADS, HALF]
    b_second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    b_out_first = b_first * b_cos - b_second * b_sin
    b_out_second = b_second * b_cos + b_first * b_sin
    tl.store(target, b_out_first.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(target + half, b_out_second.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rotary_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_cos, stride_sin, S, q_heads, k_heads, half,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """All heads of one token of q and k. cos and sin are rows of `half` angles in fp32; BACKWARD turns the other way."""
    i_token = tl.cast(tl.program_id(0), tl.int64)
    i_batch, i_position = i_token // S, i_token % S
    i_columns = tl.arange(0, HALF)
    inside = i_columns < half
    b_cos = tl.load(cos_ptr + i_position * stride_cos + i_columns, mask=inside, other=0.0)[None, :]
    b_sin = tl.load(sin_ptr + i_position * stride_sin + i_columns, mask=inside, other=0.0)[None, :]
    if BACKWARD:
        b_sin = -b_sin
    _rotate(
        q_ptr + i_batch * stride_qb + i_position * stride_qs, q_out_ptr + i_token * q_heads * 2 * half,
        stride_qh, q_heads, half, b_cos, b_sin, Q_HEADS, HALF,
    )  # fmt: skip
    _rotate(
        k_ptr + i_batch * stride_kb + i_position * stride_ks, k_out_ptr + i_token * k_heads * 2 * half,
        stride_kh, k_heads, half, b_cos, b_sin, K_HEADS, HALF,
    )  # fmt: skip


_launches: dict[Any, PreparedLaunch] = {}


def tile_and_warps(q_heads: int, k_heads: int, head_dim: int) -> tuple[int, int, int, int]:
    """Heads of q and of k and columns in a tile, and warps of a program."""
    heads = [triton.next_power_of_2(number) for number in (q_heads, k_heads)]
    half = triton.next_power_of_2(head_dim // 2)
    return heads[0], heads[1], half, min(8, max(1, heads[0] * half // 256))


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> tuple[Tensor, Tensor]:
    """q [B, S, Hq, D] and k [B, S, Hk, D] rotated, contiguous, in their dtypes; D is even and contiguous, other strides are free.

    cos and sin [S, D / 2] fp32, rows contiguous. `backward`: by the negative angles.
    """
    q_out, k_out = (torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (q, k))
    batch, length, q_heads, head_dim = q.shape
    k_heads = k.shape[2]
    if q_out.numel() == 0 or k_out.numel() == 0:
        return q_out, k_out
    strides = (*q.stride()[:3], *k.stride()[:3], cos.stride(0), sin.stride(0))
    key = (q.shape, k_heads, strides, q.dtype, k.dtype, q.device, backward)
    launch = _launches.get(key)
    if launch is None:
        q_tile, k_tile, half, warps = tile_and_warps(q_heads, k_heads, head_dim)
        scalars = (*strides, length, q_heads, k_heads, head_dim // 2, q_tile, k_tile, half, backward)
        launch = remember(_launches, key, PreparedLaunch(rotary_kernel, batch * length, scalars, warps, 1))
    with current_device(q):
        launch((q, k, cos, sin, q_out, k_out), q.get_device())
    return q_out, k_out
