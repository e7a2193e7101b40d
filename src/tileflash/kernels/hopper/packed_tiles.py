"""Which tiles packed sequences have, found on the GPU: lengths are in cu_seqlens, and the host does not look there. Plain Triton.

A head has `slots`: sequence b has those from cu[b] // BLOCK + b on, which are never fewer than its tiles, and there are
total // BLOCK + N + 1 of them whatever the lengths. Of each slot a table says which tile it has, if any. As in dense problems (seen.py)
rows that see nothing and keys that nobody sees are cut off: the rest is a rectangle in which every query sees a key, and the kernels know
nothing else. Rows that are cut off get their zeros here.
"""

import triton
import triton.language as tl

# Integers of a slot: first row of the tile (-1: no tile), first query, queries, first key, keys, low, high, tile of the statistics.
ENTRY = tl.constexpr(8)
SLOTS = tl.constexpr(128)  # of a program
ROWS = tl.constexpr(64)


def slots_of(total: int, block: int, sequences: int) -> int:
    """Slots of a head for `total` packed rows."""
    return total // block + sequences + 1


@triton.jit
def _rows_of(cu_ptr, sequence, sequences, total):
    """(first row, length) of packed sequences; of number `sequences`, which is what lies behind the last, the length is 0. Whatever
    cu_seqlens holds, rows stay within [0, total)."""
    first = tl.minimum(tl.maximum(tl.load(cu_ptr + sequence), 0), total)
    last = tl.minimum(tl.maximum(tl.load(cu_ptr + tl.minimum(sequence + 1, sequences)), 0), total)
    return first, tl.maximum(last - first, 0)


@triton.jit
def _seen_of(queries, keys, low, high, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, TOP_LEFT: tl.constexpr):
    """Of sequences of `queries` and `keys` rows: (first query that sees a key, number of those that do, first key that is seen, number,
    low, high among these); no rows where nothing is seen. `low` and `high` count from where query 0 stands."""
    if not TOP_LEFT:
        low += keys - queries
        high += keys - queries
    query_begin = tl.zeros_like(queries)
    query_end = queries
    key_begin = tl.zeros_like(queries)
    key_end = keys
    if HAS_HIGH:
        query_begin = tl.maximum(-high, 0)
    if HAS_LOW:
        query_end = tl.minimum(queries, keys - low)
        key_begin = tl.maximum(low + query_begin, 0)
    if HAS_HIGH:
        key_end = tl.minimum(keys, query_end + high)
    rows = query_end - query_begin
    columns = key_end - key_begin
    nothing = (rows <= 0) | (columns <= 0)
    if HAS_LOW and HAS_HIGH:
        nothing = nothing | (low > high)
    rows = tl.where(nothing, 0, rows)
    columns = tl.where(nothing, 0, columns)
    low_here = -rows
    high_here = columns
    if HAS_LOW:
        low_here = low + query_begin - key_begin
    if HAS_HIGH:
        high_here = high + query_begin - key_begin
    return query_begin, rows, key_begin, columns, low_here, high_here


