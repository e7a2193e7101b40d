"""The backward pass for head dimensions above 128: the same sums as in attention_backward.py, divided among the warpgroups otherwise.

dK and dV of 64 keys and 256 columns do not fit a warpgroup's registers. So a program owns 64 keys, its two warpgroups make S and dP of
32 of a tile's 64 queries each, put P and dS into shared memory, and then each makes 128 columns of dV, dK and dQ, all factors from
shared memory. What a tile costs is about as much reading of shared memory as multiplying.
"""

from tileflash.kernels.compat_gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    thread_barrier,
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

KEYS = gl.constexpr(64)  # of a program
QUERIES = gl.constexpr(64)  # of a tile
MEETING_POINT = gl.constexpr(10)  # the hardware barrier at which both warpgroups' P and dS are in shared memory


@gluon.jit
def _start_products(tiles, origin, stage, WARPGROUP: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr):
    """Starts S and dP of this warpgroup's 32 queries, transposed: [64, 32] each."""
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    nothing = gl.zeros([KEYS, 32], gl.float32, LOGITS)
    k = tiles.index(origin).reshape([KEYS, BLOCK_D])
    v = tiles.index(origin + 1).reshape([KEYS, BLOCK_D])
    q = tiles.index(2 + stage).reshape([QUERIES, BLOCK_D]).slice(WARPGROUP * 32, 32, dim=0)
    d_out = tiles.index(2 + STAGES + stage).reshape([QUERIES, BLOCK_D]).slice(WARPGROUP * 32, 32, dim=0)
    logits = warpgroup_mma(k, q.permute((1, 0)), nothing, use_acc=False, is_async=True)
    d_weights = warpgroup_mma(v, d_out.permute((1, 0)), nothing, use_acc=False, is_async=True)
    return logits, d_weights


