"""Launches the Hopper attention kernels: outputs, schedules, descriptors. Tensors are [B, S, H, D]."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tileflash.kernels.compat import PreparedLaunch, current_device, remember
from tileflash.kernels.compat_gluon import DescribedTensor, PreparedDescriptorLaunch
from tileflash.kernels.hopper.attention_backward_ends import finish_kernel, prepare_kernel
from tileflash.kernels.hopper.configurations import (
    BACKWARD,
    FORWARD,
    QUERIES,
    backward_configuration,
    padded_head_dim,
)
from tileflash.kernels.hopper.launch import (
    Band,
    Box,
    backward_call,
    backward_queries_call,
    forward_call,
)
from tileflash.kernels.hopper.schedule import heads_in_l2, longest_first, visible_counts
from tileflash.kernels.options import NO_GRADIENTS, PLAIN, OptionGradients, Options

_LOG2_E = 1.4426950408889634
# What a tile costs besides its steps, in steps: its start, its first product, its end. Measured by nobody; the order hardly depends on it.
_TILE_OVERHEAD = 0.75

# Launches made ready, by all that they depend on.
_forward_launches: dict[Any, Any] = {}
_backward_launches: dict[Any, Any] = {}
_schedules: dict[Any, Tensor] = {}


@dataclass(frozen=True)
class _Seen:
    """The part of a problem where queries see keys: queries [query_begin, query_end), keys [key_begin, key_end), and the band inside it.

    Rows i see [i + low, i + high], so those that see something are a range, and the keys that somebody sees are one. The kernels get
    this part only: they never read a key that nobody sees (it may hold NaN) and meet no row without a key.
    """

    query_begin: int
    query_end: int
    key_begin: int
    key_end: int
    low: int | None
    high: int | None

    @staticmethod
    def of(query_length: int, key_length: int, low: int | None, high: int | None) -> _Seen:
        query_begin = 0 if high is None else max(0, -high)
        query_end = query_length if low is None else min(query_length, key_length - low)
        key_begin = 0 if low is None else max(0, low + query_begin)
        key_end = key_length if high is None else min(key_length, query_end + high)
        queries, keys = query_end - query_begin, key_end - key_begin
        if low is not None:
            low += query_begin - key_begin
            low = None if low <= 1 - queries else low
        if high is not None:
            high += query_begin - key_begin
            high = None if high >= keys - 1 else high
        if queries <= 0 or keys <= 0 or (low is not None and high is not None and low > high):
            return _Seen(0, 0, 0, 0, None, None)
        return _Seen(query_begin, query_end, key_begin, key_end, low, high)

    @property
    def queries(self) -> int:
        return self.query_end - self.query_begin

    @property
    def keys(self) -> int:
        return self.key_end - self.key_begin

    def band(self, key_rows: int) -> Band:
        """Which kernel serves: one without masks only where nothing is cut, the last tile of keys included."""
        if self.low is not None:
            return "window"
        return "full" if self.high is None and self.keys % key_rows == 0 else "high"

    def bounds(self) -> tuple[int, int]:
        """low and high as the kernels take them; a bound that is None excludes nothing."""
        return (-self.queries if self.low is None else self.low), (self.keys if self.high is None else self.high)


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, low: int | None, high: int | None, options: Options = PLAIN
) -> tuple[Tensor, Tensor]:
    """out [B, Sq, Hq, Dv] in q's dtype and lse [B, Hq, Sq] fp32 of q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv].

    fp16 or bf16; D and Dv multiples of 8, at most 256. Query i sees key j where low <= j - i <= high (None: no bound). `scale` > 0
    multiplies the logits. Strides are free; a tensor that TMA cannot address (last dimension not contiguous, a stride or an address
    that is no multiple of 16 bytes, an expanded dimension) is copied. Equal bit for bit from run to run.
    """
    if q.numel() == 0 or k.numel() == 0:
        shape = (*q.shape[:3], v.shape[3])
        return q.new_zeros(shape), q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float32)
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    key = (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, q.device, scale, low, high)
    prepared = _forward_launches.get(key)
    if prepared is None:
        if not (_addressable(q) and _addressable(k) and _addressable(v)):
            q, k, v = (t if _addressable(t) else t.contiguous() for t in (q, k, v))
            return attention_forward(q, k, v, scale, low, high)
        prepared = remember(_forward_launches, key, _prepare_forward(q, k, v, scale, low, high))
    seen, launch, table = prepared
    batch, query_length, heads, _ = q.shape
    out = torch.empty((batch, query_length, heads, v.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, query_length), dtype=torch.float32, device=q.device)
    seen_out, seen_lse = out, lse
    if seen.queries != query_length or seen.keys != k.shape[1]:
        out[:, : seen.query_begin], out[:, seen.query_end :] = 0, 0
        lse[:, :, : seen.query_begin], lse[:, :, seen.query_end :] = -torch.inf, -torch.inf
        q, k, v = _queries(q, seen), _keys(k, seen), _keys(v, seen)
        seen_out, seen_lse = _queries(out, seen), lse[:, :, seen.query_begin :]
    if launch is not None:
        with current_device(q):
            launch((q, k, v, seen_out), (seen_lse, table, q, k, v), q.get_device())
    return out, lse


def attention_backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float, low: int | None, high: int | None, options: Options = PLAIN, deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor, OptionGradients]:  # fmt: skip
    """d_q, d_k, d_v in the inputs' shapes and dtypes, contiguous; d_out [B, Sq, Hq, Dv] in any strides, d_lse [B, Hq, Sq] or None.

    The sum of d_q has no fixed order: its last bits differ from run to run. With `deterministic` a pass of its own makes d_q, and all is
    equal bit for bit.
    """
    if q.numel() == 0 or k.numel() == 0:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape), NO_GRADIENTS
    q, k, v, d_out = _aligned(q), _aligned(k), _aligned(v), _aligned(d_out)
    out = out if out.stride(3) == 1 else out.contiguous()
    lse = lse.contiguous()
    d_lse = None if d_lse is None else d_lse.contiguous()
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), out.stride(), d_out.stride(),
        q.dtype, q.device, scale, low, high, d_lse is None, deterministic,
    )  # fmt: skip
    prepared = _backward_launches.get(key)
    if prepared is None:
        if not all(_addressable(t) for t in (q, k, v, d_out)):
            q, k, v, d_out = (t if _addressable(t) else t.contiguous() for t in (q, k, v, d_out))
            return attention_backward(d_out, d_lse, q, k, v, out, lse, scale, low, high, options, deterministic)
        prepared = _prepare_backward(q, k, v, out, d_out, d_lse is not None, scale, low, high, deterministic)
        remember(_backward_launches, key, prepared)
    d_q, d_k, d_v = (torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (q, k, v))
    seen, launches, tables, stats_shape, acc_shape = prepared
    seen_d_q, seen_d_k, seen_d_v = d_q, d_k, d_v
    if seen.queries != q.shape[1] or seen.keys != k.shape[1]:
        d_q[:, : seen.query_begin], d_q[:, seen.query_end :] = 0, 0
        for d_tensor in (d_k, d_v):
            d_tensor[:, : seen.key_begin], d_tensor[:, seen.key_end :] = 0, 0
        q, out, d_out, seen_d_q = (_queries(t, seen) for t in (q, out, d_out, d_q))
        k, v, seen_d_k, seen_d_v = (_keys(t, seen) for t in (k, v, d_k, d_v))
        lse = lse[:, :, seen.query_begin :]
        d_lse = None if d_lse is None else d_lse[:, :, seen.query_begin :]
    if launches is not None:
        prepare, launch, launch_queries, finish = launches
        stats = torch.empty(stats_shape, dtype=torch.float32, device=q.device)
        acc = torch.empty(acc_shape, dtype=torch.float32, device=q.device)
        device_index = q.get_device()
        with current_device(q):
            # Where there is no d_lse, an address that is not looked at.
            prepare((out, d_out, lse, stats if d_lse is None else d_lse, stats, acc), device_index)
            launch((q, k, v, d_out, stats, acc, seen_d_k, seen_d_v), (acc, tables[0]), device_index)
            if launch_queries is not None:
                launch_queries((q, k, v, d_out), (stats, acc, tables[1]), device_index)
            finish((acc, seen_d_q, stats, q, k, v, d_out), device_index)
    return d_q, d_k, d_v, NO_GRADIENTS


def _prepare_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, low: int | None, high: int | None
) -> tuple[_Seen, PreparedDescriptorLaunch | None, Tensor]:
    batch, query_length, heads, head_dim = q.shape
    kv_heads, head_dim_v = v.shape[2:]
    seen = _Seen.of(query_length, k.shape[1], low, high)
    if seen.queries == 0:
        return seen, None, _no_table(q.device)
    padded = padded_head_dim(max(head_dim, head_dim_v))
    block_n = FORWARD[padded, False].block_n
    band = seen.band(block_n)
    configuration = FORWARD[padded, band != "full"]
    query_tiles = -(-seen.queries // configuration.block_m)
    tiles = query_tiles * batch * heads
    programs = min(_processors(q.device), tiles)
    items = -(-tiles // programs)
    table = _no_table(q.device)
    if band != "full":
        table = _query_schedule(seen, query_tiles, configuration.block_m, block_n, q, v.shape[2:], programs)
        items = table.shape[0]
    call = forward_call(padded, q.dtype, band)
    sizes = {"q_desc": (seen.queries, q), "k_desc": (seen.keys, k), "v_desc": (seen.keys, v)}
    described = [_described(call.boxes[name], tensor, rows) for name, (rows, tensor) in sizes.items()]
    described.append(
        _described_as(call.boxes["out_desc"], (batch, query_length, heads, head_dim_v), None, seen.queries)
    )
    scalars = (
        query_length, items, tiles, query_tiles, seen.queries, seen.keys, heads, heads // kv_heads, scale * _LOG2_E,
        *seen.bounds(), *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], head_dim, head_dim_v,
    )  # fmt: skip
    launch = PreparedDescriptorLaunch(call.kernel, programs, tuple(described), scalars, call.constants)
    return seen, launch, table


def _prepare_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    d_out: Tensor,
    has_d_lse: bool,
    scale: float,
    low: int | None,
    high: int | None,
    deterministic: bool,
) -> tuple[Any, ...]:
    """(what is seen, the four launches in order, the schedules of the second and the third, shapes of statistics and accumulator)."""
    batch, query_length, heads, head_dim = q.shape
    key_length, kv_heads, head_dim_v = v.shape[1:]
    seen = _Seen.of(query_length, key_length, low, high)
    if seen.queries == 0:
        return seen, None, None, None, None
    padded = padded_head_dim(max(head_dim, head_dim_v))
    key_block = BACKWARD[padded, False].keys
    band = seen.band(key_block)
    configuration = backward_configuration(padded, band != "full", not deterministic)
    block_m = configuration.block_m
    query_tiles = -(-seen.queries // block_m)
    key_blocks = -(-seen.keys // key_block)
    tiles = key_blocks * batch * kv_heads
    # Q and dO are what all blocks of keys of a head read.
    bytes_per_row = (head_dim + head_dim_v) * q.dtype.itemsize * 2 * (heads // kv_heads)
    together = heads_in_l2(seen.queries, bytes_per_row, batch * kv_heads)
    programs, items, table = tiles, together, _no_table(q.device)
    if configuration.persistent:
        programs = min(_processors(q.device), tiles)
        negated = (None if seen.high is None else -seen.high, None if seen.low is None else -seen.low)
        visible = visible_counts(key_blocks, key_block, seen.keys, seen.queries, block_m, *negated)
        costs = visible * (heads // kv_heads) + 1.0
        table = _schedule(costs, batch * kv_heads, together, programs, q.device)
        items = table.shape[0]
    call = backward_call(padded, q.dtype, band, heads != kv_heads, not deterministic)
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
        items, tiles, key_blocks, query_tiles, seen.queries, seen.keys, kv_heads, heads // kv_heads, scale, scale * _LOG2_E,
        *seen.bounds(),
    )  # fmt: skip
    main = PreparedDescriptorLaunch(call.kernel, programs, described, scalars, call.constants)
    before = (
        *out.stride()[:3], *d_out.stride()[:3], seen.queries, query_tiles, heads, query_length, head_dim_v,
        block_m, padded, padded == head_dim_v, has_d_lse, not deterministic,
    )  # fmt: skip
    row = heads * head_dim
    after = (
        query_length * row, row, head_dim, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *d_out.stride()[:3],
        seen.queries, seen.keys, query_tiles, heads, heads // kv_heads, scale, scale * _LOG2_E, *seen.bounds(), head_dim, head_dim_v,
        block_m, padded, padded == head_dim, band != "full",
    )  # fmt: skip
    queries, query_table = None, table
    if deterministic:
        queries, query_table = _prepare_queries(q, k, v, d_out, seen, band, query_tiles, scale)
    launches = (
        PreparedLaunch(prepare_kernel, rows, before, 4, 2),
        main,
        queries,
        PreparedLaunch(finish_kernel, rows, after, 4, 2),
    )
    return seen, launches, (table, query_table), stats_shape, acc_shape


def _prepare_queries(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, seen: _Seen, band: Band, stats_tiles: int, scale: float
) -> tuple[PreparedDescriptorLaunch, Tensor]:
    """The pass that makes d_q alone, and its schedule."""
    batch, _, heads, head_dim = q.shape
    kv_heads, head_dim_v = v.shape[2:]
    padded = padded_head_dim(max(head_dim, head_dim_v))
    configuration = QUERIES[padded]
    query_tiles = -(-seen.queries // configuration.block_m)
    tiles = query_tiles * batch * heads
    programs = min(_processors(q.device), tiles)
    items, table = -(-tiles // programs), _no_table(q.device)
    if band != "full":
        table = _query_schedule(
            seen, query_tiles, configuration.block_m, configuration.block_n, q, v.shape[2:], programs
        )
        items = table.shape[0]
    call = backward_queries_call(padded, q.dtype, band)
    rows = {
        "q_desc": (q, seen.queries),
        "k_desc": (k, seen.keys),
        "v_desc": (v, seen.keys),
        "d_out_desc": (d_out, seen.queries),
    }
    described = tuple(_described(call.boxes[name], tensor, length) for name, (tensor, length) in rows.items())
    scalars = (
        items, tiles, query_tiles, seen.queries, seen.keys, heads, heads // kv_heads, scale * _LOG2_E, *seen.bounds(), stats_tiles,
    )  # fmt: skip
    return PreparedDescriptorLaunch(call.kernel, programs, described, scalars, call.constants), table


def _query_schedule(
    seen: _Seen, query_tiles: int, block_m: int, block_n: int, q: Tensor, kv_shape: tuple[int, ...], programs: int
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


def _queries(tensor: Tensor, seen: _Seen) -> Tensor:
    return tensor[:, seen.query_begin : seen.query_end]


def _keys(tensor: Tensor, seen: _Seen) -> Tensor:
    return tensor[:, seen.key_begin : seen.key_end]


def _aligned(tensor: Tensor) -> Tensor:
    return tensor if tensor.data_ptr() & 15 == 0 else tensor.clone(memory_format=torch.contiguous_format)


def _addressable(tensor: Tensor) -> bool:
    """Whether TMA can address the tensor: last dimension contiguous, the other strides multiples of 16 bytes and not 0."""
    if tensor.stride(3) != 1 and tensor.shape[3] != 1:
        return False
    return all(
        n == 1 or (stride and stride % 8 == 0) for n, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    )


@lru_cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def _no_table(device: torch.device) -> Tensor:
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
