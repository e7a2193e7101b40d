"""Which rows a program works on: a tile of one sequence of a batch, or of one of many packed behind each other (VARLEN)."""

import triton
import triton.language as tl

from tileflash.kernels.triton.features import ALIBI, VARLEN
from tileflash.kernels.triton.tile import query_tile


@triton.jit
def _varlen(extras):
    """(cu_seqlens of the queries, of the keys, number of sequences, steps of a search in it, total queries, total keys)."""
    (
        _slopes, _sinks, _rng, _query_ids, _key_ids, _prefix, cu_q_ptr, cu_k_ptr,
        _stride_slopes, _stride_query_ids, _stride_key_ids, sequences, steps, total_q, total_k,
        _softcap, _drop_below, _keep_scale, _top_left,
    ) = extras  # fmt: skip
    return cu_q_ptr, cu_k_ptr, sequences, steps, total_q, total_k


@triton.jit
def _top_left(extras):
    """1 where query 0 stands at key 0, 0 where the last query stands at the last key."""
    (
        _slopes, _sinks, _rng, _query_ids, _key_ids, _prefix, _cu_q, _cu_k,
        _stride_slopes, _stride_query_ids, _stride_key_ids, _sequences, _steps, _total_q, _total_k,
        _softcap, _drop_below, _keep_scale, top_left,
    ) = extras  # fmt: skip
    return top_left


