"""FlashAttention 2's forward pass (Dao 2023, Algorithm 1) as one portable Triton kernel.

A program owns BLOCK_M query rows of one head and walks over the key tiles that its band can see: tiles cut by an edge of the band
or by the end of the keys are masked, the full ones between them are not. The softmax runs in base 2 with the scale folded in, unless
an option changes the logits (features.py).
"""

import triton
import triton.language as tl

from tileflash.kernels.triton.features import (
    DOCUMENTS,
    DROPOUT,
    EXPLICIT,
    HIDING,
    PREFIX,
    SINKS,
    VARLEN,
    documents_meet,
    explicit_logits,
    hide,
    keep_scale_of,
    kept,
    operands,
    prefix_of,
    sink_of,
)
from tileflash.kernels.triton.packed import is_slack, own_keys, own_queries
from tileflash.kernels.triton.tile import (
    LN_2,
    LOG2_E,
    PART_M,
    PART_N,
    PART_N_WITH_OPTIONS,
    in_band,
    load_rows,
    poison_unreadable,
    store_rows,
    tile_dot,
    tile_dot_add,
    visible_range,
)


@triton.jit
def _attend(
    acc, row_sum, row_max, b_q, k_base, v_base, i_query, begin, end, key_begin, key_end, query_length, key_length,
    stride_ks, stride_vs, scale, scale_log2, low, high, D, DV, extra,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, FEATURES: tl.constexpr, GUARDED: tl.constexpr = False,
):  # fmt: skip
    """One pass over the key tiles from begin to end: the online softmax. The tile of queries sees nothing outside [key_begin, key_end).

    GUARDED keeps values that are not finite from rows that do not see them.
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
            b_s = tile_dot(b_q, tl.trans(b_k), PRECISION)  # [BLOCK_M, BLOCK_N]
            i_keys = (i_key + tl.arange(0, BLOCK_N))[None, :]  # [1, BLOCK_N]
            inside = i_keys < key_end
            if HIDING & FEATURES:
                inside = inside & (i_keys >= key_begin) & (i_queries < query_length)
            if EXPLICIT & FEATURES:
                b_s, _, shown = explicit_logits(b_s, i_queries, i_keys, inside, scale, extra, FEATURES)
            else:
                shown = inside
            if MASKED:
                visible = in_band(shown, i_queries, i_keys, low, high, HAS_LOW, HAS_HIGH)
                if HIDING & FEATURES:
                    visible = hide(visible, i_queries, i_keys, shown, query_length, key_length, extra, FEATURES)
                b_s = tl.where(visible, b_s, -float("inf"))
            if EXPLICIT & FEATURES:
                new_max = tl.maximum(row_max, tl.max(b_s, 1))  # [BLOCK_M]
            else:
                new_max = tl.maximum(row_max, tl.max(b_s, 1) * scale_log2)  # [BLOCK_M]
            # A row that has seen nothing yet has the maximum -inf; subtracting it from -inf would be NaN.
            shift = tl.where(new_max == -float("inf"), 0.0, new_max) if MASKED else new_max
            if EXPLICIT & FEATURES:
                b_p = tl.exp2((b_s - shift[:, None]) * LOG2_E)  # [BLOCK_M, BLOCK_N]
                rescale = tl.exp2((row_max - shift) * LOG2_E)  # [BLOCK_M]
            else:
                b_p = tl.exp2(b_s * scale_log2 - shift[:, None])  # [BLOCK_M, BLOCK_N]
                rescale = tl.exp2(row_max - shift)  # [BLOCK_M]
            row_sum = row_sum * rescale + tl.sum(b_p, 1)
            acc = acc * rescale[:, None]
            if DROPOUT & FEATURES:
                b_p = tl.where(kept(i_query, i_key, extra, BLOCK_M, BLOCK_N), b_p * keep_scale_of(extra), 0.0)
            b_v = load_rows(
                v_base, i_key, key_begin, key_end, stride_vs, DV, BLOCK_N, BLOCK_DV, EVEN_DV, MASKED
            )  # [BLOCK_N, BLOCK_DV]
            if GUARDED:
                b_p, b_v = poison_unreadable(b_p, b_v, visible)
            acc = tile_dot_add(b_p.to(b_v.dtype), b_v, acc, PRECISION)  # [BLOCK_M, BLOCK_DV]
            row_max = new_max
    return acc, row_sum, row_max


@triton.jit
def _first_state(extra, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, FEATURES: tl.constexpr):
    """(acc, row_sum, row_max) of rows that have seen nothing; a sink is a key without a value that they have seen before all others."""
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    if SINKS & FEATURES:
        row_max = tl.zeros([BLOCK_M], tl.float32) + (sink_of(extra) if EXPLICIT & FEATURES else sink_of(extra) * LOG2_E)
        row_sum += tl.where(sink_of(extra) == -float("inf"), 0.0, 1.0)
    return acc, row_sum, row_max


@triton.jit
def _finish(
    acc, row_sum, row_max, out_base, lse_base, i_query, query_length, stride_os, DV, is_slack_rows,
    BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Divides and stores. A row that saw no key has the sum 0: its output is 0 and its log-sum-exp -inf.

    The maximum is in base 2, with explicit logits in base e.
    """
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    log2_sum = tl.log2(tl.where(row_sum == 0.0, 1.0, row_sum))
    if EXPLICIT & FEATURES:
        lse = row_max + log2_sum * LN_2
    else:
        lse = (row_max + log2_sum) * LN_2
    lse = tl.where(row_sum == 0.0, -float("inf"), lse)
    lse = tl.where(is_slack_rows, -float("inf"), lse)  # a sink is seen by queries, not by slack rows
    i_queries = i_query + tl.arange(0, BLOCK_M)
    tl.store(lse_base + i_queries, lse, mask=i_queries < query_length)
    store_rows(out_base, acc, i_query, query_length, stride_os, DV, BLOCK_M, BLOCK_DV)


