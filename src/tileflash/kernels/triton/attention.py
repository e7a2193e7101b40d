"""Launches the portable attention kernels: outputs, tile sizes, grids. Tensors are [B, S, H, D]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tileflash.kernels.compat import PreparedLaunch, is_interpreted
from tileflash.kernels.triton.attention_backward import (
    attention_backward_dkdv_kernel,
    attention_backward_dq_kernel,
)
from tileflash.kernels.triton.attention_forward import attention_forward_kernel
from tileflash.kernels.triton.configurations import SPLIT_KEY_PASS_FROM, Kernel, Tile, select_tile

INTERPRETED = is_interpreted(attention_forward_kernel)

# What K and V of the heads worked on together may fill of the L2 cache.
_L2_SHARE_BYTES = 24 * 2**20
_LOG2_E = 1.4426950408889634

# Launches made ready, by all that they depend on. A training run has a handful; emptied when full.
_forward_launches: dict[Any, PreparedLaunch] = {}
_backward_launches: dict[Any, tuple[PreparedLaunch, ...]] = {}
_MOST_LAUNCHES = 4096


@dataclass(frozen=True)
class _Sizes:
    """Sizes of one problem, and what follows from them for every kernel."""

    batch: int
    query_length: int
    key_length: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    capability: tuple[int, int]
    low: int | None
    high: int | None

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, low: int | None, high: int | None) -> _Sizes:
        capability = (0, 0) if INTERPRETED else _tile_capability(q.device)
        batch, query_length, heads, head_dim = q.shape
        _, key_length, kv_heads, head_dim_v = v.shape
        return _Sizes(
            batch, query_length, key_length, heads, kv_heads, head_dim, head_dim_v, q.dtype, capability, low, high
        )  # fmt: skip

    @property
    def block_d(self) -> int:
        return max(16, 1 << (self.head_dim - 1).bit_length())

    @property
    def block_dv(self) -> int:
        return max(16, 1 << (self.head_dim_v - 1).bit_length())

    @property
    def kv_group(self) -> int:
        return self.heads // self.kv_heads

    def tile(self, kernel: Kernel) -> Tile:
        banded = self.low is not None or self.high is not None
        return select_tile(kernel, max(self.block_d, self.block_dv), self.dtype, self.capability, banded)

    def kv_heads_in_l2(self) -> int:
        """How many K/V heads are worked on together. Without a band all programs take equally long and none need go first."""
        if self.low is None and self.high is None:
            return 1
        bytes_per_head = self.key_length * (self.head_dim + self.head_dim_v) * self.dtype.itemsize
        return max(1, _L2_SHARE_BYTES // bytes_per_head)

    def query_programs(self, tile: Tile) -> int:
        """Programs of a kernel that takes a tile of queries each."""
        return -(-self.query_length // tile.block_m) * self.batch * self.heads

    def key_programs(self, tile: Tile) -> int:
        """Programs of a kernel that takes a tile of keys each, for all query heads of the K/V head."""
        return -(-self.key_length // tile.block_n) * self.batch * self.kv_heads

    def key_passes(self) -> tuple[tuple[Kernel, bool, bool], ...]:
        """The launches that make d_k and d_v: (kernel, makes d_k, makes d_v)."""
        if max(self.block_d, self.block_dv) >= SPLIT_KEY_PASS_FROM:
            return ("dk", True, False), ("dv", False, True)
        return (("dkdv", True, True),)

    def flags(self) -> tuple[Any, ...]:
        """The constants that end every attention kernel's parameters."""
        precision = "upcast" if INTERPRETED and self.dtype is not torch.float32 else "ieee"
        even_d, even_dv = self.block_d == self.head_dim, self.block_dv == self.head_dim_v
        return (self.kv_group, even_d, even_dv, self.low is not None, self.high is not None, precision)


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, low: int | None, high: int | None
) -> tuple[Tensor, Tensor]:
    """out [B, Sq, Hq, Dv] in q's dtype and lse [B, Hq, Sq] fp32 of q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv].

    Query i sees key j where low <= j - i <= high (None: no bound). `scale` > 0 multiplies the logits. Strides are free; only a last
    dimension that is not contiguous is copied.
    """
    q, k, v = _rows_contiguous(q), _rows_contiguous(k), _rows_contiguous(v)
    batch, query_length, heads, _ = q.shape
    out = torch.empty((batch, query_length, heads, v.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, query_length), dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse
    if k.shape[1] == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    key = (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, q.device, scale, low, high)
    launch = _forward_launches.get(key)
    if launch is None:
        launch = _remember(_forward_launches, key, _prepare_forward(q, k, v, out, scale, low, high))
    with _current_device(q):
        launch((q, k, v, out, lse), q.get_device())
    return out, lse


def attention_backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float, low: int | None, high: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """d_q, d_k, d_v in the inputs' shapes and dtypes, contiguous; d_out [B, Sq, Hq, Dv] in any strides, d_lse [B, Hq, Sq] or None."""
    q, k, v, out, d_out = (_rows_contiguous(tensor) for tensor in (q, k, v, out, d_out))
    d_q, d_k, d_v = (torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (q, k, v))
    if lse.numel() == 0 or k.shape[1] == 0:
        return d_q.zero_(), d_k.zero_(), d_v.zero_()
    delta = torch.empty_like(lse)
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), out.stride(), d_out.stride(),
        q.dtype, q.device, scale, low, high, d_lse is None,
    )  # fmt: skip
    launches = _backward_launches.get(key)
    if launches is None:
        prepared = _prepare_backward(q, k, v, out, d_out, d_q, d_k, d_v, d_lse is not None, scale, low, high)
        launches = _remember(_backward_launches, key, prepared)
    device_index = q.get_device()
    with _current_device(q):
        query_launch, *key_launches = launches
        d_lse = delta if d_lse is None else d_lse.contiguous()  # an address that is not looked at, where there is none
        query_launch((q, k, v, out, d_out, lse, d_lse, delta, d_q), device_index)
        for launch in key_launches:
            launch((q, k, v, d_out, lse, delta, d_k, d_v), device_index)
    return d_q, d_k, d_v


