"""What comes before and after the backward kernel, in plain Triton: statistics and a zeroed accumulator, and the accumulator made dQ."""

import triton
import triton.language as tl

from tileflash.kernels.hopper.attention_backward_again import d_query_again, load_rows
from tileflash.kernels.hopper.packed_tiles import ENTRY

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def packed_slot(packed, slot):
    """(first row of the tile, first query, queries, first key, keys, low, high) of a slot (packed_tiles.py), all that addresses are made of
    64-bit. A slot without a tile has no queries."""
    (table_ptr,) = packed
    entry = table_ptr + slot * ENTRY
    i_row = tl.load(entry)
    queries = tl.where(i_row < 0, 0, tl.load(entry + 2))
    return (
        tl.maximum(i_row, 0), tl.load(entry + 1).to(tl.int64), queries, tl.load(entry + 3).to(tl.int64), tl.load(entry + 4),
        tl.load(entry + 5), tl.load(entry + 6),
    )  # fmt: skip


@triton.jit(do_not_specialize=["query_length", "query_tiles", "heads", "lse_stride"])
def prepare_kernel(
    out_ptr, d_out_ptr, lse_ptr, d_lse_ptr, stats_ptr, acc_ptr, packed,
    stride_ob, stride_os, stride_oh, stride_gb, stride_gs, stride_gh, query_length, query_tiles, heads, lse_stride, DV,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, EVEN_DV: tl.constexpr, HAS_D_LSE: tl.constexpr,
    ZERO_ACC: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """For one tile of queries of one head: lse * log2(e) and delta = rowsum(O * dO) - dLSE to `stats` [B * Hq * query_tiles, 2, BLOCK_M],
    and (ZERO_ACC) zeros to the accumulator. Where there is no query lse is +inf, so that P is 0 there. PACKED sequences have slots for
    tiles of a head, and `packed` the table of them."""
    tile = tl.program_id(0)
    batch_head = tile // query_tiles
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    i_row = tile % query_tiles * BLOCK_M
    begin = 0
    if PACKED:
        head = (tile // query_tiles).to(tl.int64)
        batch = head * 0
        i_row, begin, query_length, _k_begin, _keys, _low, _high = packed_slot(packed, tile % query_tiles)
        lse_ptr += begin
        d_lse_ptr += begin
        out_ptr += begin * stride_os
        d_out_ptr += begin * stride_gs
        batch_head = tile // query_tiles
    i_rows = i_row + tl.arange(0, BLOCK_M)
    o_base = out_ptr + batch * stride_ob + head * stride_oh
    g_base = d_out_ptr + batch * stride_gb + head * stride_gh
    out = load_rows(o_base, i_rows, query_length, stride_os, DV, BLOCK_D, EVEN_DV)  # [BLOCK_M, BLOCK_D]
    d_out = load_rows(g_base, i_rows, query_length, stride_gs, DV, BLOCK_D, EVEN_DV)  # [BLOCK_M, BLOCK_D]
    inside = i_rows < query_length
    lse_offsets = batch_head.to(tl.int64) * lse_stride + i_rows
    lse = tl.load(lse_ptr + lse_offsets, mask=inside, other=float("inf"))
    delta = tl.sum(out * d_out, 1)
    if HAS_D_LSE:
        delta -= tl.load(d_lse_ptr + lse_offsets, mask=inside, other=0.0)
    tile_64 = tile.to(tl.int64)
    if ZERO_ACC:
        tl.store(
            acc_ptr + tile_64 * (BLOCK_M * BLOCK_D) + tl.arange(0, BLOCK_M * BLOCK_D),
            tl.zeros([BLOCK_M * BLOCK_D], tl.float32),
        )
    stats = stats_ptr + tile_64 * (2 * BLOCK_M) + tl.arange(0, BLOCK_M)
    tl.store(stats, lse * LOG2_E)
    tl.store(stats + BLOCK_M, delta)


# Lengths, counts and strides are not specialised: a new length must not mean a new compilation.
@triton.jit(
    do_not_specialize=[
        "query_length", "key_length", "query_tiles", "heads", "kv_group", "low", "high", "D", "DV",
        "stride_qb", "stride_qs", "stride_qh", "stride_kb", "stride_ks", "stride_kh", "stride_vb", "stride_vs", "stride_vh",
        "stride_gb", "stride_gs", "stride_gh",
    ]
)  # fmt: skip
def finish_kernel(
    acc_ptr, d_q_ptr, stats_ptr, q_ptr, k_ptr, v_ptr, d_out_ptr, packed,
    stride_dqb, stride_dqs, stride_dqh, stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh,
    stride_vb, stride_vs, stride_vh, stride_gb, stride_gs, stride_gh,
    query_length, key_length, query_tiles, heads, kv_group, scale, scale_log2, low, high, D, DV, cap_scale,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr, HAS_BAND: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """d_q of one tile of queries: two pieces of 64 rows, side by side or one below the other, which the backward kernel's warpgroups left
    in the order of their threads' registers. A tile that holds NaN is made again where a key may be hidden from a row."""
    tile = tl.program_id(0)
    batch_head = tile // query_tiles
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    base = d_q_ptr + batch * stride_dqb + head * stride_dqh
    i_row = tile % query_tiles * BLOCK_M
    if PACKED:
        head = (tile // query_tiles).to(tl.int64)
        batch = head * 0
        i_row, q_begin, query_length, k_begin, key_length, low, high = packed_slot(packed, tile % query_tiles)
        base = d_q_ptr + head * stride_dqh + q_begin * stride_dqs
        q_ptr += q_begin * stride_qs
        d_out_ptr += q_begin * stride_gs
        k_ptr += k_begin * stride_ks
        v_ptr += k_begin * stride_vs
    COLUMNS: tl.constexpr = BLOCK_D if BLOCK_M == 128 else BLOCK_D // 2  # of a piece
    lost = 0
    for piece in tl.static_range(2):
        places = piece * (64 * COLUMNS) + tl.arange(0, 64 * COLUMNS)
        values = tl.load(acc_ptr + tile.to(tl.int64) * (BLOCK_M * BLOCK_D) + places)
        if HAS_BAND:
            lost += tl.max((values != values).to(tl.int32), 0)
        values = (values * scale).to(d_q_ptr.dtype.element_ty)
        # (columns by 8, warp, row, pair of columns, half of the rows, 2) -> [64, COLUMNS]
        values = tl.reshape(values, [COLUMNS // 8, 4, 8, 4, 2, 2])
        values = tl.reshape(tl.permute(values, (1, 4, 2, 0, 3, 5)), [64, COLUMNS])
        i_rows = i_row + tl.arange(0, 64)
        i_columns = tl.arange(0, COLUMNS)
        if BLOCK_M == 64:
            i_columns += piece * COLUMNS
        else:
            i_rows += piece * 64
        mask = (i_rows < query_length)[:, None]
        if not EVEN_D:
            mask = mask & (i_columns < D)[None, :]
        tl.store(base + i_rows.to(tl.int64)[:, None] * stride_dqs + i_columns[None, :], values, mask=mask)
    if HAS_BAND:
        if PACKED:
            lost = tl.where(query_length > 0, lost, 0)  # nobody wrote what lies in a slot without a tile
        if lost != 0:
            tl.debug_barrier()  # what was stored above by other threads is written over
            d_query_again(
                base, stride_dqs, stats_ptr + tile.to(tl.int64) * (2 * BLOCK_M), i_row, query_length, key_length,
                batch, head, head // kv_group, q_ptr, k_ptr, v_ptr, d_out_ptr,
                stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
                stride_gb, stride_gs, stride_gh, scale, scale_log2, low, high, D, DV, cap_scale, BLOCK_M, BLOCK_D,
            )  # fmt: skip
