"""What comes before and after the backward kernel, in plain Triton: statistics and a zeroed accumulator, and the accumulator made dQ."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_rows(ptr, i_rows, end, stride, D, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr):
    """Rows of a [S, D] matrix as fp32 [len(i_rows), BLOCK_D]; 0 outside."""
    i_columns = tl.arange(0, BLOCK_D)
    mask = (i_rows < end)[:, None]
    if not EVEN_D:
        mask = mask & (i_columns < D)[None, :]
    offsets = i_rows.to(tl.int64)[:, None] * stride + i_columns[None, :]
    return tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["query_length", "query_tiles", "heads", "lse_stride"])
def prepare_kernel(
    out_ptr, d_out_ptr, lse_ptr, d_lse_ptr, stats_ptr, acc_ptr,
    stride_ob, stride_os, stride_oh, stride_gb, stride_gs, stride_gh, query_length, query_tiles, heads, lse_stride, DV,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, EVEN_DV: tl.constexpr, HAS_D_LSE: tl.constexpr,
):  # fmt: skip
    """For one tile of queries of one head: lse * log2(e) and delta = rowsum(O * dO) - dLSE to `stats` [B * Hq * query_tiles, 2, BLOCK_M],
    and zeros to the accumulator. Where there is no query lse is +inf, so that P is 0 there."""
    tile = tl.program_id(0)
    batch_head = tile // query_tiles
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    i_rows = tile % query_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    o_base = out_ptr + batch * stride_ob + head * stride_oh
    g_base = d_out_ptr + batch * stride_gb + head * stride_gh
    out = _load_rows(o_base, i_rows, query_length, stride_os, DV, BLOCK_D, EVEN_DV)  # [BLOCK_M, BLOCK_D]
    d_out = _load_rows(g_base, i_rows, query_length, stride_gs, DV, BLOCK_D, EVEN_DV)  # [BLOCK_M, BLOCK_D]
    inside = i_rows < query_length
    lse_offsets = batch_head.to(tl.int64) * lse_stride + i_rows
    lse = tl.load(lse_ptr + lse_offsets, mask=inside, other=float("inf"))
    delta = tl.sum(out * d_out, 1)
    if HAS_D_LSE:
        delta -= tl.load(d_lse_ptr + lse_offsets, mask=inside, other=0.0)
    tile_64 = tile.to(tl.int64)
    tl.store(
        acc_ptr + tile_64 * (BLOCK_M * BLOCK_D) + tl.arange(0, BLOCK_M * BLOCK_D),
        tl.zeros([BLOCK_M * BLOCK_D], tl.float32),
    )
    stats = stats_ptr + tile_64 * (2 * BLOCK_M) + tl.arange(0, BLOCK_M)
    tl.store(stats, lse * LOG2_E)
    tl.store(stats + BLOCK_M, delta)


@triton.jit(do_not_specialize=["query_length", "query_tiles", "heads"])
def finish_kernel(
    acc_ptr, d_q_ptr, stride_qb, stride_qs, stride_qh, query_length, query_tiles, heads, D, scale,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr,
):  # fmt: skip
    """d_q of one tile of queries: two pieces of 64 rows, side by side or one below the other, which the backward kernel's warpgroups left
    in the order of their threads' registers."""
    tile = tl.program_id(0)
    batch_head = tile // query_tiles
    base = d_q_ptr + (batch_head // heads).to(tl.int64) * stride_qb + (batch_head % heads).to(tl.int64) * stride_qh
    COLUMNS: tl.constexpr = BLOCK_D if BLOCK_M == 128 else BLOCK_D // 2  # of a piece
    for piece in tl.static_range(2):
        places = piece * (64 * COLUMNS) + tl.arange(0, 64 * COLUMNS)
        values = tl.load(acc_ptr + tile.to(tl.int64) * (BLOCK_M * BLOCK_D) + places)
        values = (values * scale).to(d_q_ptr.dtype.element_ty)
        # (columns by 8, warp, row, pair of columns, half of the rows, 2) -> [64, COLUMNS]
        values = tl.reshape(values, [COLUMNS // 8, 4, 8, 4, 2, 2])
        values = tl.reshape(tl.permute(values, (1, 4, 2, 0, 3, 5)), [64, COLUMNS])
        i_rows = tile % query_tiles * BLOCK_M + tl.arange(0, 64)
        i_columns = tl.arange(0, COLUMNS)
        if BLOCK_M == 64:
            i_columns += piece * COLUMNS
        else:
            i_rows += piece * 64
        mask = (i_rows < query_length)[:, None]
        if not EVEN_D:
            mask = mask & (i_columns < D)[None, :]
        tl.store(base + i_rows.to(tl.int64)[:, None] * stride_qs + i_columns[None, :], values, mask=mask)
