"""FlashAttention 2's forward pass (Dao 2023, Algorithm 1) as one portable Triton kernel.

A program owns BLOCK_M query rows of one head and walks over the key tiles that its band can see: tiles cut by an edge of the band
or by the end of the keys are masked, the full ones between them are not. The softmax runs in base 2 with the scale folded in.
"""

import triton
import triton.language as tl

from tileflash.kernels.triton.tile import LN_2, load_rows, query_tile, store_rows, tile_dot, tile_dot_add, visible_range


@triton.jit
def _attend(
    acc, row_sum, row_max, b_q, k_base, v_base, i_queries, begin, end, key_begin, key_end, stride_ks, stride_vs, scale_log2, low, high,
    D, DV,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One pass over the key tiles from begin to end: the online softmax. The tile of queries sees nothing outside [key_begin, key_end)."""
    for i_key in range(begin, end, BLOCK_N):
        b_k = load_rows(
            k_base, i_key, key_begin, key_end, stride_ks, D, BLOCK_N, BLOCK_D, EVEN_D, MASKED
        )  # [BLOCK_N, BLOCK_D]
        b_s = tile_dot(b_q, tl.trans(b_k), PRECISION)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            i_keys = i_key + tl.arange(0, BLOCK_N)
            visible = (i_keys < key_end)[None, :]
            if HAS_LOW:
                visible = visible & (i_keys[None, :] - i_queries[:, None] >= low)
            if HAS_HIGH:
                visible = visible & (i_keys[None, :] - i_queries[:, None] <= high)
            b_s = tl.where(visible, b_s, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(b_s, 1) * scale_log2)  # [BLOCK_M]
        # A row that has seen nothing yet has the maximum -inf; subtracting it from -inf would be NaN.
        shift = tl.where(new_max == -float("inf"), 0.0, new_max) if MASKED else new_max
        b_p = tl.exp2(b_s * scale_log2 - shift[:, None])  # [BLOCK_M, BLOCK_N]
        rescale = tl.exp2(row_max - shift)  # [BLOCK_M]
        row_sum = row_sum * rescale + tl.sum(b_p, 1)
        acc = acc * rescale[:, None]
        b_v = load_rows(
            v_base, i_key, key_begin, key_end, stride_vs, DV, BLOCK_N, BLOCK_DV, EVEN_DV, MASKED
        )  # [BLOCK_N, BLOCK_DV]
        acc = tile_dot_add(b_p.to(b_v.dtype), b_v, acc, PRECISION)  # [BLOCK_M, BLOCK_DV]
        row_max = new_max
    return acc, row_sum, row_max


# Lengths and counts are not specialised: a new length must not mean a new compilation.
@triton.jit(do_not_specialize=["query_length", "key_length", "heads", "batch_heads", "head_group", "low", "high"])
def attention_forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, stride_ob, stride_os, stride_oh,
    query_length, key_length, heads, batch_heads, head_group, D, DV, scale_log2, low, high,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    KV_GROUP: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out [B, Sq, Hq, Dv] and lse [B, Hq, Sq] (fp32, natural logarithm) of q [B, Sq, Hq, D], k [B, Sk, Hq // KV_GROUP, D], v likewise."""
    i_query, batch_head = query_tile(tl.program_id(0), query_length, batch_heads, head_group, BLOCK_M)
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)

    i_queries = i_query + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    q_base = q_ptr + batch * stride_qb + head * stride_qh
    k_base = k_ptr + batch * stride_kb + head // KV_GROUP * stride_kh
    v_base = v_ptr + batch * stride_vb + head // KV_GROUP * stride_vh
    b_q = load_rows(
        q_base, i_query, 0, query_length, stride_qs, D, BLOCK_M, BLOCK_D, EVEN_D, True
    )  # [BLOCK_M, BLOCK_D]

    key_begin, full_begin, full_end, key_end = visible_range(
        i_query, query_length, key_length, low, high, BLOCK_M, BLOCK_N, HAS_LOW, HAS_HIGH
    )
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    if HAS_LOW:
        acc, row_sum, row_max = _attend(
            acc, row_sum, row_max, b_q, k_base, v_base, i_queries, key_begin // BLOCK_N * BLOCK_N, full_begin,
            key_begin, key_end, stride_ks, stride_vs, scale_log2, low, high, D, DV,
            BLOCK_N, BLOCK_D, BLOCK_DV, EVEN_D, EVEN_DV, HAS_LOW, HAS_HIGH, True, PRECISION,
        )  # fmt: skip
    acc, row_sum, row_max = _attend(
        acc, row_sum, row_max, b_q, k_base, v_base, i_queries, full_begin, full_end,
        key_begin, key_end, stride_ks, stride_vs, scale_log2, low, high, D, DV,
            BLOCK_N, BLOCK_D, BLOCK_DV, EVEN_D, EVEN_DV, HAS_LOW, HAS_HIGH, False, PRECISION,
    )  # fmt: skip
    acc, row_sum, row_max = _attend(
        acc, row_sum, row_max, b_q, k_base, v_base, i_queries, full_end, key_end,
        key_begin, key_end, stride_ks, stride_vs, scale_log2, low, high, D, DV,
            BLOCK_N, BLOCK_D, BLOCK_DV, EVEN_D, EVEN_DV, HAS_LOW, HAS_HIGH, True, PRECISION,
    )  # fmt: skip

    # A row that saw no key has the sum 0: its output is 0 and its log-sum-exp -inf.
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    lse = tl.where(row_sum == 0.0, -float("inf"), (row_max + tl.log2(tl.where(row_sum == 0.0, 1.0, row_sum))) * LN_2)
    rows_inside = i_queries < query_length
    tl.store(lse_ptr + batch_head.to(tl.int64) * query_length + i_queries, lse, mask=rows_inside)
    out_base = out_ptr + batch * stride_ob + head * stride_oh
    store_rows(out_base, acc, i_query, query_length, stride_os, DV, BLOCK_M, BLOCK_DV)