def _prepare_forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float, low: int | None, high: int | None
) -> PreparedLaunch:
    sizes = _Sizes.of(q, k, v, low, high)
    tile = sizes.tile("forward")
    scalars = (
        *_strides(q, k, v, out),
        sizes.query_length, sizes.key_length, sizes.heads, sizes.batch * sizes.heads, sizes.kv_heads_in_l2() * sizes.kv_group,
        sizes.head_dim, sizes.head_dim_v, scale * _LOG2_E, low or 0, high or 0,
        tile.block_m, tile.block_n, sizes.block_d, sizes.block_dv, *sizes.flags(),
    )  # fmt: skip
    return PreparedLaunch(
        attention_forward_kernel, sizes.query_programs(tile), scalars, tile.num_warps, tile.num_stages
    )


def _prepare_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, d_out: Tensor, d_q: Tensor, d_k: Tensor, d_v: Tensor,
    has_d_lse: bool, scale: float, low: int | None, high: int | None,
) -> tuple[PreparedLaunch, ...]:  # fmt: skip
    """The launches of a backward pass in order: d_q (and delta), then d_k and d_v, in one launch or two."""
    sizes = _Sizes.of(q, k, v, low, high)
    numbers = (sizes.head_dim, sizes.head_dim_v, scale, scale * _LOG2_E, low or 0, high or 0)
    tile = sizes.tile("dq")
    scalars: tuple[Any, ...] = (
        *_strides(q, k, v, out, d_out, d_q),
        sizes.query_length, sizes.key_length, sizes.heads, sizes.batch * sizes.heads, sizes.kv_heads_in_l2() * sizes.kv_group, *numbers,
        tile.block_m, tile.block_n, sizes.block_d, sizes.block_dv, *sizes.flags(), has_d_lse,
    )  # fmt: skip
    programs = sizes.query_programs(tile)
    launches = [PreparedLaunch(attention_backward_dq_kernel, programs, scalars, tile.num_warps, tile.num_stages)]
    for kernel, make_dk, make_dv in sizes.key_passes():
        tile = sizes.tile(kernel)
        scalars = (
            *_strides(q, k, v, d_out, d_k, d_v),
            sizes.query_length, sizes.key_length, sizes.kv_heads, sizes.batch * sizes.kv_heads, sizes.kv_heads_in_l2(), *numbers,
            tile.block_m, tile.block_n, sizes.block_d, sizes.block_dv, *sizes.flags(), make_dk, make_dv,
        )  # fmt: skip
        programs = sizes.key_programs(tile)
        launches.append(
            PreparedLaunch(attention_backward_dkdv_kernel, programs, scalars, tile.num_warps, tile.num_stages)
        )
    return tuple(launches)


