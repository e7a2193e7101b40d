"""The gradient of an additive bias: dS summed over whatever the bias is broadcast along, by a kernel of its own.

A program owns a tile of the bias and walks over all pairs of tiles of logits that it was added to (batch entries, heads, and tiles of
queries or keys, where the bias has one for all), making S and dP again. So a bias [1, H, Sq, Sk] needs no [B, H, Sq, Sk] on the way,
and every sum has a fixed order. Where few tiles of the bias have much to walk over, the walk is split over programs (`splits`).
"""

import triton
import triton.language as tl

from tileflash.kernels.triton.features import (
    DOCUMENTS,
    DROPOUT,
    PREFIX,
    VARLEN,
    documents_meet,
    explicit_logits,
    explicit_weights,
    hide,
    keep_scale_of,
    kept,
    operands,
    own_lse,
    prefix_of,
)
from tileflash.kernels.triton.packed import packed_pair
from tileflash.kernels.triton.tile import in_band, load_rows, tile_dot


@triton.jit(
    do_not_specialize=[
        "query_length",
        "key_length",
        "batch",
        "heads",
        "bias_queries",
        "bias_keys",
        "splits",
        "low",
        "high",
    ]
)
def attention_backward_bias_kernel(
    q_ptr, k_ptr, v_ptr, d_out_ptr, lse_ptr, delta_ptr, d_bias_ptr, bias, extras,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, stride_gb, stride_gs, stride_gh,
    query_length, key_length, batch, heads, bias_queries, bias_keys, splits, D, DV, scale, low, high,
    ONE_BATCH: tl.constexpr, ONE_HEAD: tl.constexpr, ONE_QUERY: tl.constexpr, ONE_KEY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    KV_GROUP: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr,
    PRECISION: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """d_bias [splits, 1 or B, 1 or Hq, 1 or Sq, 1 or Sk] fp32; its sum over the splits is the gradient.

    `bias_queries` and `bias_keys` are the sizes of d_bias; `query_length` and `key_length` those of the logits (packed sequences: of
    the longest one that the bias covers). ONE_... says that the bias has one value for all.
    """
    query_tiles = tl.cdiv(query_length, BLOCK_M)
    key_tiles = tl.cdiv(key_length, BLOCK_N)
    walk_batch = batch if ONE_BATCH else 1
    walk_heads = heads if ONE_HEAD else 1
    walk_queries = query_tiles if ONE_QUERY else 1
    walk_keys = key_tiles if ONE_KEY else 1
    own_heads = 1 if ONE_HEAD else heads
    own_queries = 1 if ONE_QUERY else query_tiles
    own_keys = 1 if ONE_KEY else key_tiles

    program = tl.program_id(0)
    split = program % splits
    tile = program // splits
    own_key = tile % own_keys
    own_query = tile // own_keys % own_queries
    own_head = tile // own_keys // own_queries % own_heads
    own_batch = tile // own_keys // own_queries // own_heads

    walk = walk_batch * walk_heads * walk_queries * walk_keys
    share = tl.cdiv(walk, splits)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(split * share, tl.minimum(walk, (split + 1) * share)):
        i_key = (own_key + step % walk_keys) * BLOCK_N
        i_query = (own_query + step // walk_keys % walk_queries) * BLOCK_M
        head = (own_head + step // walk_keys // walk_queries % walk_heads).to(tl.int64)
        sequence = (own_batch + step // walk_keys // walk_queries // walk_heads).to(tl.int64)
        q_first, rows, k_first, columns, shift, total_rows = packed_pair(
            sequence, query_length, key_length, extras, FEATURES
        )
        extra = operands(bias, extras, sequence, head, heads, shift, q_first, k_first, FEATURES)
        from_low = low
        to_high = high
        if VARLEN & FEATURES:
            from_low += shift
            to_high += shift
            row_base = head * total_rows + q_first
        else:
            row_base = (sequence * heads + head) * query_length
        # Tiles that the band hides whole add nothing.
        seen = (i_query < rows) & (i_key < columns)
        if HAS_LOW:
            seen = seen & (i_key + BLOCK_N - 1 - i_query >= from_low)
        if HAS_HIGH:
            seen = seen & (i_key - (i_query + BLOCK_M - 1) <= to_high)
        if PREFIX & FEATURES:
            seen = seen | ((i_query < rows) & (i_key < tl.minimum(columns, prefix_of(extra))))
        if DOCUMENTS & FEATURES:
            seen = seen & documents_meet(i_query, i_key, rows, columns, extra, BLOCK_M, BLOCK_N)
        if seen:
            i_rows = i_query + tl.arange(0, BLOCK_M)  # [BLOCK_M]
            i_queries = i_rows[:, None]
            i_keys = (i_key + tl.arange(0, BLOCK_N))[None, :]  # [1, BLOCK_N]
            q_base = q_ptr + sequence * stride_qb + head * stride_qh + q_first * stride_qs
            d_out_base = d_out_ptr + sequence * stride_gb + head * stride_gh + q_first * stride_gs
            k_base = k_ptr + sequence * stride_kb + head // KV_GROUP * stride_kh + k_first * stride_ks
            v_base = v_ptr + sequence * stride_vb + head // KV_GROUP * stride_vh + k_first * stride_vs
            b_q = load_rows(
                q_base, i_query, 0, rows, stride_qs, D, BLOCK_M, BLOCK_D, EVEN_D, True
            )  # [BLOCK_M, BLOCK_D]
            b_k = load_rows(
                k_base, i_key, 0, columns, stride_ks, D, BLOCK_N, BLOCK_D, EVEN_D, True
            )  # [BLOCK_N, BLOCK_D]
            b_s = tile_dot(b_q, tl.trans(b_k), PRECISION)  # [BLOCK_M, BLOCK_N]
            b_d_out = load_rows(
                d_out_base, i_query, 0, rows, stride_gs, DV, BLOCK_M, BLOCK_DV, EVEN_DV, True
            )  # [BLOCK_M, BLOCK_DV]
            b_v = load_rows(
                v_base, i_key, 0, columns, stride_vs, DV, BLOCK_N, BLOCK_DV, EVEN_DV, True
            )  # [BLOCK_N, BLOCK_DV]
            d_p = tile_dot(b_d_out, tl.trans(b_v), PRECISION)  # [BLOCK_M, BLOCK_N]
            lse = tl.load(lse_ptr + row_base + i_rows, mask=i_rows < rows, other=float("inf"))
            delta = tl.load(delta_ptr + row_base + i_rows, mask=i_rows < rows, other=0.0)
            inside = (i_queries < rows) & (i_keys < columns)
            logits, _, shown = explicit_logits(b_s, i_queries, i_keys, inside, scale, extra, FEATURES)
            b_p = explicit_weights(logits, own_lse(lse, FEATURES)[:, None])
            if DROPOUT & FEATURES:
                d_p = tl.where(kept(i_query, i_key, extra, BLOCK_M, BLOCK_N), d_p * keep_scale_of(extra), 0.0)
            visible = in_band(shown, i_queries, i_keys, from_low, to_high, HAS_LOW, HAS_HIGH)
            visible = hide(visible, i_queries, i_keys, shown, rows, columns, extra, FEATURES)
            acc += tl.where(visible, b_p * (d_p - delta[:, None]), 0.0)

    i_rows = own_query * BLOCK_M + tl.arange(0, BLOCK_M)
    i_columns = own_key * BLOCK_N + tl.arange(0, BLOCK_N)
    owner = (split * (1 if ONE_BATCH else batch) + own_batch).to(tl.int64) * own_heads + own_head
    base = d_bias_ptr + owner * bias_queries * bias_keys
    if ONE_QUERY and ONE_KEY:
        tl.store(base, tl.sum(tl.sum(acc, 1), 0))
    elif ONE_QUERY:
        tl.store(base + i_columns, tl.sum(acc, 0), mask=i_columns < bias_keys)
    elif ONE_KEY:
        tl.store(base + i_rows, tl.sum(acc, 1), mask=i_rows < bias_queries)
    else:
        pointers = base + i_rows[:, None].to(tl.int64) * bias_keys + i_columns[None, :]
        tl.store(pointers, acc, mask=(i_rows < bias_queries)[:, None] & (i_columns < bias_keys)[None, :])
