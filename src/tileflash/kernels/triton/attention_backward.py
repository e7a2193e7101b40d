"""FlashAttention 2's backward pass (Dao 2023, Algorithm 2) as two portable Triton kernels, without atomics.

With P = exp(scale * Q K^T - lse):   dV = P^T dO,   dS = P * (dO V^T - delta),   dQ = scale * dS K,   dK = scale * dS^T Q,
where delta = rowsum(O * dO) - dLSE; the second term is all that a differentiable log-sum-exp costs. What options add is in features.py.

First dQ, by programs that own a tile of queries and walk over the keys; they make delta on the way and leave it for the others. Then dK
and dV, by programs that own a tile of keys and walk over the queries (and the query heads that share it). Every sum has a fixed order,
so gradients are equal bit for bit from run to run.
"""

import triton
import triton.language as tl

from tileflash.kernels.triton.features import (
    ALIBI,
    DOCUMENTS,
    DROPOUT,
    EXPLICIT,
    HIDING,
    PREFIX,
    SOFTCAP,
    VARLEN,
    distance,
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
from tileflash.kernels.triton.packed import other_queries, own_key_tile, own_keys, own_queries, total_query_rows
from tileflash.kernels.triton.tile import (
    PART_M,
    PART_N,
    PART_N_WITH_OPTIONS,
    finite_or_zero,
    in_band,
    load_rows,
    store_rows,
    tile_dot,
    tile_dot_add,
    visible_range,
)


@triton.jit
def _accumulate_dkdv(
    d_k, d_v, b_k, b_v, q_base, d_out_base, lse_base, delta_base, i_key, begin, end, query_begin, query_end, query_length, key_length,
    stride_qs, stride_gs, scale, scale_log2, low, high, D, DV, extra,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, FEATURES: tl.constexpr, MAKE_DK: tl.constexpr, MAKE_DV: tl.constexpr,
):  # fmt: skip
    """One pass over query tiles from begin to end. The tile of keys is seen by nobody outside [query_begin, query_end).

    S and dP are made transposed, so that no result of a matrix product is ever transposed (Triton 3.4 to 3.7 miscompile that on Hopper
    at 64-wide tiles: triton#6124).
    """
    i_keys = (i_key + tl.arange(0, BLOCK_N))[:, None]  # [BLOCK_N, 1]
    for i_query in range(begin, end, BLOCK_M):
        meets = True
        if DOCUMENTS & FEATURES:
            meets = documents_meet(i_query, i_key, query_length, key_length, extra, BLOCK_M, BLOCK_N)
        if meets:
            i_rows = i_query + tl.arange(0, BLOCK_M)  # [BLOCK_M]
            i_queries = i_rows[None, :]  # [1, BLOCK_M]
            b_q = load_rows(
                q_base, i_query, query_begin, query_end, stride_qs, D, BLOCK_M, BLOCK_D, EVEN_D, MASKED
            )  # [BLOCK_M, BLOCK_D]
            b_s = tile_dot(b_k, tl.trans(b_q), PRECISION)  # [BLOCK_N, BLOCK_M]
            inside = ((i_rows >= query_begin) & (i_rows < query_end))[None, :] & (i_keys < key_length)
            if MASKED:
                # Where there is no query the log-sum-exp reads as +inf, so P is 0 there.
                row_inside = (i_rows >= query_begin) & (i_rows < query_end)
                lse = tl.load(lse_base + i_rows, mask=row_inside, other=float("inf"))  # [BLOCK_M]
            else:
                lse = tl.load(lse_base + i_rows)
            if EXPLICIT & FEATURES:
                b_s, derivative, shown = explicit_logits(b_s, i_queries, i_keys, inside, scale, extra, FEATURES)
                b_p = explicit_weights(b_s, own_lse(lse, FEATURES)[None, :])  # [BLOCK_N, BLOCK_M]
            else:
                shown = inside
                b_p = tl.exp2(b_s * scale_log2 - own_lse(lse, FEATURES)[None, :])  # [BLOCK_N, BLOCK_M]
            if MASKED:
                visible = in_band(shown, i_queries, i_keys, low, high, HAS_LOW, HAS_HIGH)
                if HIDING & FEATURES:
                    visible = hide(visible, i_queries, i_keys, shown, query_length, key_length, extra, FEATURES)
                b_p = tl.where(visible, b_p, 0.0)
            b_d_out = load_rows(
                d_out_base, i_query, query_begin, query_end, stride_gs, DV, BLOCK_M, BLOCK_DV, EVEN_DV, MASKED
            )  # [BLOCK_M, BLOCK_DV]
            if HIDING & FEATURES:
                # What a row holds that sees no key of this tile must not reach d_k or d_v: 0 * NaN is NaN.
                sees = tl.max(visible.to(tl.int32), 0) != 0  # [BLOCK_M]
                b_q = tl.where(sees[:, None], b_q, 0.0)
                b_d_out_seen = tl.where(sees[:, None], b_d_out, 0.0)
            else:
                b_d_out_seen = b_d_out
            b_dropped = b_p
            if DROPOUT & FEATURES:
                keep = tl.trans(kept(i_query, i_key, extra, BLOCK_M, BLOCK_N))  # [BLOCK_N, BLOCK_M]
                b_dropped = tl.where(keep, b_p * keep_scale_of(extra), 0.0)
            if MAKE_DV:
                d_v = tile_dot_add(b_dropped.to(b_d_out.dtype), b_d_out_seen, d_v, PRECISION)  # [BLOCK_N, BLOCK_DV]
            if MAKE_DK:
                if MASKED:
                    delta = tl.load(delta_base + i_rows, mask=row_inside, other=0.0)  # [BLOCK_M]
                else:
                    delta = tl.load(delta_base + i_rows)
                d_p = tile_dot(b_v, tl.trans(b_d_out), PRECISION)  # [BLOCK_N, BLOCK_M]
                if DROPOUT & FEATURES:
                    d_p = tl.where(keep, d_p * keep_scale_of(extra), 0.0)
                d_s = b_p * (d_p - delta[None, :])
                if SOFTCAP & FEATURES:
                    d_s *= derivative
                if MASKED:
                    d_s = tl.where(visible, d_s, 0.0)  # 0 * (NaN of a masked key) must not get through
                d_k = tile_dot_add(d_s.to(b_q.dtype), b_q, d_k, PRECISION)  # [BLOCK_N, BLOCK_D]
    return d_k, d_v


@triton.jit(do_not_specialize=["query_length", "key_length", "kv_heads", "batch_heads", "head_group", "low", "high"])
def attention_backward_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, d_out_ptr, lse_ptr, delta_ptr, d_k_ptr, d_v_ptr, bias, extras,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, stride_gb, stride_gs, stride_gh,
    stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh,
    query_length, key_length, kv_heads, batch_heads, head_group, D, DV, scale, scale_log2, low, high,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    KV_GROUP: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr,
    PRECISION: tl.constexpr, FEATURES: tl.constexpr, MAKE_DK: tl.constexpr, MAKE_DV: tl.constexpr,
):  # fmt: skip
    """d_k [B, Sk, Hkv, D] and d_v [B, Sk, Hkv, Dv]; batch_heads counts B * Hkv.

    Both accumulators of a wide head do not fit the registers: such heads take two launches, one with MAKE_DK, one with MAKE_DV.
    """
    i_key, sequence, kv_head, k_first, key_length = own_key_tile(
        key_length, kv_heads, batch_heads, head_group, extras, BLOCK_N, FEATURES
    )
    q_first, query_length, shift = other_queries(sequence, i_key, query_length, key_length, extras, FEATURES)
    if VARLEN & FEATURES:
        low += shift
        high += shift
    total_rows = total_query_rows(query_length, extras, FEATURES)

    k_base = k_ptr + sequence * stride_kb + kv_head * stride_kh + k_first * stride_ks
    v_base = v_ptr + sequence * stride_vb + kv_head * stride_vh + k_first * stride_vs
    b_k = load_rows(k_base, i_key, 0, key_length, stride_ks, D, BLOCK_N, BLOCK_D, EVEN_D, True)  # [BLOCK_N, BLOCK_D]
    b_v = load_rows(
        v_base, i_key, 0, key_length, stride_vs, DV, BLOCK_N, BLOCK_DV, EVEN_DV, True
    )  # [BLOCK_N, BLOCK_DV]

    query_begin, full_begin, full_end, query_end = visible_range(
        i_key, key_length, query_length, -high, -low, BLOCK_N, BLOCK_M, HAS_HIGH, HAS_LOW
    )
    d_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    d_v = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for i_group in range(KV_GROUP):
        head = kv_head * KV_GROUP + i_group
        extra = operands(bias, extras, sequence, head, kv_heads * KV_GROUP, shift, q_first, k_first, FEATURES)
        q_base = q_ptr + sequence * stride_qb + head * stride_qh + q_first * stride_qs
        d_out_base = d_out_ptr + sequence * stride_gb + head * stride_gh + q_first * stride_gs
        if VARLEN & FEATURES:
            row_base = head * total_rows + q_first
        else:
            row_base = (sequence * kv_heads * KV_GROUP + head) * query_length
        lse_base = lse_ptr + row_base
        delta_base = delta_ptr + row_base
        if PREFIX & FEATURES:
            if i_key < prefix_of(extra):
                query_begin = 0
                query_end = query_length
        if HIDING & FEATURES:
            full_begin = query_begin // BLOCK_M * BLOCK_M
            full_end = full_begin
        else:
            if HAS_HIGH:
                d_k, d_v = _accumulate_dkdv(
                    d_k, d_v, b_k, b_v, q_base, d_out_base, lse_base, delta_base, i_key, query_begin // BLOCK_M * BLOCK_M, full_begin,
                    query_begin, query_end, query_length, key_length, stride_qs, stride_gs, scale, scale_log2, low, high, D, DV, extra,
                    BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, EVEN_D, EVEN_DV, HAS_LOW, HAS_HIGH, True, PRECISION, FEATURES,
                    MAKE_DK, MAKE_DV,
                )  # fmt: skip
            d_k, d_v = _accumulate_dkdv(
                d_k, d_v, b_k, b_v, q_base, d_out_base, lse_base, delta_base, i_key, full_begin, full_end,
                query_begin, query_end, query_length, key_length, stride_qs, stride_gs, scale, scale_log2, low, high, D, DV, extra,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, EVEN_D, EVEN_DV, HAS_LOW, HAS_HIGH, False, PRECISION, FEATURES,
                MAKE_DK, MAKE_DV,
            )  # fmt: skip
        d_k, d_v = _accumulate_dkdv(
            d_k, d_v, b_k, b_v, q_base, d_out_base, lse_base, delta_base, i_key, full_end, query_end,
            query_begin, query_end, query_length, key_length, stride_qs, stride_gs, scale, scale_log2, low, high, D, DV, extra,
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, EVEN_D, EVEN_DV, HAS_LOW, HAS_HIGH, True, PRECISION, FEATURES,
            MAKE_DK, MAKE_DV,
        )  # fmt: skip

    if MAKE_DK:
        d_k_base = d_k_ptr + sequence * stride_dkb + kv_head * stride_dkh + k_first * stride_dks
        store_rows(d_k_base, d_k * scale, i_key, key_length, stride_dks, D, BLOCK_N, BLOCK_D)
    if MAKE_DV:
        d_v_base = d_v_ptr + sequence * stride_dvb + kv_head * stride_dvh + k_first * stride_dvs
        store_rows(d_v_base, d_v, i_key, key_length, stride_dvs, DV, BLOCK_N, BLOCK_DV)


