"""Launches the Hopper kernels for packed sequences, tensors [1, total, H, D]: one program for each slot of each head (packed_tiles.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tileflash.kernels.buffers import empty_contiguous, empty_out
from tileflash.kernels.compat import PreparedLaunch, current_device, remember
from tileflash.kernels.compat_gluon import DescribedTensor, PreparedDescriptorLaunch
from tileflash.kernels.hopper.attention_backward_ends import finish_kernel, prepare_kernel
from tileflash.kernels.hopper.configurations import (
    FORWARD,
    QUERIES,
    backward_configuration,
    padded_backward,
    padded_head_dim,
)
from tileflash.kernels.hopper.launch import (
    Band,
    Box,
    backward_call,
    backward_queries_call,
    forward_call,
)
from tileflash.kernels.hopper.packed_tiles import (
    ENTRY,
    ROWS,
    SLOTS,
    clear_unseen_kernel,
    packed_tiles_kernel,
    slots_of,
)
from tileflash.kernels.hopper.prepared import kernel_options
from tileflash.kernels.hopper.sinks import sink_gradient
from tileflash.kernels.options import NO_GRADIENTS, OptionGradients, Options

_NO_SINKS: tuple[tuple[Any, ...], ...] = ((),)

_launches: dict[Any, Any] = {}


class Lengths:
    """What a packed call says of its sequences without a look at the GPU, and the kernels that look."""

    def __init__(self, q: Tensor, k: Tensor, low: int | None, high: int | None, options: Options) -> None:
        assert options.cu_seqlens_q is not None
        self.sequences = options.cu_seqlens_q.shape[0] - 1
        self.total_q, self.total_k = q.shape[1], k.shape[1]
        self.device = q.device
        self.band: Band = "high" if low is None else "window"
        self._numbers = (
            self.sequences, self.sequences.bit_length(), self.total_q, self.total_k, low or 0, high or 0,
        )  # fmt: skip
        self._flags = (low is not None, high is not None, options.top_left)

    def slots(self, block: int, of_keys: bool = False) -> int:
        """Slots of a head, for tiles of `block` rows."""
        return slots_of(self.total_k if of_keys else self.total_q, block, self.sequences)

    def tiles(self, block: int, stats_rows: int, of_keys: bool = False, backwards: bool = False) -> PreparedLaunch:
        """Launch (cu_seqlens_q, cu_seqlens_k, table) that fills a table of slots."""
        slots = self.slots(block, of_keys)
        scalars = (slots, *self._numbers, block, stats_rows, of_keys, backwards, *self._flags)
        return PreparedLaunch(packed_tiles_kernel, -(-slots // SLOTS.value), scalars, 4, 2)

    def table(self, block: int, of_keys: bool = False) -> Tensor:
        """Memory for such a table."""
        return torch.empty(self.slots(block, of_keys) * ENTRY.value, dtype=torch.int32, device=self.device)

    def clear(
        self, heads: int, head_dim: int, of_keys: bool = False, has_lse: bool = False, has_sinks: bool = False
    ) -> PreparedLaunch:
        """Launch (cu_seqlens_q, cu_seqlens_k, contiguous rows [total, H, D], lse), with a tuple of the sinks or (), that writes rows which
        see nothing."""
        total = self.total_k if of_keys else self.total_q
        scalars = (
            heads * head_dim, head_dim, *self._numbers, heads, head_dim,
            max(16, 1 << (head_dim - 1).bit_length()), of_keys, has_lse, has_sinks, *self._flags,
        )  # fmt: skip
        return PreparedLaunch(clear_unseen_kernel, -(-total // ROWS.value) * heads, scalars, 4, 2)


def packed_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    low: int | None,
    high: int | None,
    options: Options,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """out [1, total, Hq, Dv] and lse [1, Hq, total]; q, k, v as TMA can address them. Rows behind the last sequence: 0 and -inf.

    `sinks` are those of `options` in fp32, contiguous.
    """
    out, lse = empty_out(q, v)
    cu_q, cu_k = options.cu_seqlens_q, options.cu_seqlens_k
    assert cu_q is not None
    assert cu_k is not None
    if lse.numel() == 0 or cu_q.shape[0] == 1:
        return out.zero_(), lse.fill_(-torch.inf)
    key = ("forward", *_facts((q, k, v), scale, low, high, options))
    prepared = _launches.get(key)
    if prepared is None:
        prepared = remember(_launches, key, _prepare_forward(q, k, v, scale, low, high, options))
    lengths, block_m, tiles, clear, launch = prepared
    table = lengths.table(block_m)
    device_index = q.get_device()
    with current_device(q):
        tiles((cu_q, cu_k, table), device_index)
        clear((cu_q, cu_k, out, lse), device_index, _NO_SINKS if sinks is None else ((sinks,),))
        if k.shape[1]:
            launch((q, k, v, out), (lse, table, q, k, v, sinks), device_index)
    return out, lse


def packed_backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float, low: int | None, high: int | None, options: Options, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, OptionGradients]:  # fmt: skip
    """d_q, d_k, d_v, contiguous; q, k, v and d_out as TMA can address them, lse and d_lse contiguous."""
    d_q, d_k, d_v = empty_contiguous(q), empty_contiguous(k), empty_contiguous(v)
    cu_q, cu_k = options.cu_seqlens_q, options.cu_seqlens_k
    assert cu_q is not None
    assert cu_k is not None
    if q.numel() == 0 or k.numel() == 0 or cu_q.shape[0] == 1:
        return d_q.zero_(), d_k.zero_(), d_v.zero_(), _of_sinks_alone(d_lse, cu_q, options)
    facts = _facts((q, k, v, out, d_out), scale, low, high, options)
    key = ("backward", *facts, d_lse is None, deterministic)
    prepared = _launches.get(key)
    if prepared is None:
        has_d_lse = d_lse is not None
        prepared = _prepare_backward(q, k, v, out, d_out, has_d_lse, scale, low, high, options, deterministic)
        remember(_launches, key, prepared)
    lengths, blocks, tables, clears, launches, stats_shape, acc_shape = prepared
    prepare, main, queries, finish = launches
    key_block, block_m, block_m_queries = blocks
    stats = torch.empty(stats_shape, dtype=torch.float32, device=q.device)
    acc = torch.empty(acc_shape, dtype=torch.float32, device=q.device)
    key_table, query_table = lengths.table(key_block, of_keys=True), lengths.table(block_m)
    device_index = q.get_device()
    with current_device(q):
        tables[0]((cu_q, cu_k, key_table), device_index)
        tables[1]((cu_q, cu_k, query_table), device_index)
        unseen = torch.zeros_like(lse) if options.sinks is not None else lse  # lse: an address that is not looked at
        for launch, gradient in zip(clears, (d_q, d_k, d_v), strict=True):
            launch((cu_q, cu_k, gradient, unseen), device_index, _NO_SINKS)
        prepare((out, d_out, lse, stats if d_lse is None else d_lse, stats, acc), device_index, ((query_table,),))
        main((q, k, v, d_out, stats, acc, d_k, d_v), (acc, key_table), device_index)
        if queries is not None:
            own_table = lengths.table(block_m_queries)
            tables[2]((cu_q, cu_k, own_table), device_index)
            queries((q, k, v, d_out), (stats, acc, own_table), device_index)
        finish((acc, d_q, stats, q, k, v, d_out), device_index, ((query_table,),))
    if options.sinks is None:
        return d_q, d_k, d_v, NO_GRADIENTS
    # Of rows that see the sink alone d_lse goes to it whole; those behind the last sequence do not even see the sink.
    alone = None if d_lse is None else torch.where((unseen == 0) | (lse == -torch.inf), 0.0, d_lse)
    return d_q, d_k, d_v, sink_gradient(options, alone, stats, 1)


def _of_sinks_alone(d_lse: Tensor | None, cu_q: Tensor, options: Options) -> OptionGradients:
    """Where there are no keys at all: every query of a sequence sees the sink alone."""
    if d_lse is not None and options.sinks is not None:
        d_lse = torch.where(torch.arange(d_lse.shape[2], device=d_lse.device) < cu_q[-1], d_lse, 0.0)
    return sink_gradient(options, d_lse, None, 1)


def _facts(tensors: tuple[Tensor, ...], scale: float, low: int | None, high: int | None, options: Options) -> Any:
    """What prepared launches depend on."""
    cu_q = options.cu_seqlens_q
    assert cu_q is not None
    return (
        *((tensor.shape, tensor.stride()) for tensor in tensors), tensors[0].dtype, tensors[0].device, scale, low, high,
        options.softcap, options.sinks is None, options.top_left, cu_q.shape[0],
    )  # fmt: skip


def _prepare_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, low: int | None, high: int | None, options: Options
) -> tuple[Any, ...]:
    _, total, heads, head_dim = q.shape
    kv_heads, head_dim_v = v.shape[2:]
    on, scale_log2, cap_scale = kernel_options(options, scale)
    lengths = Lengths(q, k, low, high, options)
    padded = padded_head_dim(max(head_dim, head_dim_v))
    block_m = FORWARD[padded, True].block_m
    slots = lengths.slots(block_m)
    call = forward_call(padded, q.dtype, lengths.band, on)
    described = (
        *(_described(call.boxes[name], t) for name, t in (("q_desc", q), ("k_desc", k), ("v_desc", v))),
        _described_as(call.boxes["out_desc"], heads, head_dim_v, heads * head_dim_v, head_dim_v),
    )
    scalars = (
        total, 1, slots * heads, slots, 0, 0, heads, heads // kv_heads, scale_log2, 0, 0,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], head_dim, head_dim_v, cap_scale,
    )  # fmt: skip
    launch = PreparedDescriptorLaunch(call.kernel, slots * heads, described, scalars, call.constants)
    tiles = lengths.tiles(block_m, block_m, backwards=True)
    return lengths, block_m, tiles, lengths.clear(heads, head_dim_v, has_lse=True, has_sinks=on.sinks), launch


def _prepare_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, d_out: Tensor, has_d_lse: bool,
    scale: float, low: int | None, high: int | None, options: Options, deterministic: bool,
) -> tuple[Any, ...]:  # fmt: skip
    _, total, heads, head_dim = q.shape
    kv_heads, head_dim_v = v.shape[2:]
    group = heads // kv_heads
    on, scale_log2, cap_scale = kernel_options(options, scale)
    lengths = Lengths(q, k, low, high, options)
    padded = padded_backward(max(head_dim, head_dim_v), on.soft_cap)
    configuration = backward_configuration(padded, True, not deterministic, on.soft_cap, packed=True)
    block_m, keys = configuration.block_m, configuration.keys
    slots, key_slots = lengths.slots(block_m), lengths.slots(keys, of_keys=True)
    stats_shape, acc_shape = (heads * slots, 2 * block_m), (heads * slots * block_m * padded // 256, 256)
    call = backward_call(padded, q.dtype, lengths.band, group > 1, not deterministic, on)
    boxes = call.boxes
    described = (
        _described(boxes["q_desc"], q), _described(boxes["k_desc"], k), _described(boxes["v_desc"], v),
        _described(boxes["d_out_desc"], d_out), _flat(boxes["stats_desc"], stats_shape), _flat(boxes["acc_desc"], acc_shape),
        _described_as(boxes["d_k_desc"], kv_heads, head_dim, kv_heads * head_dim, head_dim),
        _described_as(boxes["d_v_desc"], kv_heads, head_dim_v, kv_heads * head_dim_v, head_dim_v),
    )  # fmt: skip
    programs = key_slots * kv_heads
    scalars = (1, programs, key_slots, slots, 0, 0, kv_heads, group, scale, scale_log2, 0, 0, cap_scale)
    main = PreparedDescriptorLaunch(call.kernel, programs, described, scalars, call.constants)
    before = (
        *out.stride()[:3], *d_out.stride()[:3], 0, slots, heads, total, head_dim_v,
        block_m, padded, padded == head_dim_v, has_d_lse, not deterministic, True,
    )  # fmt: skip
    row = heads * head_dim
    after = (
        total * row, row, head_dim, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *d_out.stride()[:3],
        0, 0, slots, heads, group, scale, scale_log2, 0, 0, head_dim, head_dim_v, cap_scale,
        block_m, padded, padded == head_dim, True, True,
    )  # fmt: skip
    queries, block_m_queries = None, 0
    tables = [lengths.tiles(keys, block_m, of_keys=True), lengths.tiles(block_m, block_m)]
    if deterministic:
        block_m_queries = QUERIES[padded].block_m
        query_slots = lengths.slots(block_m_queries)
        call = backward_queries_call(padded, q.dtype, lengths.band, on)
        names = (("q_desc", q), ("k_desc", k), ("v_desc", v), ("d_out_desc", d_out))
        described_again = tuple(_described(call.boxes[name], tensor) for name, tensor in names)
        scalars_again = (1, query_slots * heads, query_slots, 0, 0, heads, group, scale_log2, 0, 0, slots, cap_scale)
        queries = PreparedDescriptorLaunch(
            call.kernel, query_slots * heads, described_again, scalars_again, call.constants
        )
        tables.append(lengths.tiles(block_m_queries, block_m, backwards=True))
    launches = (
        PreparedLaunch(prepare_kernel, heads * slots, before, 4, 2), main, queries,
        PreparedLaunch(finish_kernel, heads * slots, after, 4, 2),
    )  # fmt: skip
    clears = (
        lengths.clear(heads, head_dim, has_lse=on.sinks), lengths.clear(kv_heads, head_dim, of_keys=True),
        lengths.clear(kv_heads, head_dim_v, of_keys=True),
    )  # fmt: skip
    return lengths, (keys, block_m, block_m_queries), tables, clears, launches, stats_shape, acc_shape


def _described(box: Box, tensor: Tensor) -> DescribedTensor:
    _, total, heads, head_dim = tensor.shape
    of_row, of_head = tensor.stride()[1:3]
    # The stride of a dimension of one element means nothing, but must be a multiple of 16 bytes.
    return _described_as(box, heads, head_dim, 8 if total == 1 else of_row, 8 if heads == 1 else of_head)


def _described_as(box: Box, heads: int, head_dim: int, of_row: int, of_head: int) -> DescribedTensor:
    """Packed rows [total, H, D] as TMA sees them: [.., .., H, .., D], where the first two dimensions place the end of a sequence at row
    2^30, the end of the fourth (`tile.rows_at`). Their strides are such that the address wraps around 2^64 back to the tensor, as in
    triton.tools.ragged_tma.
    """
    most = 0x7FFF0000
    strides = (2**34 - of_row, of_row, of_head, of_row, 1)
    return DescribedTensor((most, most, heads, 2**30, head_dim), strides, box.shape, box.layout)


def _flat(box: Box, shape: tuple[int, int]) -> DescribedTensor:
    return DescribedTensor(shape, (shape[1], 1), box.shape, box.layout)
