"""FlashAttention's backward pass for Hopper in Gluon, with the structure of FlashAttention 3: dK, dV and a share of dQ in one pass.

With P = exp(scale * Q K^T - lse):   dV = P^T dO,   dS = P * (dO V^T - delta),   dQ = scale * dS K,   dK = scale * dS^T Q.

A program owns 128 keys of one K/V head: two consumer warpgroups of 64 keys each and a producer warp, which fetches Q, dO and their
statistics (lse, delta) of one tile of queries after the other, for all query heads that share the K/V head. S and dP are made
transposed, [keys, queries], so that P and dS are in the registers where wgmma wants the left factors of dV and dK. dS goes to shared
memory once; from there each warpgroup makes one half of the tile's dQ over all 128 keys and adds it to an fp32 accumulator in global
memory. Those additions have no fixed order: dQ differs in its last bits from run to run. A kernel before this one makes delta and zeroes
the accumulator, one after it turns the accumulator into dQ (attention_backward_ends.py).
"""

from tileflash.kernels.compat_gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    thread_barrier,
    tma_reduce_add,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tileflash.kernels.hopper.attention_backward_producer import (
    FIRST_STAGE,
    K_FULL,
    KV_EMPTY,
    V_FULL,
    load_statistics,
    make_barriers,
    only_tile,
    produce,
    query_tiles_of,
)
from tileflash.kernels.hopper.tile import (
    boxes,
    mask_logits,
    named_barrier_sync,
    rows_at,
    scheduled_tile,
    soft_capped,
    unmasked_tiles,
)

KEYS = gl.constexpr(128)  # of a program
MEETING_POINT = gl.constexpr(10)  # the hardware barrier at which both warpgroups' dS is in shared memory


@gluon.jit
def _keys(tiles, first_tile, HALF: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr):
    """64 of the program's 128 rows of K or V: two tiles of 64 rows, or one of 128."""
    if BLOCK_M == 64:
        return tiles.index(first_tile + HALF).reshape([64, BLOCK_D])
    else:
        return tiles.index(first_tile).reshape([BLOCK_M, BLOCK_D]).slice(HALF * 64, 64, dim=0)


@gluon.jit
def _times_transposed(tiles, first_tile, other, WARPGROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr):
    """Starts this warpgroup's rows of K or V [64, BLOCK_D] times the transposed tile `other` of Q or dO: [64, BLOCK_M]."""
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    rows = _keys(tiles, first_tile, WARPGROUP, BLOCK_M, BLOCK_D)
    columns = tiles.index(other).reshape([BLOCK_M, BLOCK_D]).permute((1, 0))
    return warpgroup_mma(rows, columns, gl.zeros([64, BLOCK_M], gl.float32, LOGITS), use_acc=False, is_async=True)