@triton.jit
def _accumulate_dq(
    d_q, d_slope, b_q, b_d_out, row_lse, delta, k_base, v_base, i_query, begin, end, key_begin, key_end, query_length, key_length,
    stride_ks, stride_vs, scale, scale_log2, low, high, D, DV, extra,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, FEATURES: tl.constexpr, GUARDED: tl.constexpr = False,
):  # fmt: skip
    """One pass over key tiles from begin to end: d_q += dS K. The tile of queries sees nothing outside [key_begin, key_end).

    GUARDED keeps keys that are not finite from rows that do not see them.
    """
    i_queries = (i_query + tl.arange(0, BLOCK_M))[:, None]  # [BLOCK_M, 1]
    for i_key in range(begin, end, BLOCK_N):
        meets = True
        if DOCUMENTS & FEATURES:
            meets = documents_meet(i_query, i_key, query_length, key_length, extra, BLOCK_M, BLOCK_N)
        if meets:
            b_k = load_rows(
                k_base, i_key, key_begin, key_end, stride_ks, D, BLOCK_N, BLOCK_D, EVEN_D, MASKED
            )  # [BLOCK_N, BLOCK_D]
            b_v = load_rows(
                v_base, i_key, key_begin, key_end, stride_vs, DV, BLOCK_N, BLOCK_DV, EVEN_DV, MASKED
            )  # [BLOCK_N, BLOCK_DV]
            b_s = tile_dot(b_q, tl.trans(b_k), PRECISION)  # [BLOCK_M, BLOCK_N]
            d_p = tile_dot(b_d_out, tl.trans(b_v), PRECISION)  # [BLOCK_M, BLOCK_N]
            i_keys = (i_key + tl.arange(0, BLOCK_N))[None, :]  # [1, BLOCK_N]
            inside = i_keys < key_end
            if HIDING & FEATURES:
                inside = inside & (i_keys >= key_begin) & (i_queries < query_length)
            if EXPLICIT & FEATURES:
                b_s, derivative, shown = explicit_logits(b_s, i_queries, i_keys, inside, scale, extra, FEATURES)
                b_p = explicit_weights(b_s, row_lse[:, None])
            else:
                shown = inside
                b_p = tl.exp2(b_s * scale_log2 - row_lse[:, None])
            if DROPOUT & FEATURES:
                d_p = tl.where(kept(i_query, i_key, extra, BLOCK_M, BLOCK_N), d_p * keep_scale_of(extra), 0.0)
            d_s = b_p * (d_p - delta[:, None])
            if MASKED:
                visible = in_band(shown, i_queries, i_keys, low, high, HAS_LOW, HAS_HIGH)
                if HIDING & FEATURES:
                    visible = hide(visible, i_queries, i_keys, shown, query_length, key_length, extra, FEATURES)
                d_s = tl.where(visible, d_s, 0.0)
            if ALIBI & FEATURES:
                d_slope -= tl.sum(d_s * distance(i_queries, i_keys, extra), 1)
            if SOFTCAP & FEATURES:
                d_s *= derivative
                if MASKED:
                    d_s = tl.where(visible, d_s, 0.0)  # the derivative at a hidden key that is NaN is NaN, too
            if GUARDED:
                b_k = finite_or_zero(b_k)  # a row that sees such a key has a dS that is not finite, either
            d_q = tile_dot_add(d_s.to(b_k.dtype), b_k, d_q, PRECISION)  # [BLOCK_M, BLOCK_D]
    return d_q, d_slope