@gluon.jit
def _consume_tile(
    tile, item, count, descriptors, shared, staging, acc_ptr, table_ptr, scale, scale_log2, cap_scale, sizes,
    WARPGROUP: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr,
    HAS_DQ: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Half of the columns of one tile's dK and dV, and of the dQ of every tile of queries that sees it."""
    _, _, _, _, _, _, d_k_desc, d_v_desc = descriptors
    tiles, stats_shared, barriers = shared
    weights_shared, d_logits_shared = staging
    query_tiles, kv_heads, kv_group = sizes[3], sizes[6], sizes[7]
    DTYPE: gl.constexpr = d_k_desc.dtype
    HALF: gl.constexpr = BLOCK_D // 2
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    GRADIENT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    COLUMNS: gl.constexpr = gl.SliceLayout(0, LOGITS)
    first, batch_kv_head, begin, end, queries, key_length, low, high, _, k_begin, stats_tile = query_tiles_of(
        tile, table_ptr, sizes, KEYS, QUERIES, HAS_LOW, HAS_HIGH, PACKED
    )
    rows_of_tiles = query_tiles * QUERIES
    if PACKED:
        rows_of_tiles = gl.cdiv(queries, QUERIES) * QUERIES
    uncut_begin, uncut_end = unmasked_tiles(
        first, first + KEYS - 1, rows_of_tiles, -high, -low, begin, end, QUERIES, HAS_HIGH, HAS_LOW
    )
    uncut_begin = gl.where(first + KEYS > key_length, end, uncut_begin)
    d_k = gl.zeros([KEYS, HALF], gl.float32, GRADIENT)
    d_v = gl.zeros([KEYS, HALF], gl.float32, GRADIENT)
    no_gradient = gl.zeros([QUERIES, HALF], gl.float32, GRADIENT)
    mbarrier.wait(barriers.index(K_FULL), item & 1)
    mbarrier.wait(barriers.index(V_FULL), item & 1)
    tma_store_wait(0)  # dK and dV of the tile before leave from the memory of P and dS
    named_barrier_sync(MEETING_POINT, 256)

    steps = (end - begin) * kv_group
    i_tile = begin
    head_row = batch_kv_head * kv_group * query_tiles + stats_tile
    mbarrier.wait(barriers.index(FIRST_STAGE + count % STAGES), count // STAGES & 1)
    mbarrier.wait(barriers.index(FIRST_STAGE + STAGES + count % STAGES), count // STAGES & 1)
    logits, d_weights = _start_products(tiles, 0, count % STAGES, WARPGROUP, BLOCK_D, STAGES)
    logits = warpgroup_mma_wait(1, deps=(logits,))
    for step in range(steps):
        # Handed from step to step: the finished `logits` of this tile, and `d_weights`, still being made.
        stage = count % STAGES
        pair = count % 2
        # 0, but not to the compiler: else it would make wgmma's descriptors of K and V before the loop and run out of registers for them.
        origin = count >> 30
        lse = load_statistics(stats_shared, stage, WARPGROUP, 32, COLUMNS)
        if cap_scale is not None:
            logits, derivative = soft_capped(logits, cap_scale)
        if HAS_HIGH:
            cut = i_tile < uncut_begin
            if HAS_LOW:
                cut = cut | (i_tile >= uncut_end)
            if cut:
                i_rows = gl.arange(0, KEYS, layout=gl.SliceLayout(1, LOGITS))
                i_columns = gl.arange(0, 32, layout=COLUMNS)
                distance = first - i_tile * QUERIES - WARPGROUP * 32
                first_column = gl.where(i_rows < key_length - first, i_rows + (distance - high), QUERIES)
                logits = mask_logits(logits, i_columns, first_column, i_rows + (distance - low), True, HAS_LOW)
        fp32_weights = gl.exp2(logits * scale_log2 - lse[None, :])  # P: [64, 32]
        weights_shared.index(pair).slice(WARPGROUP * 32, 32, dim=1).store(fp32_weights.to(DTYPE))
        delta = load_statistics(stats_shared, stage, 2 + WARPGROUP, 32, COLUMNS)
        d_weights, fp32_weights = warpgroup_mma_wait(0, deps=(d_weights, fp32_weights))
        if cap_scale is not None:
            fp32_weights *= derivative
        d_logits = (fp32_weights * (d_weights - delta[None, :])).to(DTYPE)  # dS: [64, 32]
        d_logits_shared.index(pair).slice(WARPGROUP * 32, 32, dim=1).store(d_logits)
        fence_async_shared()
        named_barrier_sync(MEETING_POINT, 256)

        left = d_logits_shared.index(pair)  # [64 keys, 64 queries]
        q = tiles.index(2 + stage).reshape([QUERIES, BLOCK_D]).slice(WARPGROUP * HALF, HALF, dim=1)
        d_out = tiles.index(2 + STAGES + stage).reshape([QUERIES, BLOCK_D]).slice(WARPGROUP * HALF, HALF, dim=1)
        own_k = tiles.index(origin).reshape([KEYS, BLOCK_D]).slice(WARPGROUP * HALF, HALF, dim=1)
        if HAS_DQ:
            d_q = warpgroup_mma(left.permute((1, 0)), own_k, no_gradient, use_acc=False, is_async=True)  # [64, HALF]
        d_v = warpgroup_mma(weights_shared.index(pair), d_out, d_v, is_async=True)  # [64, HALF]
        d_k = warpgroup_mma(left, q, d_k, is_async=True)  # [64, HALF]
        if HAS_DQ:
            d_q = warpgroup_mma_wait(2, deps=(d_q,))
            piece = (head_row + i_tile) * 2 + WARPGROUP
            d_q = d_q.reshape([4, 2, 8, HALF // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([QUERIES * HALF])
            places = gl.arange(0, QUERIES * HALF, layout=d_q.type.layout)
            gl.atomic_add(acc_ptr + piece.to(gl.int64) * (QUERIES * HALF) + places, d_q, sem="relaxed", scope="gpu")
        # The next tile's products queue up behind this one's.
        count += 1
        next_stage = count % STAGES
        more = step + 1 < steps
        mbarrier.wait(barriers.index(FIRST_STAGE + next_stage), count // STAGES & 1, pred=more)
        mbarrier.wait(barriers.index(FIRST_STAGE + STAGES + next_stage), count // STAGES & 1, pred=more)
        logits, d_weights = _start_products(tiles, origin, next_stage, WARPGROUP, BLOCK_D, STAGES)
        d_v, d_k = warpgroup_mma_wait(2, deps=(d_v, d_k))
        mbarrier.arrive(barriers.index(FIRST_STAGE + 2 * STAGES + stage), count=1)
        logits = warpgroup_mma_wait(1, deps=(logits,))
        i_tile += 1
        next_head = i_tile == end
        head_row = gl.where(next_head, head_row + query_tiles, head_row)
        i_tile = gl.where(next_head, begin, i_tile)
    logits = warpgroup_mma_wait(0, deps=(d_weights,))  # started for a tile that does not come
    mbarrier.arrive(barriers.index(KV_EMPTY), count=1)

    # Out: the one warpgroup through the memory of P, the other through that of dS, when both have read them.
    named_barrier_sync(MEETING_POINT, 256)
    at = rows_at(
        batch_kv_head // kv_heads, batch_kv_head % kv_heads, first, WARPGROUP * HALF, k_begin, key_length, PACKED
    )
    if WARPGROUP == 0:
        leaving = reinterpret(weights_shared, DTYPE, d_k_desc.block_type.shape, d_k_desc.layout)
    else:
        leaving = reinterpret(d_logits_shared, DTYPE, d_k_desc.block_type.shape, d_k_desc.layout)
    leaving.reshape([KEYS, HALF]).store(d_v.to(DTYPE))
    fence_async_shared()
    tma_store(d_v_desc, at, leaving)
    scaled = (d_k * scale).to(DTYPE)
    tma_store_wait(0)
    thread_barrier()
    leaving.reshape([KEYS, HALF]).store(scaled)
    fence_async_shared()
    tma_store(d_k_desc, at, leaving)
    return count


@gluon.jit
def _consume(
    descriptors, shared, staging, acc_ptr, table_ptr, scale, scale_log2, cap_scale, sizes,
    WARPGROUP: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, PERSISTENT: gl.constexpr, HAS_DQ: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup."""
    if PERSISTENT:
        count = 0
        for item in range(sizes[0]):
            tile = scheduled_tile(table_ptr, item, sizes, True, PACKED)
            if tile >= 0:
                count = _consume_tile(
                    tile, item, count, descriptors, shared, staging, acc_ptr, table_ptr, scale, scale_log2, cap_scale, sizes,
                    WARPGROUP, BLOCK_D, STAGES, HAS_LOW, HAS_HIGH, HAS_DQ, PACKED,
                )  # fmt: skip
    else:
        nothing_yet = gl.to_tensor(0)
        tile = only_tile(table_ptr, sizes, HAS_HIGH, PACKED)
        if PACKED:
            if tile >= 0:
                _consume_tile(
                    tile, 0, nothing_yet, descriptors, shared, staging, acc_ptr, table_ptr, scale, scale_log2, cap_scale, sizes,
                    WARPGROUP, BLOCK_D, STAGES, HAS_LOW, HAS_HIGH, HAS_DQ, PACKED,
                )  # fmt: skip
        else:
            _consume_tile(
                tile, 0, nothing_yet, descriptors, shared, staging, acc_ptr, table_ptr, scale, scale_log2, cap_scale, sizes,
                WARPGROUP, BLOCK_D, STAGES, HAS_LOW, HAS_HIGH, HAS_DQ, PACKED,
            )  # fmt: skip
    tma_store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "items", "tiles", "key_blocks", "query_tiles", "query_length", "key_length", "kv_heads", "kv_group", "low", "high",
    ]
)  # fmt: skip
def attention_backward_wide_kernel(
    q_desc, k_desc, v_desc, d_out_desc, stats_desc, acc_desc, d_k_desc, d_v_desc, acc_ptr, table_ptr,
    items, tiles, key_blocks, query_tiles, query_length, key_length, kv_heads, kv_group, scale, scale_log2, low, high, cap_scale,
    BLOCK_D: gl.constexpr, STAGES: gl.constexpr, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, PERSISTENT: gl.constexpr,
    HAS_DQ: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """`attention_backward_kernel` with 64 keys a program and 64 queries a tile; a piece of the accumulator is [64, BLOCK_D / 2]."""
    DTYPE: gl.constexpr = q_desc.dtype
    tiles_shared = gl.allocate_shared_memory(DTYPE, boxes(2 + 2 * STAGES, q_desc.block_type.shape), q_desc.layout)
    stats_shared = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 2 * QUERIES], stats_desc.layout)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, QUERIES], DTYPE)
    weights_shared = gl.allocate_shared_memory(DTYPE, [2, KEYS, QUERIES], TILE)
    d_logits_shared = gl.allocate_shared_memory(DTYPE, [2, KEYS, QUERIES], TILE)
    barriers = make_barriers(STAGES)

    descriptors = (q_desc, k_desc, v_desc, d_out_desc, stats_desc, acc_desc, d_k_desc, d_v_desc)
    shared = (tiles_shared, stats_shared, barriers)
    staging = (weights_shared, d_logits_shared)
    sizes = (items, tiles, key_blocks, query_tiles, query_length, key_length, kv_heads, kv_group, low, high)
    gl.warp_specialize(
        [
            (_consume, (
                descriptors, shared, staging, acc_ptr, table_ptr, scale, scale_log2, cap_scale, sizes,
                0, BLOCK_D, STAGES, HAS_LOW, HAS_HIGH, PERSISTENT, HAS_DQ, PACKED)),
            (_consume, (
                descriptors, shared, staging, acc_ptr, table_ptr, scale, scale_log2, cap_scale, sizes,
                1, BLOCK_D, STAGES, HAS_LOW, HAS_HIGH, PERSISTENT, HAS_DQ, PACKED)),
            (produce, (
                descriptors, shared, table_ptr, sizes,
                KEYS, QUERIES, BLOCK_D, STAGES, HAS_LOW, HAS_HIGH, PERSISTENT, PACKED)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
