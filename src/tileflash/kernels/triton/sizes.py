"""Sizes of one attention problem and what follows from them: tiles, grids, the constants of the kernels; and that in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tileflash.kernels.compat import is_interpreted
from tileflash.kernels.options import Options
from tileflash.kernels.triton.attention_forward import attention_forward_kernel
from tileflash.kernels.triton.configurations import AMD, SPLIT_KEY_PASS_FROM, Kernel, Tile, has_tf32, select_tile
from tileflash.kernels.triton.features import VARLEN

INTERPRETED = is_interpreted(attention_forward_kernel)

# What K and V of the heads worked on together may fill of the L2 cache.
_L2_SHARE_BYTES = 24 * 2**20
# Narrower heads are padded to this on a GPU. With operands 16 and 32 columns wide that are loaded element by element (D = 24 with
# Dv = 8, fp16) Triton 3.6 makes wrong wgmma operands on Hopper: keys from the 17th on took the wrong values.
_NARROWEST = 16 if INTERPRETED else 64


@dataclass(frozen=True)
class Sizes:
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
    features: int
    sequences: int
    allow_tf32: bool

    @staticmethod
    def of(
        q: Tensor, k: Tensor, v: Tensor, low: int | None, high: int | None, features: int, options: Options
    ) -> Sizes:
        capability = (0, 0) if INTERPRETED else tile_capability(q.device)
        batch, query_length, heads, head_dim = q.shape
        _, key_length, kv_heads, head_dim_v = v.shape
        return Sizes(
            batch, query_length, key_length, heads, kv_heads, head_dim, head_dim_v, q.dtype, capability, low, high, features,
            0 if options.cu_seqlens_q is None else options.cu_seqlens_q.shape[0] - 1, options.allow_tf32,
        )  # fmt: skip

    @property
    def block_d(self) -> int:
        return max(_NARROWEST, 1 << (self.head_dim - 1).bit_length())

    @property
    def block_dv(self) -> int:
        return max(_NARROWEST, 1 << (self.head_dim_v - 1).bit_length())

    @property
    def kv_group(self) -> int:
        return self.heads // self.kv_heads

    def tile(self, kernel: Kernel) -> Tile:
        banded = self.low is not None or self.high is not None
        block_d = max(self.block_d, self.block_dv)
        return select_tile(kernel, block_d, self.dtype, self.capability, banded, self.features, self.tf32)

    @property
    def tf32(self) -> bool:
        """Whether products of fp32 are made of TF32: where that is permitted, and there are tiles for it."""
        permitted = self.allow_tf32 and self.dtype is torch.float32
        return permitted and has_tf32(max(self.block_d, self.block_dv), self.features)

    def kv_heads_in_l2(self) -> int:
        """How many K/V heads are worked on together. Without a band all programs take equally long and none need go first."""
        if self.low is None and self.high is None:
            return 1
        bytes_per_head = self.key_length * (self.head_dim + self.head_dim_v) * self.dtype.itemsize
        return max(1, _L2_SHARE_BYTES // max(1, bytes_per_head))  # there may be no keys

    def flags(self) -> tuple[Any, ...]:
        """The constants that end every attention kernel's parameters."""
        precision = "upcast" if INTERPRETED and self.dtype is not torch.float32 else "ieee"
        if self.tf32:
            precision = "tf32"
        even_d, even_dv = self.block_d == self.head_dim, self.block_dv == self.head_dim_v
        return (self.kv_group, even_d, even_dv, self.low is not None, self.high is not None, precision, self.features)

    def query_programs(self, block_m: int) -> int:
        """Programs of a kernel that owns tiles of queries. Packed: see `packed.packed_tile`."""
        if self.features & VARLEN.value:
            return (self.query_length // block_m + self.sequences + 1) * self.heads
        return -(-self.query_length // block_m) * self.batch * self.heads

    def key_programs(self, block_n: int) -> int:
        """Programs of a kernel that owns tiles of keys."""
        if self.features & VARLEN.value:
            return (self.key_length // block_n + self.sequences + 1) * self.kv_heads
        return -(-self.key_length // block_n) * self.batch * self.kv_heads

    def key_passes(self) -> tuple[tuple[Kernel, bool, bool], ...]:
        """The launches that make d_k and d_v: (kernel, makes d_k, makes d_v)."""
        if max(self.block_d, self.block_dv) >= SPLIT_KEY_PASS_FROM:
            return ("dk", True, False), ("dv", False, True)
        return (("dkdv", True, True),)


def describe_launches(
    batch: int, query_length: int, key_length: int, heads: int, kv_heads: int, head_dim: int, head_dim_v: int,
    dtype: torch.dtype, device: torch.device, low: int | None, high: int | None, backward: bool,
    with_options: bool = False, packed: bool = False, bias_gradient: bool = False,
) -> list[str]:  # fmt: skip
    """What is launched for a problem, a line a kernel: programs, tile, warps, stages; then the order of the programs."""
    capability = (0, 0) if INTERPRETED else tile_capability(device)
    sizes = Sizes(
        batch, query_length, key_length, heads, kv_heads, head_dim, head_dim_v, dtype, capability, low, high,
        int(with_options), 0, False,
    )  # fmt: skip
    if 0 in (batch, query_length, key_length, heads):
        return ["no kernel: the tensors are empty"]

    def line(kernel: Kernel, programs: int | None, by: str) -> str:
        tile = sizes.tile(kernel)
        count = f"{programs:,} programs" if programs is not None else f"programs by {by},"
        stages = f"{tile.num_stages} stage{'s' if tile.num_stages > 1 else ''}"
        return f"{count} of {tile.num_warps} warps, tile {tile.block_m} queries x {tile.block_n} keys, {stages}"

    def query_line(kernel: Kernel) -> str:
        return line(
            kernel, None if packed else sizes.query_programs(sizes.tile(kernel).block_m), "the sequences' lengths"
        )

    def key_line(kernel: Kernel) -> str:
        return line(
            kernel, None if packed else sizes.key_programs(sizes.tile(kernel).block_n), "the sequences' lengths"
        )

    lines = [f"forward: {query_line('forward')}"]
    if backward:
        lines.append(f"backward, d_q and delta: {query_line('dq')}")
        for kernel, make_dk, make_dv in sizes.key_passes():
            made = " and ".join(name for name, is_made in (("d_k", make_dk), ("d_v", make_dv)) if is_made)
            lines.append(f"backward, {made}: {key_line(kernel)}")
        if bias_gradient:
            lines.append(f"backward, d_bias: {line('bias', None, 'the shape of the bias')}")
    if packed:
        return [*lines, "order: head by head, the last tiles of queries and the first tiles of keys first"]
    together = min(sizes.kv_heads_in_l2(), batch * kv_heads)
    order = f"K/V heads in groups of {together}"
    if low is not None or high is not None:
        order += f" (K and V of a group fill at most {_L2_SHARE_BYTES >> 20} MiB of the L2 cache)"
    return [*lines, f"order: {order}; in a group the last query tiles and the first key tiles of all its heads first"]


def tile_capability(device: torch.device) -> tuple[int, int]:
    """What tiles are chosen by: the compute capability, or AMD."""
    return AMD if torch.version.hip is not None else torch.cuda.get_device_capability(device)