@triton.jit(do_not_specialize=["query_length", "key_length", "heads", "batch_heads", "head_group", "low", "high"])
def attention_backward_dq_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, d_out_ptr, lse_ptr, d_lse_ptr, delta_ptr, d_q_ptr, d_slopes_ptr, bias, extras,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_ob, stride_os, stride_oh, stride_gb, stride_gs, stride_gh, stride_dqb, stride_dqs, stride_dqh,
    query_length, key_length, heads, batch_heads, head_group, D, DV, scale, scale_log2, low, high,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    KV_GROUP: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr,
    PRECISION: tl.constexpr, FEATURES: tl.constexpr, HAS_D_LSE: tl.constexpr,
):  # fmt: skip
    """d_q [B, Sq, Hq, D]; delta = rowsum(out * d_out) - d_lse and, with ALiBi, each row's part of d_slopes, in the layout of lse."""
    total_rows = query_length
    i_query, sequence, head, q_first, query_length = own_queries(
        query_length, heads, batch_heads, head_group, extras, BLOCK_M, FEATURES
    )
    k_first, key_length, shift = own_keys(sequence, i_query, query_length, key_length, extras, FEATURES)
    if VARLEN & FEATURES:
        low += shift
        high += shift
        row_base = head * total_rows + q_first
    else:
        row_base = (sequence * heads + head) * query_length
    extra = operands(bias, extras, sequence, head, heads, shift, q_first, k_first, FEATURES)

    i_queries = i_query + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    inside = i_queries < query_length
    q_base = q_ptr + sequence * stride_qb + head * stride_qh + q_first * stride_qs
    d_out_base = d_out_ptr + sequence * stride_gb + head * stride_gh + q_first * stride_gs
    k_base = k_ptr + sequence * stride_kb + head // KV_GROUP * stride_kh + k_first * stride_ks
    v_base = v_ptr + sequence * stride_vb + head // KV_GROUP * stride_vh + k_first * stride_vs
    b_q = load_rows(
        q_base, i_query, 0, query_length, stride_qs, D, BLOCK_M, BLOCK_D, EVEN_D, True
    )  # [BLOCK_M, BLOCK_D]
    b_d_out = load_rows(
        d_out_base, i_query, 0, query_length, stride_gs, DV, BLOCK_M, BLOCK_DV, EVEN_DV, True
    )  # [BLOCK_M, BLOCK_DV]
    row_lse = own_lse(tl.load(lse_ptr + row_base + i_queries, mask=inside, other=float("inf")), FEATURES)  # [BLOCK_M]
    out_base = out_ptr + sequence * stride_ob + head * stride_oh + q_first * stride_os
    b_out = load_rows(
        out_base, i_query, 0, query_length, stride_os, DV, BLOCK_M, BLOCK_DV, EVEN_DV, True
    )  # [BLOCK_M, BLOCK_DV]
    delta = tl.sum(b_out.to(tl.float32) * b_d_out.to(tl.float32), 1)  # [BLOCK_M]
    if HAS_D_LSE:
        delta -= tl.load(d_lse_ptr + row_base + i_queries, mask=inside, other=0.0)
    tl.store(delta_ptr + row_base + i_queries, delta, mask=inside)

    key_begin, full_begin, full_end, key_end = visible_range(
        i_query, query_length, key_length, low, high, BLOCK_M, BLOCK_N, HAS_LOW, HAS_HIGH
    )
    if PREFIX & FEATURES:
        if prefix_of(extra) > 0:
            key_begin = 0
            key_end = tl.maximum(key_end, tl.minimum(prefix_of(extra), key_length))
    d_q = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    d_slope = tl.zeros([BLOCK_M], tl.float32)
    if HIDING & FEATURES:
        full_begin = key_begin // BLOCK_N * BLOCK_N
        full_end = full_begin
    else:
        if HAS_LOW:
            d_q, d_slope = _accumulate_dq(
                d_q, d_slope, b_q, b_d_out, row_lse, delta, k_base, v_base, i_query, key_begin // BLOCK_N * BLOCK_N, full_begin,
                key_begin, key_end, query_length, key_length, stride_ks, stride_vs, scale, scale_log2, low, high, D, DV, extra,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, EVEN_D, EVEN_DV, HAS_LOW, HAS_HIGH, True, PRECISION, FEATURES,
            )  # fmt: skip
        d_q, d_slope = _accumulate_dq(
            d_q, d_slope, b_q, b_d_out, row_lse, delta, k_base, v_base, i_query, full_begin, full_end,
            key_begin, key_end, query_length, key_length, stride_ks, stride_vs, scale, scale_log2, low, high, D, DV, extra,
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, EVEN_D, EVEN_DV, HAS_LOW, HAS_HIGH, False, PRECISION, FEATURES,
        )  # fmt: skip
    d_q, d_slope = _accumulate_dq(
        d_q, d_slope, b_q, b_d_out, row_lse, delta, k_base, v_base, i_query, full_end, key_end,
        key_begin, key_end, query_length, key_length, stride_ks, stride_vs, scale, scale_log2, low, high, D, DV, extra,
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, EVEN_D, EVEN_DV, HAS_LOW, HAS_HIGH, True, PRECISION, FEATURES,
    )  # fmt: skip
    d_q_base = d_q_ptr + sequence * stride_dqb + head * stride_dqh + q_first * stride_dqs
    # As in the forward pass: where something not finite came in, rows are made once more, in small tiles that look for it.
    lost = 0
    if HAS_LOW or HAS_HIGH or (HIDING & FEATURES):
        row_total = tl.sum(d_q, 1)
        lost = tl.max((row_total != row_total).to(tl.int32), 0)
    if lost == 0:
        store_rows(d_q_base, d_q * scale, i_query, query_length, stride_dqs, D, BLOCK_M, BLOCK_D)
        if ALIBI & FEATURES:
            tl.store(d_slopes_ptr + row_base + i_queries, d_slope, mask=inside)
    else:
        KEYS: tl.constexpr = PART_N if FEATURES == 0 else PART_N_WITH_OPTIONS
        for i_part in range(i_query, tl.minimum(i_query + BLOCK_M, query_length), PART_M):
            i_rows = i_part + tl.arange(0, PART_M)
            rows_inside = i_rows < query_length
            b_q_part = load_rows(
                q_base, i_part, 0, query_length, stride_qs, D, PART_M, BLOCK_D, EVEN_D, True
            )  # [PART_M, BLOCK_D]
            b_d_out_part = load_rows(
                d_out_base, i_part, 0, query_length, stride_gs, DV, PART_M, BLOCK_DV, EVEN_DV, True
            )  # [PART_M, BLOCK_DV]
            b_out_part = load_rows(out_base, i_part, 0, query_length, stride_os, DV, PART_M, BLOCK_DV, EVEN_DV, True)
            lse_part = tl.load(lse_ptr + row_base + i_rows, mask=rows_inside, other=float("inf"))
            row_lse_part = own_lse(lse_part, FEATURES)
            delta_part = tl.sum(b_out_part.to(tl.float32) * b_d_out_part.to(tl.float32), 1)
            if HAS_D_LSE:
                delta_part -= tl.load(d_lse_ptr + row_base + i_rows, mask=rows_inside, other=0.0)
            d_q_part, d_slope_part = _accumulate_dq(
                tl.zeros([PART_M, BLOCK_D], tl.float32), tl.zeros([PART_M], tl.float32),
                b_q_part, b_d_out_part, row_lse_part, delta_part, k_base, v_base,
                i_part, key_begin // KEYS * KEYS, key_end, key_begin, key_end, query_length, key_length, stride_ks, stride_vs,
                scale, scale_log2, low, high, D, DV, extra,
                PART_M, KEYS, BLOCK_D, BLOCK_DV, EVEN_D, EVEN_DV, HAS_LOW, HAS_HIGH, True, PRECISION, FEATURES, True,
            )  # fmt: skip
            store_rows(d_q_base, d_q_part * scale, i_part, query_length, stride_dqs, D, PART_M, BLOCK_D)
            if ALIBI & FEATURES:
                tl.store(d_slopes_ptr + row_base + i_rows, d_slope_part, mask=rows_inside)