# Lengths and counts are not specialised: a new length must not mean a new compilation.
@triton.jit(do_not_specialize=["query_length", "key_length", "heads", "batch_heads", "head_group", "low", "high"])
def attention_forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, bias, extras,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, stride_ob, stride_os, stride_oh,
    query_length, key_length, heads, batch_heads, head_group, D, DV, scale, scale_log2, low, high,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    KV_GROUP: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr,
    PRECISION: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """out [B, Sq, Hq, Dv] and lse [B, Hq, Sq] (fp32, natural logarithm) of q [B, Sq, Hq, D], k [B, Sk, Hq // KV_GROUP, D], v likewise.

    Packed (VARLEN): [total, H, D] tensors and lse [Hq, total]; lengths are totals, and low and high count from where a sequence's
    band stands.
    """
    total_rows = query_length
    i_query, sequence, head, q_first, query_length = own_queries(
        query_length, heads, batch_heads, head_group, extras, BLOCK_M, FEATURES
    )
    k_first, key_length, shift = own_keys(sequence, i_query, query_length, key_length, extras, FEATURES)
    if VARLEN & FEATURES:
        low += shift
        high += shift
    extra = operands(bias, extras, sequence, head, heads, shift, q_first, k_first, FEATURES)

    q_base = q_ptr + sequence * stride_qb + head * stride_qh + q_first * stride_qs
    k_base = k_ptr + sequence * stride_kb + head // KV_GROUP * stride_kh + k_first * stride_ks
    v_base = v_ptr + sequence * stride_vb + head // KV_GROUP * stride_vh + k_first * stride_vs
    b_q = load_rows(
        q_base, i_query, 0, query_length, stride_qs, D, BLOCK_M, BLOCK_D, EVEN_D, True
    )  # [BLOCK_M, BLOCK_D]

    key_begin, full_begin, full_end, key_end = visible_range(
        i_query, query_length, key_length, low, high, BLOCK_M, BLOCK_N, HAS_LOW, HAS_HIGH
    )
    if PREFIX & FEATURES:
        if prefix_of(extra) > 0:
            key_begin = 0
            key_end = tl.maximum(key_end, tl.minimum(prefix_of(extra), key_length))
    acc, row_sum, row_max = _first_state(extra, BLOCK_M, BLOCK_DV, FEATURES)
    if HIDING & FEATURES:
        full_begin = key_begin // BLOCK_N * BLOCK_N
        full_end = full_begin
    else:
        if HAS_LOW:
            acc, row_sum, row_max = _attend(
                acc, row_sum, row_max, b_q, k_base, v_base, i_query, key_begin // BLOCK_N * BLOCK_N, full_begin,
                key_begin, key_end, query_length, key_length, stride_ks, stride_vs, scale, scale_log2, low, high, D, DV, extra,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, EVEN_D, EVEN_DV, HAS_LOW, HAS_HIGH, True, PRECISION, FEATURES,
            )  # fmt: skip
        acc, row_sum, row_max = _attend(
            acc, row_sum, row_max, b_q, k_base, v_base, i_query, full_begin, full_end,
            key_begin, key_end, query_length, key_length, stride_ks, stride_vs, scale, scale_log2, low, high, D, DV, extra,
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, EVEN_D, EVEN_DV, HAS_LOW, HAS_HIGH, False, PRECISION, FEATURES,
        )  # fmt: skip
    acc, row_sum, row_max = _attend(
        acc, row_sum, row_max, b_q, k_base, v_base, i_query, full_end, key_end,
        key_begin, key_end, query_length, key_length, stride_ks, stride_vs, scale, scale_log2, low, high, D, DV, extra,
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, EVEN_D, EVEN_DV, HAS_LOW, HAS_HIGH, True, PRECISION, FEATURES,
    )  # fmt: skip

    out_base = out_ptr + sequence * stride_ob + head * stride_oh + q_first * stride_os
    if VARLEN & FEATURES:
        slack = is_slack(sequence, extras)
        lse_base = lse_ptr + head * total_rows + q_first
    else:
        slack = False
        lse_base = lse_ptr + (sequence * heads + head) * query_length
    # A hidden value that is not finite spoils the rows of its tile: 0 * NaN is NaN. To look for it in every tile of values costs
    # registers, so it is looked for in the result, and then these rows are made once more.
    lost = 0
    if HAS_LOW or HAS_HIGH or (HIDING & FEATURES):
        row_total = tl.sum(acc, 1)  # NaN if one is (or if +inf and -inf meet, which costs time only)
        lost = tl.max((row_total != row_total).to(tl.int32), 0)
    if lost == 0:
        _finish(
            acc, row_sum, row_max, out_base, lse_base, i_query, query_length, stride_os, DV, slack,
            BLOCK_M, BLOCK_DV, FEATURES,
        )  # fmt: skip
    else:
        KEYS: tl.constexpr = PART_N if FEATURES == 0 else PART_N_WITH_OPTIONS
        for i_part in range(i_query, tl.minimum(i_query + BLOCK_M, query_length), PART_M):
            b_q_part = load_rows(
                q_base, i_part, 0, query_length, stride_qs, D, PART_M, BLOCK_D, EVEN_D, True
            )  # [PART_M, BLOCK_D]
            acc_part, row_sum_part, row_max_part = _first_state(extra, PART_M, BLOCK_DV, FEATURES)
            acc_part, row_sum_part, row_max_part = _attend(
                acc_part, row_sum_part, row_max_part, b_q_part, k_base, v_base, i_part, key_begin // KEYS * KEYS, key_end,
                key_begin, key_end, query_length, key_length, stride_ks, stride_vs, scale, scale_log2, low, high, D, DV, extra,
                PART_M, KEYS, BLOCK_D, BLOCK_DV, EVEN_D, EVEN_DV, HAS_LOW, HAS_HIGH, True, PRECISION, FEATURES, True,
            )  # fmt: skip
            _finish(
                acc_part, row_sum_part, row_max_part, out_base, lse_base, i_part, query_length, stride_os, DV, slack,
                PART_M, BLOCK_DV, FEATURES,
            )  # fmt: skip