@gluon.jit
def _step(
    within, i_row, more, offset, uncut_begin, uncut_end, keys_left, count, logits, d_weights, d_k, d_v,
    shared, staging, meeting, acc_desc, acc_ptr, scale_log2, cap_scale, low, high,
    WARPGROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, PREFETCH: gl.constexpr, DQ_BY_TMA: gl.constexpr, HAS_DQ: gl.constexpr,
):  # fmt: skip
    """One tile of queries. Handed from step to step: with PREFETCH 1 the finished `logits` of this tile, with 2 also `d_weights`, still
    being made. More would be faster on paper, but what is in flight when dQ needs its registers makes ptxas serialise all wgmma."""
    tiles, stats_shared, barriers = shared
    d_logits_shared, d_q_shared = staging
    DTYPE: gl.constexpr = tiles.dtype
    PARTS: gl.constexpr = KEYS // BLOCK_M  # tiles that K and V take each; Q's come after them, then dO's
    Q: gl.constexpr = 2 * PARTS
    D_OUT: gl.constexpr = 2 * PARTS + STAGES
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    GRADIENT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    D_QUERY: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    FACTOR: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=GRADIENT, k_width=2)
    QUERIES: gl.constexpr = gl.SliceLayout(0, LOGITS)
    stage = count % STAGES
    phase = count // STAGES & 1
    pair = count % 2  # which of the two dS buffers
    next_stage = (count + 1) % STAGES
    next_phase = (count + 1) // STAGES & 1
    q = tiles.index(Q + stage).reshape([BLOCK_M, BLOCK_D])
    d_out = tiles.index(D_OUT + stage).reshape([BLOCK_M, BLOCK_D])
    # 0, but not to the compiler: else it would make wgmma's descriptors of K and V before the loop and run out of registers for them.
    origin = count >> 30

    if PREFETCH == 0:
        mbarrier.wait(barriers.index(FIRST_STAGE + stage), phase)
        logits = _times_transposed(tiles, origin, Q + stage, WARPGROUP, BLOCK_M, BLOCK_D)  # [64, BLOCK_M]
        mbarrier.wait(barriers.index(FIRST_STAGE + STAGES + stage), phase)
    if PREFETCH < 2:
        d_weights = _times_transposed(
            tiles, origin + PARTS, D_OUT + stage, WARPGROUP, BLOCK_M, BLOCK_D
        )  # [64, BLOCK_M]
    lse = load_statistics(stats_shared, stage, 0, BLOCK_M, QUERIES)
    if PREFETCH == 0:
        logits = warpgroup_mma_wait(1, deps=(logits,))
    if cap_scale is not None:
        logits, derivative = soft_capped(logits, cap_scale)
        derivative = derivative.to(DTYPE)  # half the registers, and dS is rounded to that anyway
    if HAS_HIGH:
        cut = within < uncut_begin
        if HAS_LOW:
            cut = cut | (within >= uncut_end)
        if cut:
            # Row r is key r of the warpgroup, column c a query, r - c + distance their j - i. The queries that see a key are a range.
            i_rows = gl.arange(0, 64, layout=gl.SliceLayout(1, LOGITS))
            i_columns = gl.arange(0, BLOCK_M, layout=QUERIES)
            distance = offset - within * BLOCK_M
            first_column = gl.where(i_rows < keys_left, i_rows + (distance - high), BLOCK_M)
            logits = mask_logits(logits, i_columns, first_column, i_rows + (distance - low), True, HAS_LOW)
    fp32_weights = gl.exp2(logits * scale_log2 - lse[None, :])  # P: [64, BLOCK_M]
    # A wait for an mbarrier ends the basic block, which keeps the exponentials above the wait for wgmma (see the forward kernel).
    if DQ_BY_TMA and HAS_DQ:
        mbarrier.wait(meeting.index(2 + pair), (count // 2 & 1) ^ 1)
    else:
        mbarrier.wait(barriers.index(FIRST_STAGE + STAGES + stage), phase)  # long since complete
    delta = load_statistics(stats_shared, stage, 1, BLOCK_M, QUERIES)
    d_weights, fp32_weights = warpgroup_mma_wait(0, deps=(d_weights, fp32_weights))
    weights = gl.convert_layout(fp32_weights.to(DTYPE), FACTOR)
    if cap_scale is not None:
        fp32_weights *= derivative.to(gl.float32)
    d_logits = (fp32_weights * (d_weights - delta[None, :])).to(DTYPE)  # dS: [64, BLOCK_M]
    if HAS_DQ:
        d_logits_shared.index(pair * 2 + WARPGROUP).store(d_logits)
    d_v = warpgroup_mma(weights, d_out, d_v, is_async=True)  # [64, BLOCK_D]
    if HAS_DQ:
        fence_async_shared()
        if DQ_BY_TMA:
            mbarrier.arrive(meeting.index(pair), count=1)
            mbarrier.wait(meeting.index(pair), count // 2 & 1)
        else:
            named_barrier_sync(MEETING_POINT, 256)

        # This warpgroup's half of dQ over all 128 keys: 64 columns where the tile has 64 queries, else 64 queries. [64, 64]
        nothing = gl.zeros([64, 64], gl.float32, D_QUERY)
        k_0 = _keys(tiles, origin, 0, BLOCK_M, BLOCK_D)
        k_1 = _keys(tiles, origin, 1, BLOCK_M, BLOCK_D)
        if BLOCK_M == 64:
            left_0 = d_logits_shared.index(pair * 2)
            left_1 = d_logits_shared.index(pair * 2 + 1)
            k_0 = k_0.slice(WARPGROUP * 64, 64, dim=1)
            k_1 = k_1.slice(WARPGROUP * 64, 64, dim=1)
        else:
            left_0 = d_logits_shared.index(pair * 2).slice(WARPGROUP * 64, 64, dim=1)
            left_1 = d_logits_shared.index(pair * 2 + 1).slice(WARPGROUP * 64, 64, dim=1)
        d_q = warpgroup_mma(left_0.permute((1, 0)), k_0, nothing, use_acc=False, is_async=True)
        d_q = warpgroup_mma(left_1.permute((1, 0)), k_1, d_q, is_async=True)
    d_k = warpgroup_mma(gl.convert_layout(d_logits, FACTOR), q, d_k, is_async=True)  # [64, BLOCK_D]
    if HAS_DQ:
        d_v, d_q = warpgroup_mma_wait(1, deps=(d_v, d_q))
        if DQ_BY_TMA:
            mbarrier.arrive(meeting.index(2 + pair), count=1)
        # The accumulator is in the order in which threads hold it, so that nothing is shuffled and all accesses are 16 bytes wide.
        piece = i_row * 2 + WARPGROUP
        d_q = d_q.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
        if DQ_BY_TMA:
            tma_store_wait(0)
            thread_barrier()
            d_q_shared.index(WARPGROUP).store(d_q.reshape([16, 256]))
            fence_async_shared()
            tma_reduce_add(acc_desc, [piece * 16, 0], d_q_shared.index(WARPGROUP))
        else:
            d_q = d_q.reshape([64 * 64])
            places = gl.arange(0, 64 * 64, layout=d_q.type.layout)
            gl.atomic_add(acc_ptr + piece.to(gl.int64) * (64 * 64) + places, d_q, sem="relaxed", scope="gpu")

    # The next tile is started only now that dQ has left its registers. (Without dQ d_v is still being made, too.)
    if PREFETCH == 0:
        d_v, d_k = warpgroup_mma_wait(0, deps=(d_v, d_k))
        mbarrier.arrive(barriers.index(FIRST_STAGE + 2 * STAGES + stage), count=1)
    else:
        mbarrier.wait(barriers.index(FIRST_STAGE + next_stage), next_phase, pred=more)
        logits = _times_transposed(tiles, origin, Q + next_stage, WARPGROUP, BLOCK_M, BLOCK_D)
        if PREFETCH == 2:
            mbarrier.wait(barriers.index(FIRST_STAGE + STAGES + next_stage), next_phase, pred=more)
            d_weights = _times_transposed(tiles, origin + PARTS, D_OUT + next_stage, WARPGROUP, BLOCK_M, BLOCK_D)
            d_v, d_k = warpgroup_mma_wait(2, deps=(d_v, d_k))
            mbarrier.arrive(barriers.index(FIRST_STAGE + 2 * STAGES + stage), count=1)
            logits = warpgroup_mma_wait(1, deps=(logits,))
        else:
            d_v, d_k = warpgroup_mma_wait(1, deps=(d_v, d_k))
            mbarrier.arrive(barriers.index(FIRST_STAGE + 2 * STAGES + stage), count=1)
            mbarrier.wait(barriers.index(FIRST_STAGE + STAGES + next_stage), next_phase, pred=more)
            logits = warpgroup_mma_wait(0, deps=(logits,))
    return logits, d_weights, d_k, d_v


@gluon.jit
def _consume_tile(
    tile, item, count, descriptors, shared, staging, meeting, acc_ptr, table_ptr, scale, scale_log2, cap_scale, sizes,
    WARPGROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, GROUPED: gl.constexpr, PREFETCH: gl.constexpr, DQ_BY_TMA: gl.constexpr,
    HAS_DQ: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """64 of a tile's 128 keys: their dK and dV, and half of the dQ of every tile of queries that sees the 128."""
    _, _, _, _, _, acc_desc, d_k_desc, d_v_desc = descriptors
    tiles, _, barriers = shared
    d_logits_shared, d_q_shared = staging
    PARTS: gl.constexpr = KEYS // BLOCK_M
    Q: gl.constexpr = 2 * PARTS
    D_OUT: gl.constexpr = 2 * PARTS + STAGES
    query_tiles, kv_heads, kv_group = sizes[3], sizes[6], sizes[7]
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    GRADIENT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    DTYPE: gl.constexpr = d_k_desc.dtype
    first, batch_kv_head, begin, end, queries, key_length, low, high, _, k_begin, stats_tile = query_tiles_of(
        tile, table_ptr, sizes, KEYS, BLOCK_M, HAS_LOW, HAS_HIGH, PACKED
    )
    own_first = first + WARPGROUP * 64
    # The tiles of queries that see all of this warpgroup's keys, counted from `begin`; none where the keys end among them.
    rows_of_tiles = query_tiles * BLOCK_M
    if PACKED:
        rows_of_tiles = gl.cdiv(queries, BLOCK_M) * BLOCK_M
    uncut_begin, uncut_end = unmasked_tiles(
        own_first, own_first + 63, rows_of_tiles, -high, -low, begin, end, BLOCK_M, HAS_HIGH, HAS_LOW
    )
    uncut_begin = gl.where(own_first + 64 > key_length, end, uncut_begin) - begin
    uncut_end -= begin
    offset = own_first - begin * BLOCK_M
    d_k = gl.zeros([64, BLOCK_D], gl.float32, GRADIENT)
    d_v = gl.zeros([64, BLOCK_D], gl.float32, GRADIENT)
    logits = gl.zeros([64, BLOCK_M], gl.float32, LOGITS)
    d_weights = logits
    mbarrier.wait(barriers.index(K_FULL), item & 1)
    if PREFETCH > 0:
        stage = count % STAGES
        phase = count // STAGES & 1
        mbarrier.wait(barriers.index(FIRST_STAGE + stage), phase)
        logits = _times_transposed(tiles, 0, Q + stage, WARPGROUP, BLOCK_M, BLOCK_D)
        mbarrier.wait(barriers.index(V_FULL), item & 1)
        mbarrier.wait(barriers.index(FIRST_STAGE + STAGES + stage), phase)
        if PREFETCH == 2:
            d_weights = _times_transposed(tiles, PARTS, D_OUT + stage, WARPGROUP, BLOCK_M, BLOCK_D)
            logits = warpgroup_mma_wait(1, deps=(logits,))
        else:
            logits = warpgroup_mma_wait(0, deps=(logits,))
    else:
        mbarrier.wait(barriers.index(V_FULL), item & 1)
    if not DQ_BY_TMA:
        tma_store_wait(0)  # dK and dV of the tile before leave from the memory of dS
        thread_barrier()

    # All query heads of the group one after the other, as one loop: what is prefetched at the end of a head is the next one's.
    tiles_of_head = end - begin
    steps = tiles_of_head
    first_row = batch_kv_head * query_tiles + begin + stats_tile
    if GROUPED:
        steps *= kv_group
        first_row = batch_kv_head * kv_group * query_tiles + begin + stats_tile
        within = 0
    for step in range(steps):
        if not GROUPED:
            within = step
        logits, d_weights, d_k, d_v = _step(
            within, first_row + within, step + 1 < steps, offset, uncut_begin, uncut_end, key_length - own_first, count + step,
            logits, d_weights, d_k, d_v, shared, staging, meeting, acc_desc, acc_ptr, scale_log2, cap_scale, low, high,
            WARPGROUP, BLOCK_M, BLOCK_D, STAGES, HAS_LOW, HAS_HIGH, PREFETCH, DQ_BY_TMA, HAS_DQ,
        )  # fmt: skip
        if GROUPED:
            within += 1
            first_row = gl.where(within == tiles_of_head, first_row + query_tiles, first_row)
            within = gl.where(within == tiles_of_head, 0, within)
    if PREFETCH == 2:
        logits = warpgroup_mma_wait(0, deps=(d_weights,))  # started for a tile that does not come
    count += steps
    mbarrier.arrive(barriers.index(KV_EMPTY), count=1)

    # Out through this warpgroup's staging of dQ (one tile at a time), or through the dS buffer that is free (both at once).
    at = rows_at(batch_kv_head // kv_heads, batch_kv_head % kv_heads, own_first, 0, k_begin, key_length, PACKED)
    tma_store_wait(0)
    thread_barrier()
    if DQ_BY_TMA:
        leaving = reinterpret(d_q_shared.index(WARPGROUP), DTYPE, d_k_desc.block_type.shape, d_k_desc.layout)
        leaving.reshape([64, BLOCK_D]).store(d_v.to(DTYPE))
        fence_async_shared()
        tma_store(d_v_desc, at, leaving)
        scaled = (d_k * scale).to(DTYPE)
        tma_store_wait(0)
        thread_barrier()
        leaving.reshape([64, BLOCK_D]).store(scaled)
        fence_async_shared()
        tma_store(d_k_desc, at, leaving)
    else:
        free = d_logits_shared.index(count % 2 * 2 + WARPGROUP)
        leaving = reinterpret(free, DTYPE, boxes(2, d_k_desc.block_type.shape), d_k_desc.layout)
        leaving.index(0).reshape([64, BLOCK_D]).store(d_v.to(DTYPE))
        leaving.index(1).reshape([64, BLOCK_D]).store((d_k * scale).to(DTYPE))
        fence_async_shared()
        tma_store(d_v_desc, at, leaving.index(0))
        tma_store(d_k_desc, at, leaving.index(1))
    return count


@gluon.jit
def _consume(
    descriptors, shared, staging, meeting, acc_ptr, table_ptr, scale, scale_log2, cap_scale, sizes,
    WARPGROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, GROUPED: gl.constexpr,
    PREFETCH: gl.constexpr, DQ_BY_TMA: gl.constexpr, PERSISTENT: gl.constexpr, HAS_DQ: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup."""
    if PERSISTENT:
        count = 0
        for item in range(sizes[0]):
            tile = scheduled_tile(table_ptr, item, sizes, True, PACKED)
            if tile >= 0:
                count = _consume_tile(
                    tile, item, count, descriptors, shared, staging, meeting, acc_ptr, table_ptr, scale, scale_log2, cap_scale, sizes,
                    WARPGROUP, BLOCK_M, BLOCK_D, STAGES, HAS_LOW, HAS_HIGH, GROUPED, PREFETCH, DQ_BY_TMA, HAS_DQ, PACKED,
                )  # fmt: skip
    else:
        nothing_yet = gl.to_tensor(0)
        tile = only_tile(table_ptr, sizes, HAS_HIGH, PACKED)
        if PACKED:
            if tile >= 0:
                _consume_tile(
                    tile, 0, nothing_yet, descriptors, shared, staging, meeting, acc_ptr, table_ptr, scale, scale_log2, cap_scale, sizes,
                    WARPGROUP, BLOCK_M, BLOCK_D, STAGES, HAS_LOW, HAS_HIGH, GROUPED, PREFETCH, DQ_BY_TMA, HAS_DQ, PACKED,
                )  # fmt: skip
        else:
            _consume_tile(
                tile, 0, nothing_yet, descriptors, shared, staging, meeting, acc_ptr, table_ptr, scale, scale_log2, cap_scale, sizes,
                WARPGROUP, BLOCK_M, BLOCK_D, STAGES, HAS_LOW, HAS_HIGH, GROUPED, PREFETCH, DQ_BY_TMA, HAS_DQ, PACKED,
            )  # fmt: skip
    tma_store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "items", "tiles", "key_blocks", "query_tiles", "query_length", "key_length", "kv_heads", "kv_group", "low", "high",
    ]
)  # fmt: skip
def attention_backward_kernel(
    q_desc, k_desc, v_desc, d_out_desc, stats_desc, acc_desc, d_k_desc, d_v_desc, acc_ptr, table_ptr,
    items, tiles, key_blocks, query_tiles, query_length, key_length, kv_heads, kv_group, scale, scale_log2, low, high, cap_scale,
    BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, GROUPED: gl.constexpr,
    PREFETCH: gl.constexpr, DQ_BY_TMA: gl.constexpr, PERSISTENT: gl.constexpr, HAS_DQ: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """d_k and d_v, and dQ / scale added to the accumulator.

    The descriptors see q, k, v, d_out, d_k, d_v as [B, H, S, D] in tiles of [1, 1, BLOCK_M or 64, BLOCK_D]; the statistics as
    [B * Hq * query_tiles, 2 * BLOCK_M] fp32 (lse * log2(e), then delta); the accumulator as rows of 256 fp32, 16 of them a piece of
    [64, 64], two pieces a tile of queries. `table_ptr` [items, programs] is read by persistent programs only. `cap_scale` may be None; with
    a soft cap it is scale / cap, and `scale_log2` is cap * log2(e).
    """
    DTYPE: gl.constexpr = q_desc.dtype
    TILES: gl.constexpr = 2 * KEYS // BLOCK_M + 2 * STAGES
    tiles_shared = gl.allocate_shared_memory(DTYPE, boxes(TILES, q_desc.block_type.shape), q_desc.layout)
    stats_shared = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 2 * BLOCK_M], stats_desc.layout)
    D_LOGITS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_M], DTYPE)
    d_logits_shared = gl.allocate_shared_memory(DTYPE, [4, 64, BLOCK_M], D_LOGITS)
    if DQ_BY_TMA:
        d_q_shared = gl.allocate_shared_memory(gl.float32, [2, 16, 256], acc_desc.layout)
    else:
        d_q_shared = d_logits_shared
    barriers = make_barriers(STAGES)
    meeting = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())  # dS is there; dS has been read
    for i in gl.static_range(4):
        mbarrier.init(meeting.index(i), count=2)
    fence_async_shared()

    descriptors = (q_desc, k_desc, v_desc, d_out_desc, stats_desc, acc_desc, d_k_desc, d_v_desc)
    shared = (tiles_shared, stats_shared, barriers)
    staging = (d_logits_shared, d_q_shared)
    sizes = (items, tiles, key_blocks, query_tiles, query_length, key_length, kv_heads, kv_group, low, high)
    gl.warp_specialize(
        [
            (_consume, (
                descriptors, shared, staging, meeting, acc_ptr, table_ptr, scale, scale_log2, cap_scale, sizes,
                0, BLOCK_M, BLOCK_D, STAGES,
                HAS_LOW, HAS_HIGH, GROUPED, PREFETCH, DQ_BY_TMA, PERSISTENT, HAS_DQ, PACKED)),
            (_consume, (
                descriptors, shared, staging, meeting, acc_ptr, table_ptr, scale, scale_log2, cap_scale, sizes,
                1, BLOCK_M, BLOCK_D, STAGES,
                HAS_LOW, HAS_HIGH, GROUPED, PREFETCH, DQ_BY_TMA, PERSISTENT, HAS_DQ, PACKED)),
            (produce, (
                descriptors, shared, table_ptr, sizes, KEYS, BLOCK_M, BLOCK_D, STAGES, HAS_LOW, HAS_HIGH, PERSISTENT, PACKED)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
