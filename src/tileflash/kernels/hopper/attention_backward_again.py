"""Rows of dQ made once more, key by key, where something that is not finite reached rows that do not see it.

dS is 0 where a key is hidden, but 0 * NaN is NaN: a K or V that is not finite spoils dQ of all queries that share a tile with it. As in the
forward pass (attention_forward_again.py) it is looked for in the result.
"""

import triton
import triton.language as tl

from tileflash.kernels.triton.features import tanh


@triton.jit
def load_rows(ptr, i_rows, end, stride, D, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr):
    """Rows of a [S, D] matrix as fp32 [len(i_rows), BLOCK_D]; 0 outside."""
    i_columns = tl.arange(0, BLOCK_D)
    mask = (i_rows < end)[:, None]
    if not EVEN_D:
        mask = mask & (i_columns < D)[None, :]
    offsets = i_rows.to(tl.int64)[:, None] * stride + i_columns[None, :]
    return tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def d_query_again(
    base, stride_dqs, stats, i_row, query_length, key_length, batch, head, kv_head,
    q_ptr, k_ptr, v_ptr, d_out_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_gb, stride_gs, stride_gh, scale, scale_log2, low, high, D, DV, cap_scale,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """d_q of the BLOCK_M rows from `i_row` on. `stats` points to the tile's statistics: lse * log2(e), then delta."""
    q_base = q_ptr + batch * stride_qb + head * stride_qh
    g_base = d_out_ptr + batch * stride_gb + head * stride_gh
    k_base = k_ptr + batch * stride_kb + kv_head * stride_kh
    v_base = v_ptr + batch * stride_vb + kv_head * stride_vh
    i_columns = tl.arange(0, BLOCK_D)
    ROWS: tl.constexpr = (
        1024 // BLOCK_D
    )  # at a time: more would take the registers of the kernel that this is the exception of
    for part in range(0, BLOCK_M, ROWS):
        i_queries = i_row + part + tl.arange(0, ROWS)
        q = load_rows(q_base, i_queries, query_length, stride_qs, D, BLOCK_D, False)  # [ROWS, BLOCK_D]
        d_out = load_rows(g_base, i_queries, query_length, stride_gs, DV, BLOCK_D, False)  # [ROWS, BLOCK_D]
        places = part + tl.arange(0, ROWS)
        lse_log2 = tl.load(stats + places)
        delta = tl.load(stats + BLOCK_M + places)
        d_q = tl.zeros([ROWS, BLOCK_D], tl.float32)
        begin = tl.maximum(i_row + part + low, 0)
        end = tl.minimum(i_row + part + ROWS + high, key_length)
        for i_key in range(begin, end):
            i_key_64 = tl.cast(i_key, tl.int64)
            k = tl.load(k_base + i_key_64 * stride_ks + i_columns, mask=i_columns < D, other=0.0).to(tl.float32)
            v = tl.load(v_base + i_key_64 * stride_vs + i_columns, mask=i_columns < DV, other=0.0).to(tl.float32)
            logits = tl.sum(q * k[None, :], 1)
            derivative = 1.0
            if cap_scale is not None:
                logits, derivative = tanh(logits * cap_scale)
            weights = tl.exp2(logits * scale_log2 - lse_log2) * derivative
            d_logits = weights * (tl.sum(d_out * v[None, :], 1) - delta)
            visible = (i_key >= i_queries + low) & (i_key <= i_queries + high)
            d_q += tl.where(visible[:, None], d_logits[:, None] * k[None, :], 0.0)
        mask = (i_queries < query_length)[:, None] & (i_columns < D)[None, :]
        offsets = i_queries.to(tl.int64)[:, None] * stride_dqs + i_columns[None, :]
        tl.store(base + offsets, (d_q * scale).to(base.dtype.element_ty), mask=mask)