def describe_launches(
    batch: int, query_length: int, key_length: int, heads: int, kv_heads: int, head_dim: int, head_dim_v: int,
    dtype: torch.dtype, device: torch.device, low: int | None, high: int | None, backward: bool,
) -> list[str]:  # fmt: skip
    """What is launched for a problem, a line a kernel: programs, tile, warps, stages; then the order of the programs."""
    capability = (0, 0) if INTERPRETED else _tile_capability(device)
    sizes = _Sizes(
        batch, query_length, key_length, heads, kv_heads, head_dim, head_dim_v, dtype, capability, low, high
    )  # fmt: skip
    if 0 in (batch, query_length, key_length, heads):
        return ["no kernel: the tensors are empty"]
    tile = sizes.tile("forward")
    lines = [f"forward: {_launch_line(sizes.query_programs(tile), tile)}"]
    if backward:
        tile = sizes.tile("dq")
        lines.append(f"backward, d_q and delta: {_launch_line(sizes.query_programs(tile), tile)}")
        for kernel, make_dk, make_dv in sizes.key_passes():
            made = " and ".join(name for name, is_made in (("d_k", make_dk), ("d_v", make_dv)) if is_made)
            tile = sizes.tile(kernel)
            lines.append(f"backward, {made}: {_launch_line(sizes.key_programs(tile), tile)}")
    together = min(sizes.kv_heads_in_l2(), batch * kv_heads)
    order = f"K/V heads in groups of {together}"
    if low is not None or high is not None:
        order += f" (K and V of a group fill at most {_L2_SHARE_BYTES >> 20} MiB of the L2 cache)"
    return [*lines, f"order: {order}; in a group the last query tiles and the first key tiles of all its heads first"]


def _launch_line(programs: int, tile: Tile) -> str:
    stages = f"{tile.num_stages} stage{'s' if tile.num_stages > 1 else ''}"
    return (
        f"{programs:,} programs of {tile.num_warps} warps, tile {tile.block_m} queries x {tile.block_n} keys, {stages}"
    )


def _tile_capability(device: torch.device) -> tuple[int, int]:
    """What tiles are chosen by: the compute capability; of AMD GPUs one that no NVIDIA GPU has, for gfx90a says 9.0 as Hopper does."""
    return (0, 1) if torch.version.hip is not None else torch.cuda.get_device_capability(device)


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Batch, sequence and head strides of each tensor, in elements."""
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:3])


def _rows_contiguous(tensor: Tensor) -> Tensor:
    """The tensor itself where its last dimension is contiguous, else a copy."""
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


class _NoDevice:
    """Nothing to switch: the tensors are on the current device (or on the CPU, in the interpreter)."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


_NO_DEVICE = _NoDevice()


def _current_device(tensor: Tensor) -> Any:
    """A context in which the tensor's device is the current one, as launches need it."""
    if INTERPRETED or tensor.get_device() == torch._C._cuda_getDevice():
        return _NO_DEVICE
    return torch.cuda.device(tensor.device)


def _remember(launches: dict[Any, Any], key: Any, prepared: Any) -> Any:
    if len(launches) >= _MOST_LAUNCHES:
        launches.clear()
    launches[key] = prepared
    return prepared