@triton.jit(do_not_specialize=["slots", "sequences", "steps", "total_q", "total_k", "low", "high"])
def packed_tiles_kernel(
    cu_q_ptr, cu_k_ptr, table_ptr, slots, sequences, steps, total_q, total_k, low, high,
    BLOCK: tl.constexpr, STATS_ROWS: tl.constexpr, OF_KEYS: tl.constexpr, REVERSED: tl.constexpr,
    HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, TOP_LEFT: tl.constexpr,
):  # fmt: skip
    """The table [slots, ENTRY] int32 of tiles of BLOCK queries, or keys (OF_KEYS). REVERSED puts the last slot first: under a causal mask a
    sequence's last queries take longest. `steps` is that of a binary search among the sequences."""
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    cu_own_ptr = cu_q_ptr
    if OF_KEYS:
        cu_own_ptr = cu_k_ptr
    first = tl.zeros_like(slot)
    last = tl.zeros_like(slot) + sequences
    for _ in range(steps):  # the last b with cu[b] // BLOCK + b <= slot
        middle = (first + last + 1) // 2
        begins = tl.load(cu_own_ptr + middle) // BLOCK + middle <= slot
        first = tl.where(begins, middle, first)
        last = tl.where(begins, last, middle - 1)
    sequence = first
    q_first, queries = _rows_of(cu_q_ptr, sequence, sequences, total_q)
    k_first, keys = _rows_of(cu_k_ptr, sequence, sequences, total_k)
    q_begin, rows, k_begin, columns, low_here, high_here = _seen_of(
        queries, keys, low, high, HAS_LOW, HAS_HIGH, TOP_LEFT
    )
    own_first = q_first
    own_rows = rows
    if OF_KEYS:
        own_first = k_first
        own_rows = columns
    tile_first = tl.maximum(slot - (own_first // BLOCK + sequence), 0) * BLOCK
    there = (sequence < sequences) & (tile_first < own_rows)
    place = slot
    if REVERSED:
        place = slots - 1 - slot
    entry = table_ptr + place * ENTRY
    inside = slot < slots
    tl.store(entry, tl.where(there, tile_first, -1), mask=inside)
    tl.store(entry + 1, q_first + q_begin, mask=inside)
    tl.store(entry + 2, rows, mask=inside)
    tl.store(entry + 3, k_first + k_begin, mask=inside)
    tl.store(entry + 4, columns, mask=inside)
    tl.store(entry + 5, low_here, mask=inside)
    tl.store(entry + 6, high_here, mask=inside)
    tl.store(entry + 7, q_first // STATS_ROWS + sequence, mask=inside)


@triton.jit(do_not_specialize=["sequences", "steps", "total_q", "total_k", "low", "high", "heads", "D"])
def clear_unseen_kernel(
    cu_q_ptr, cu_k_ptr, rows_ptr, lse_ptr, sinks, stride_rs, stride_rh, sequences, steps, total_q, total_k, low, high, heads, D,
    BLOCK_D: tl.constexpr, OF_KEYS: tl.constexpr, HAS_LSE: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, TOP_LEFT: tl.constexpr,
):  # fmt: skip
    """0 in the rows of [total, H, D] that see nothing (OF_KEYS: that nobody sees) or lie behind the last sequence, and in their lse
    [H, total] -inf, or with `sinks`, a pointer to [H] fp32, the sink for those that see nothing else."""
    head = tl.program_id(0) % heads
    i_rows = tl.program_id(0) // heads * ROWS + tl.arange(0, ROWS)
    cu_own_ptr = cu_q_ptr
    total = total_q
    if OF_KEYS:
        cu_own_ptr = cu_k_ptr
        total = total_k
    first = tl.zeros_like(i_rows)
    last = tl.zeros_like(i_rows) + sequences
    for _ in range(steps):  # the last sequence that begins at or before the row: the one that has it
        middle = (first + last + 1) // 2
        begins = tl.load(cu_own_ptr + middle) <= i_rows
        first = tl.where(begins, middle, first)
        last = tl.where(begins, last, middle - 1)
    sequence = first
    q_first, queries = _rows_of(cu_q_ptr, sequence, sequences, total_q)
    k_first, keys = _rows_of(cu_k_ptr, sequence, sequences, total_k)
    q_begin, rows, k_begin, columns, _low, _high = _seen_of(queries, keys, low, high, HAS_LOW, HAS_HIGH, TOP_LEFT)
    begin = q_first + q_begin
    length = rows
    if OF_KEYS:
        begin = k_first + k_begin
        length = columns
    unseen = (i_rows < total) & ((sequence == sequences) | (i_rows < begin) | (i_rows >= begin + length))
    if tl.max(unseen.to(tl.int32), 0) != 0:
        i_columns = tl.arange(0, BLOCK_D)
        pointers = (
            rows_ptr + head.to(tl.int64) * stride_rh + i_rows.to(tl.int64)[:, None] * stride_rs + i_columns[None, :]
        )
        zeros = tl.zeros([ROWS, BLOCK_D], rows_ptr.dtype.element_ty)
        tl.store(pointers, zeros, mask=unseen[:, None] & (i_columns < D)[None, :])
        if HAS_LSE:
            lse = tl.full([ROWS], -float("inf"), tl.float32)
            if HAS_SINKS:
                (sinks_ptr,) = sinks
                lse = tl.where(sequence == sequences, lse, tl.load(sinks_ptr + head))
            tl.store(lse_ptr + head.to(tl.int64) * total + i_rows, lse, mask=unseen)