@triton.jit
def own_queries(query_length, heads, batch_heads, head_group, extras, BLOCK_M: tl.constexpr, FEATURES: tl.constexpr):
    """This program's tile of queries: (first row within the sequence, sequence, head, the sequence's first row, its length)."""
    if VARLEN & FEATURES:
        cu_q_ptr, _cu_k, sequences, steps, total_q, _total_k = _varlen(extras)
        slots = total_q // BLOCK_M + sequences + 1
        head = tl.program_id(0) // slots
        slot = slots - 1 - (tl.program_id(0) - head * slots)
        sequence, first, length, i_query = packed_tile(slot, cu_q_ptr, sequences, steps, total_q, BLOCK_M)
        return i_query, sequence.to(tl.int64), head.to(tl.int64), first.to(tl.int64), length
    else:
        i_query, batch_head = query_tile(tl.program_id(0), query_length, batch_heads, head_group, BLOCK_M)
        return i_query, (batch_head // heads).to(tl.int64), (batch_head % heads).to(tl.int64), 0, query_length


@triton.jit
def own_keys(sequence, i_query, query_length, key_length, extras, FEATURES: tl.constexpr):
    """What a tile of queries may look at: (first row of the sequence's keys, their number, the key at which query 0 stands)."""
    shift = 0
    if VARLEN & FEATURES:
        _cu_q, cu_k_ptr, sequences, _steps, _total_q, total_k = _varlen(extras)
        first, key_length = packed_rows(sequence, cu_k_ptr, sequences, total_k)
        # Behind the last sequence, and in slots that no tile fell into, there is nothing to look at.
        key_length = tl.where((sequence == sequences) | (i_query >= query_length), 0, key_length)
        first = first.to(tl.int64)
    else:
        first = 0
    if (ALIBI & FEATURES) | (VARLEN & FEATURES):
        shift = tl.where(_top_left(extras) != 0, 0, key_length - query_length)
    return first, key_length, shift


@triton.jit
def own_key_tile(key_length, kv_heads, batch_heads, head_group, extras, BLOCK_N: tl.constexpr, FEATURES: tl.constexpr):
    """This program's tile of keys: (first row within the sequence, sequence, K/V head, the sequence's first row, its length)."""
    program = tl.program_id(0)
    if VARLEN & FEATURES:
        _cu_q, cu_k_ptr, sequences, steps, _total_q, total_k = _varlen(extras)
        slots = total_k // BLOCK_N + sequences + 1
        head = program // slots
        sequence, first, length, i_key = packed_tile(
            program - head * slots, cu_k_ptr, sequences, steps, total_k, BLOCK_N
        )
        return i_key, sequence.to(tl.int64), head.to(tl.int64), first.to(tl.int64), length
    else:
        tiles = tl.cdiv(key_length, BLOCK_N)
        group = program // (head_group * tiles)
        group_size = tl.minimum(head_group, batch_heads - group * head_group)
        within = program - group * head_group * tiles
        tile = within // group_size  # the first keys are seen by most queries: longest first
        batch_head = group * head_group + within % group_size
        return (
            tile * BLOCK_N,
            (batch_head // kv_heads).to(tl.int64),
            (batch_head % kv_heads).to(tl.int64),
            0,
            key_length,
        )


@triton.jit
def other_queries(sequence, i_key, query_length, key_length, extras, FEATURES: tl.constexpr):
    """Who may look at a tile of keys: (first row of the sequence's queries, their number, the key at which query 0 stands)."""
    first = 0
    shift = 0
    if VARLEN & FEATURES:
        cu_q_ptr, _cu_k, sequences, _steps, total_q, _total_k = _varlen(extras)
        first, query_length = packed_rows(sequence, cu_q_ptr, sequences, total_q)
        query_length = tl.where((sequence == sequences) | (i_key >= key_length), 0, query_length)
        first = first.to(tl.int64)
    if (ALIBI & FEATURES) | (VARLEN & FEATURES):
        shift = tl.where(_top_left(extras) != 0, 0, key_length - query_length)
    return first, query_length, shift


@triton.jit
def packed_pair(sequence, query_length, key_length, extras, FEATURES: tl.constexpr):
    """Rows of one sequence on both sides: (first query, queries, first key, keys, the key at which query 0 stands, all query rows)."""
    q_first = 0
    k_first = 0
    shift = 0
    total_q = query_length
    if VARLEN & FEATURES:
        cu_q_ptr, cu_k_ptr, sequences, _steps, total_q, total_k = _varlen(extras)
        q_first, query_length = packed_rows(sequence, cu_q_ptr, sequences, total_q)
        k_first, key_length = packed_rows(sequence, cu_k_ptr, sequences, total_k)
        q_first = q_first.to(tl.int64)
        k_first = k_first.to(tl.int64)
    if (ALIBI & FEATURES) | (VARLEN & FEATURES):
        shift = tl.where(_top_left(extras) != 0, 0, key_length - query_length)
    return q_first, query_length, k_first, key_length, shift, total_q


@triton.jit
def total_query_rows(query_length, extras, FEATURES: tl.constexpr):
    """Rows of the whole query tensor: what a head's log-sum-exp takes."""
    if VARLEN & FEATURES:
        _cu_q, _cu_k, _sequences, _steps, total_q, _total_k = _varlen(extras)
        return total_q
    else:
        return query_length


@triton.jit
def is_slack(sequence, extras):
    """Whether these are the rows behind the last sequence."""
    _cu_q, _cu_k, sequences, _steps, _total_q, _total_k = _varlen(extras)
    return sequence == sequences


@triton.jit
def packed_tile(slot, cu_ptr, sequences, steps, total, BLOCK: tl.constexpr):
    """Tile `slot` of packed sequences: (sequence, its first row, its length, first row of the tile within it).

    Sequence b has the slots from cu[b] // BLOCK + b on: never fewer than its tiles, so that the tile of a program is found in
    cu_seqlens alone, with no table and no look at the host. Sequence number `sequences` is what lies behind the last one. Whatever
    cu_seqlens holds, rows stay within [0, total).
    """
    low = 0
    high = sequences
    for _ in range(steps):  # the last b with cu[b] // BLOCK + b <= slot
        middle = (low + high + 1) // 2
        begins = tl.load(cu_ptr + middle) // BLOCK + middle <= slot
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle - 1)
    first, length = packed_rows(low, cu_ptr, sequences, total)
    return low, first, length, tl.maximum(slot - (first // BLOCK + low), 0) * BLOCK


@triton.jit
def packed_rows(sequence, cu_ptr, sequences, total):
    """(first row, length) of a packed sequence; sequence number `sequences` is what lies behind the last one."""
    first = tl.minimum(tl.maximum(tl.load(cu_ptr + sequence), 0), total)
    last = tl.load(cu_ptr + tl.minimum(sequence + 1, sequences))
    last = tl.where(sequence == sequences, total, tl.minimum(tl.maximum(last, 0), total))
    return first, tl.maximum(last - first, 0)
