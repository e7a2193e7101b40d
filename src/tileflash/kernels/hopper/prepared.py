"""Makes launches of the Hopper kernels ready: everything but the addresses, once for a kind of call."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tileflash.kernels.compat import PreparedLaunch
from tileflash.kernels.compat_gluon import DescribedTensor, PreparedDescriptorLaunch
from tileflash.kernels.hopper.attention_backward_ends import finish_kernel, prepare_kernel
from tileflash.kernels.hopper.configurations import (
    BACKWARD,
    FORWARD,
    QUERIES,
    backward_configuration,
    padded_backward,
    padded_head_dim,
)
from tileflash.kernels.hopper.launch import (
    Band,
    Box,
    KernelOptions,
    backward_call,
    backward_queries_call,
    forward_call,
)
from tileflash.kernels.hopper.schedule import heads_in_l2, longest_first, visible_counts
from tileflash.kernels.hopper.seen import Seen
from tileflash.kernels.options import Options

_LOG2_E = 1.4426950408889634
# What a tile costs besides its steps, in steps: its start, its first product, its end. Measured by nobody; the order hardly depends on it.
_TILE_OVERHEAD = 0.75

_schedules: dict[Any, Tensor] = {}


def kernel_options(options: Options, scale: float) -> tuple[KernelOptions, float, float | None]:
    """(what the kernels are compiled with, their `scale_log2`, their `cap_scale`)."""
    on = KernelOptions(options.softcap > 0, options.sinks is not None, options.packed)
    if on.soft_cap:
        return on, options.softcap * _LOG2_E, scale / options.softcap
    return on, scale * _LOG2_E, None


def prepare_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, low: int | None, high: int | None, options: Options
) -> tuple[Seen, PreparedDescriptorLaunch | None, Tensor]:
    """(what is seen, the launch, its schedule)."""
    on, scale_log2, cap_scale = kernel_options(options, scale)
    batch, query_length, heads, head_dim = q.shape
    kv_heads, head_dim_v = v.shape[2:]
    seen = Seen.of(query_length, k.shape[1], low, high)
    if seen.queries == 0:
        return seen, None, no_table(q.device)
    padded = padded_head_dim(max(head_dim, head_dim_v))
    block_n = FORWARD[padded, False].block_n
    band = seen.band(block_n)
    configuration = FORWARD[padded, band != "full"]
    query_tiles = -(-seen.queries // configuration.block_m)
    tiles = query_tiles * batch * heads
    programs = min(_processors(q.device), tiles)
    items = -(-tiles // programs)
    table = no_table(q.device)
    if band != "full":
        table = _query_schedule(seen, query_tiles, configuration.block_m, block_n, q, v.shape[2:], programs)
        items = table.shape[0]
    call = forward_call(padded, q.dtype, band, on)
    sizes = {"q_desc": (seen.queries, q), "k_desc": (seen.keys, k), "v_desc": (seen.keys, v)}
    described = [_described(call.boxes[name], tensor, rows) for name, (rows, tensor) in sizes.items()]
    described.append(
        _described_as(call.boxes["out_desc"], (batch, query_length, heads, head_dim_v), None, seen.queries)
    )
    scalars = (
        query_length, items, tiles, query_tiles, seen.queries, seen.keys, heads, heads // kv_heads, scale_log2,
        *seen.bounds(), *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], head_dim, head_dim_v, cap_scale,
    )  # fmt: skip
    launch = PreparedDescriptorLaunch(call.kernel, programs, tuple(described), scalars, call.constants)
    return seen, launch, table


def prepare_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    d_out: Tensor,
    has_d_lse: bool,
    scale: float,
    low: int | None,
    high: int | None,
    options: Options,
    deterministic: bool,
) -> tuple[Any, ...]:
    """(What is seen, the four launches in order, the schedules of the second and the third, shapes of statistics and accumulator)."""
    batch, query_length, heads, head_dim = q.shape
    key_length, kv_heads, head_dim_v = v.shape[1:]
    seen = Seen.of(query_length, key_length, low, high)
    if seen.queries == 0:
        return seen, None, None, None, None
    on, scale_log2, cap_scale = kernel_options(options, scale)
    padded = padded_backward(max(head_dim, head_dim_v), on.soft_cap)
    key_block = BACKWARD[padded, False].keys
    band = seen.band(key_block)
    configuration = backward_configuration(padded, band != "full", not deterministic, on.soft_cap)
    block_m = configuration.block_m
    query_tiles = -(-seen.queries // block_m)
    key_blocks = -(-seen.keys // key_block)
    tiles = key_blocks * batch * kv_heads
    # Q and dO are what all blocks of keys of a head read.
    bytes_per_row = (head_dim + head_dim_v) * q.dtype.itemsize * 2 * (heads // kv_heads)
    together = heads_in_l2(seen.queries, bytes_per_row, batch * kv_heads)
    programs, items, table = tiles, together, no_table(q.device)
    if configuration.persistent:
        programs = min(_processors(q.device), tiles)
        negated = (None if seen.high is None else -seen.high, None if seen.low is None else -seen.low)
        visible = visible_counts(key_blocks, key_block, seen.keys, seen.queries, block_m, *negated)
        costs = visible * (heads // kv_heads) + 1.0
        table = _schedule(costs, batch * kv_heads, together, programs, q.device)
        items = table.shape[0]
    call = backward_call(padded, q.dtype, band, heads != kv_heads, not deterministic, on)
    rows = batch * heads * query_tiles
    stats_shape, acc_shape = (rows, 2 * block_m), (rows * block_m * padded // 256, 256)
    described = (
        _described(call.boxes["q_desc"], q, seen.queries),
        _described(call.boxes["k_desc"], k, seen.keys),
        _described(call.boxes["v_desc"], v, seen.keys),
        _described(call.boxes["d_out_desc"], d_out, seen.queries),
        _described_flat(call.boxes["stats_desc"], stats_shape),
        _described_flat(call.boxes["acc_desc"], acc_shape),
        _described_as(call.boxes["d_k_desc"], (batch, key_length, kv_heads, head_dim), None, seen.keys),
        _described_as(call.boxes["d_v_desc"], (batch, key_length, kv_heads, head_dim_v), None, seen.keys),
    )
    scalars = (
        items, tiles, key_blocks, query_tiles, seen.queries, seen.keys, kv_heads, heads // kv_heads, scale, scale_log2,
        *seen.bounds(), cap_scale,
    )  # fmt: skip
    main = PreparedDescriptorLaunch(call.kernel, programs, described, scalars, call.constants)
    before = (
        *out.stride()[:3], *d_out.stride()[:3], seen.queries, query_tiles, heads, query_length, head_dim_v,
        block_m, padded, padded == head_dim_v, has_d_lse, not deterministic, False,
    )  # fmt: skip
    row = heads * head_dim
    after = (
        query_length * row, row, head_dim, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *d_out.stride()[:3],
        seen.queries, seen.keys, query_tiles, heads, heads // kv_heads, scale, scale_log2, *seen.bounds(), head_dim, head_dim_v, cap_scale,
        block_m, padded, padded == head_dim, band != "full", False,
    )  # fmt: skip
    queries, query_table = None, table
    if deterministic:
        queries, query_table = _prepare_queries(q, k, v, d_out, seen, band, query_tiles, scale, options)
    launches = (
        PreparedLaunch(prepare_kernel, rows, before, 4, 2),
        main,
        queries,
        PreparedLaunch(finish_kernel, rows, after, 4, 2),
    )
    return seen, launches, (table, query_table), stats_shape, acc_shape


def _prepare_queries(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    seen: Seen,
    band: Band,
    stats_tiles: int,
    scale: float,
    options: Options,
) -> tuple[PreparedDescriptorLaunch, Tensor]:
    """The pass that makes d_q alone, and its schedule."""
    batch, _, heads, head_dim = q.shape
    kv_heads, head_dim_v = v.shape[2:]
    on, scale_log2, cap_scale = kernel_options(options, scale)
    padded = padded_backward(max(head_dim, head_dim_v), on.soft_cap)
    configuration = QUERIES[padded]
    query_tiles = -(-seen.queries // configuration.block_m)
    tiles = query_tiles * batch * heads
    programs = min(_processors(q.device), tiles)
    items, table = -(-tiles // programs), no_table(q.device)
    if band != "full":
        table = _query_schedule(
            seen, query_tiles, configuration.block_m, configuration.block_n, q, v.shape[2:], programs
        )
        items = table.shape[0]
    call = backward_queries_call(padded, q.dtype, band, on)
    rows = {
        "q_desc": (q, seen.queries),
        "k_desc": (k, seen.keys),
        "v_desc": (v, seen.keys),
        "d_out_desc": (d_out, seen.queries),
    }
    described = tuple(_described(call.boxes[name], tensor, length) for name, (tensor, length) in rows.items())
    scalars = (
        items, tiles, query_tiles, seen.queries, seen.keys, heads, heads // kv_heads, scale_log2, *seen.bounds(), stats_tiles,
        cap_scale,
    )  # fmt: skip
    return PreparedDescriptorLaunch(call.kernel, programs, described, scalars, call.constants), table


def _query_schedule(
    seen: Seen, query_tiles: int, block_m: int, block_n: int, q: Tensor, kv_shape: tuple[int, ...], programs: int
) -> Tensor:
    """Which programs make which tiles of queries, where a band makes them unequal. `kv_shape` is (Hkv, Dv)."""
    batch, _, heads, head_dim = q.shape
    kv_heads, head_dim_v = kv_shape
    visible = visible_counts(query_tiles, block_m, seen.queries, seen.keys, block_n, seen.low, seen.high)
    bytes_per_row = (head_dim + head_dim_v) * q.dtype.itemsize
    together = heads_in_l2(seen.keys, bytes_per_row, batch * kv_heads) * (heads // kv_heads)
    return _schedule(visible + _TILE_OVERHEAD, batch * heads, together, programs, q.device)


def _described(box: Box, tensor: Tensor, rows: int) -> DescribedTensor:
    return _described_as(box, tuple(tensor.shape), tensor.stride(), rows)


def _described_as(box: Box, shape: tuple[int, ...], strides: tuple[int, ...] | None, rows: int) -> DescribedTensor:
    """A [B, S, H, D] tensor (contiguous where `strides` is None) as TMA sees it, [B, H, S, D], cut to `rows` rows."""
    batch, length, heads, head_dim = shape
    if strides is None:
        strides = (length * heads * head_dim, heads * head_dim, head_dim, 1)
    # The stride of a dimension of one element means nothing, but must be a multiple of 16 bytes.
    of_batch, of_row, of_head = (
        8 if n == 1 else stride for n, stride in zip((batch, length, heads), strides[:3], strict=True)
    )
    return DescribedTensor((batch, heads, rows, head_dim), (of_batch, of_head, of_row, 1), box.shape, box.layout)


def _described_flat(box: Box, shape: tuple[int, int]) -> DescribedTensor:
    return DescribedTensor(shape, (shape[1], 1), box.shape, box.layout)


@lru_cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def no_table(device: torch.device) -> Tensor:
    """An address for programs that have no schedule and do not look at it."""
    return torch.zeros(4, dtype=torch.int32, device=device)


def _schedule(costs: Any, heads: int, together: int, programs: int, device: torch.device) -> Tensor:
    """`longest_first` on the device. Kept for ever, a few KB each: a captured CUDA graph holds its address."""
    key = (costs.tobytes(), heads, together, programs, device)
    table = _schedules.get(key)
    if table is None:
        host = longest_first(costs, heads, together, programs)
        table = _schedules[key] = torch.from_numpy(host).to(device)
    return table
