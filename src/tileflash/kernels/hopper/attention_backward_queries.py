"""d_q by itself, for gradients that are equal bit for bit from run to run: a program owns queries and walks over the keys that they see.

The default backward pass owns keys, so that what many programs add to one d_q has no order. Here d_q of 64 queries stays in a warpgroup's
registers from the first tile of keys to the last, as the output does in the forward pass: dQ = scale * dS K with dS = P * (dO V^T - delta).
S and dP are made a second time for it, seven products instead of five in all, but nothing is added up in global memory, no dS passes
through shared memory, and the kernel that makes d_k and d_v is relieved of its part.

The structure is the forward pass's: a producer warp and two consumer warpgroups of 64 queries each; S and dP of a tile are made while dS K
of the tile before is still running.
"""

from tileflash.kernels.compat_gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tileflash.kernels.hopper.tile import (
    boxes,
    locate_queries,
    mask_keys,
    rows_at,
    scheduled_tile,
    soft_capped,
    unmasked_tiles,
    visible_tiles,
)

BLOCK_M = gl.constexpr(128)  # queries of a program's tile


@gluon.jit
def _produce(
    descriptors, buffers, barriers, table_ptr, sizes,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """The producer warp."""
    q_desc, k_desc, v_desc, d_out_desc = descriptors
    q_shared, k_shared, v_shared, d_out_shared = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    items = sizes[0]
    TILE_BYTES: gl.constexpr = BLOCK_N * BLOCK_D * 2
    count = 0  # of key tiles fetched so far: gives the stages and the phases of their barriers
    for item in range(items):
        tile = scheduled_tile(table_ptr, item, sizes, HAS_HIGH, PACKED)
        if tile >= 0:
            (
                first, last, batch, head, kv_head, query_length, key_length, low, high, q_begin, k_begin, _stats,
            ) = locate_queries(tile, table_ptr, sizes, BLOCK_M, PACKED)  # fmt: skip
            begin, end = visible_tiles(first, last, key_length, low, high, BLOCK_N, HAS_LOW, HAS_HIGH)
            for i_tile in range(end - begin):
                at = rows_at(batch, kv_head, (end - 1 - i_tile) * BLOCK_N, 0, k_begin, key_length, PACKED)
                stage = count % K_STAGES
                mbarrier.wait(k_empty.index(stage), (count // K_STAGES & 1) ^ 1)
                mbarrier.expect(k_full.index(stage), TILE_BYTES)
                tma_load(k_desc, at, k_full.index(stage), k_shared.index(stage))
                if i_tile == 0:  # the consumers may still work with Q of the tile before; K does not wait for that
                    for warpgroup in gl.static_range(2):
                        mbarrier.wait(q_empty.index(warpgroup), (item & 1) ^ 1)
                        mbarrier.expect(q_full.index(warpgroup), 2 * 64 * BLOCK_D * 2)
                        q_at = rows_at(batch, head, first + warpgroup * 64, 0, q_begin, query_length, PACKED)
                        tma_load(q_desc, q_at, q_full.index(warpgroup), q_shared.index(warpgroup))
                        tma_load(d_out_desc, q_at, q_full.index(warpgroup), d_out_shared.index(warpgroup))
                stage = count % V_STAGES
                mbarrier.wait(v_empty.index(stage), (count // V_STAGES & 1) ^ 1)
                mbarrier.expect(v_full.index(stage), TILE_BYTES)
                tma_load(v_desc, at, v_full.index(stage), v_shared.index(stage))
                count += 1


@gluon.jit
def _skip_tiles(tiles, count, barriers, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr):
    """Hand back `tiles` key tiles that the other warpgroup wants and this one does not see."""
    _, _, k_full, k_empty, v_full, v_empty = barriers
    for _i_tile in range(tiles):
        mbarrier.wait(k_full.index(count % K_STAGES), count // K_STAGES & 1)
        mbarrier.arrive(k_empty.index(count % K_STAGES), count=1)
        mbarrier.wait(v_full.index(count % V_STAGES), count // V_STAGES & 1)
        mbarrier.arrive(v_empty.index(count % V_STAGES), count=1)
        count += 1
    return count


@gluon.jit
def _store_d_q(acc_ptr, piece, d_q, BLOCK_D: gl.constexpr):
    """64 rows of dQ / scale, in the order in which threads hold them: 16 bytes at a time. The launcher's last kernel undoes it."""
    d_q = d_q.reshape([4, 2, 8, BLOCK_D // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([64 * BLOCK_D])
    places = gl.arange(0, 64 * BLOCK_D, layout=d_q.type.layout)
    gl.store(acc_ptr + piece.to(gl.int64) * (64 * BLOCK_D) + places, d_q)


@gluon.jit
def _consume(
    descriptors, buffers, barriers, stats_ptr, acc_ptr, table_ptr, scale_log2, cap_scale, stats_tiles, sizes,
    WARPGROUP: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STATS_ROWS: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: d_q of 64 queries of every tile."""
    q_shared, k_shared, v_shared, d_out_shared = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    items, heads = sizes[0], sizes[5]
    DTYPE: gl.constexpr = q_shared.dtype
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    GRADIENT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    FACTOR: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=GRADIENT, k_width=2)
    ROWS: gl.constexpr = gl.SliceLayout(1, LOGITS)
    PIECES: gl.constexpr = STATS_ROWS // 64  # of 64 rows in a tile of the statistics
    q = q_shared.index(WARPGROUP).reshape([64, BLOCK_D])
    d_out = d_out_shared.index(WARPGROUP).reshape([64, BLOCK_D])
    count = 0
    for item in range(items):
        tile = scheduled_tile(table_ptr, item, sizes, HAS_HIGH, PACKED)
        if tile >= 0:
            (
                first, last, batch, head, _kv_head, query_length, key_length, low, high, _q_begin, _k_begin, stats_tile,
            ) = locate_queries(tile, table_ptr, sizes, BLOCK_M, PACKED)  # fmt: skip
            begin, end = visible_tiles(first, last, key_length, low, high, BLOCK_N, HAS_LOW, HAS_HIGH)
            own_first = first + WARPGROUP * 64
            own_last = gl.minimum(own_first + 63, query_length - 1)
            piece = ((batch * heads + head) * stats_tiles + stats_tile) * PIECES + own_first // 64
            if own_first >= query_length:
                count = _skip_tiles(end - begin, count, barriers, K_STAGES, V_STAGES)
                mbarrier.wait(q_full.index(WARPGROUP), item & 1)
                mbarrier.arrive(q_empty.index(WARPGROUP), count=1)
                if PIECES == 2:  # rows that are looked at: what lay in memory there must not look like a lost tile
                    _store_d_q(acc_ptr, piece, gl.zeros([64, BLOCK_D], gl.float32, GRADIENT), BLOCK_D)
            else:
                own_begin, own_end = visible_tiles(
                    own_first, own_last, key_length, low, high, BLOCK_N, HAS_LOW, HAS_HIGH
                )
                full_begin, full_end = unmasked_tiles(
                    own_first, own_last, key_length, low, high, own_begin, own_end, BLOCK_N, HAS_LOW, HAS_HIGH
                )
                if HAS_HIGH:
                    count = _skip_tiles(end - own_end, count, barriers, K_STAGES, V_STAGES)
                i_queries = own_first + gl.arange(0, 64, layout=ROWS)
                # Where there is no query lse is +inf, so that P is 0 there.
                stats = stats_ptr + (piece // PIECES).to(gl.int64) * (2 * STATS_ROWS) + piece % PIECES * 64
                lse = gl.load(stats + gl.arange(0, 64, layout=ROWS))
                delta = gl.load(stats + STATS_ROWS + gl.arange(0, 64, layout=ROWS))

                # The first tile: no dS of a tile before.
                k_stage = count % K_STAGES
                v_stage = count % V_STAGES
                no_logits = gl.zeros([64, BLOCK_N], gl.float32, LOGITS)
                mbarrier.wait(q_full.index(WARPGROUP), item & 1)
                mbarrier.wait(k_full.index(k_stage), count // K_STAGES & 1)
                k = k_shared.index(k_stage).reshape([BLOCK_N, BLOCK_D])
                logits = warpgroup_mma(q, k.permute((1, 0)), no_logits, use_acc=False, is_async=True)  # [64, BLOCK_N]
                mbarrier.wait(v_full.index(v_stage), count // V_STAGES & 1)
                v = v_shared.index(v_stage).reshape([BLOCK_N, BLOCK_D])
                d_weights = warpgroup_mma(d_out, v.permute((1, 0)), no_logits, use_acc=False, is_async=True)
                logits = warpgroup_mma_wait(1, deps=(logits,))
                if cap_scale is not None:
                    logits, derivative = soft_capped(logits, cap_scale)
                if HAS_HIGH:
                    if (own_end > full_end) | (own_end <= full_begin):
                        i_key = (own_end - 1) * BLOCK_N
                        logits = mask_keys(logits, i_key, i_queries, key_length, low, high, BLOCK_N, HAS_LOW)
                weights = gl.exp2(logits * scale_log2 - lse[:, None])  # P: [64, BLOCK_N]
                if cap_scale is not None:
                    weights *= derivative
                d_weights, weights = warpgroup_mma_wait(0, deps=(d_weights, weights))
                mbarrier.arrive(v_empty.index(v_stage), count=1)
                d_logits = gl.convert_layout((weights * (d_weights - delta[:, None])).to(DTYPE), FACTOR)  # dS
                d_q = gl.zeros([64, BLOCK_D], gl.float32, GRADIENT)
                after = count + 1
                mbarrier.wait(k_full.index(after % K_STAGES), after // K_STAGES & 1, pred=own_end - own_begin > 1)

                # The others, downwards. On entry to a step dS of the tile before is still to be multiplied with its K, and K of this
                # tile has arrived.
                for i_tile in range(1, own_end - own_begin):
                    after = count + 1
                    k_stage = count % K_STAGES
                    v_stage = after % V_STAGES
                    v_phase = after // V_STAGES & 1
                    k = k_shared.index(after % K_STAGES).reshape([BLOCK_N, BLOCK_D])
                    v = v_shared.index(v_stage).reshape([BLOCK_N, BLOCK_D])
                    k_before = k_shared.index(k_stage).reshape([BLOCK_N, BLOCK_D])
                    logits = warpgroup_mma(q, k.permute((1, 0)), no_logits, use_acc=False, is_async=True)
                    mbarrier.wait(v_full.index(v_stage), v_phase)
                    d_weights = warpgroup_mma(d_out, v.permute((1, 0)), no_logits, use_acc=False, is_async=True)
                    d_q = warpgroup_mma(d_logits, k_before, d_q, is_async=True)  # [64, BLOCK_D]
                    logits = warpgroup_mma_wait(2, deps=(logits,))
                    if cap_scale is not None:
                        logits, derivative = soft_capped(logits, cap_scale)
                    if HAS_HIGH:
                        key_tile = own_end - 1 - i_tile
                        if (key_tile >= full_end) | (key_tile < full_begin):
                            i_key = key_tile * BLOCK_N
                            logits = mask_keys(logits, i_key, i_queries, key_length, low, high, BLOCK_N, HAS_LOW)
                    weights = gl.exp2(logits * scale_log2 - lse[:, None])
                    if cap_scale is not None:
                        weights *= derivative
                    # Waits for an mbarrier (this one is long since complete) end a basic block: the assembler would move the waits for
                    # wgmma above what is to run meanwhile (see the forward kernel).
                    mbarrier.wait(v_full.index(v_stage), v_phase)
                    d_weights, weights = warpgroup_mma_wait(1, deps=(d_weights, weights))
                    mbarrier.arrive(v_empty.index(v_stage), count=1)
                    fp32_d_logits = weights * (d_weights - delta[:, None])
                    more = i_tile + 1 < own_end - own_begin
                    mbarrier.wait(k_full.index((count + 2) % K_STAGES), (count + 2) // K_STAGES & 1, pred=more)
                    d_q, fp32_d_logits = warpgroup_mma_wait(0, deps=(d_q, fp32_d_logits))
                    mbarrier.arrive(k_empty.index(k_stage), count=1)
                    d_logits = gl.convert_layout(fp32_d_logits.to(DTYPE), FACTOR)  # renames registers, moves nothing
                    count += 1

                # dS K of the last tile, and out.
                mbarrier.arrive(q_empty.index(WARPGROUP), count=1)
                k_stage = count % K_STAGES
                k = k_shared.index(k_stage).reshape([BLOCK_N, BLOCK_D])
                d_q = warpgroup_mma(d_logits, k, d_q, is_async=True)
                d_q = warpgroup_mma_wait(0, deps=(d_q,))
                mbarrier.arrive(k_empty.index(k_stage), count=1)
                count += 1
                _store_d_q(acc_ptr, piece, d_q, BLOCK_D)
                if HAS_LOW:
                    count = _skip_tiles(own_begin - begin, count, barriers, K_STAGES, V_STAGES)


@gluon.jit(
    do_not_specialize=[
        "items", "tiles", "query_tiles", "query_length", "key_length", "heads", "kv_group", "low", "high", "stats_tiles",
    ]
)  # fmt: skip
def attention_backward_queries_kernel(
    q_desc, k_desc, v_desc, d_out_desc, stats_ptr, acc_ptr, table_ptr,
    items, tiles, query_tiles, query_length, key_length, heads, kv_group, scale_log2, low, high, stats_tiles, cap_scale,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STATS_ROWS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """dQ / scale to the accumulator, all of it: nothing need be there before.

    The descriptors see q, k, v, d_out as [B, H, S, D] in tiles of [1, 1, 64 or BLOCK_N, BLOCK_D]. Statistics are [B * Hq * stats_tiles, 2,
    STATS_ROWS] fp32 (lse * log2(e), then delta), the accumulator [B * Hq * stats_tiles, STATS_ROWS, BLOCK_D] fp32 in pieces of 64 rows.
    `table_ptr` [items, programs] has the tiles of each program (int32, -1 for none); it is not read without a band.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    q_shared = gl.allocate_shared_memory(DTYPE, boxes(2, q_desc.block_type.shape), q_desc.layout)
    d_out_shared = gl.allocate_shared_memory(DTYPE, boxes(2, d_out_desc.block_type.shape), d_out_desc.layout)
    k_shared = gl.allocate_shared_memory(DTYPE, boxes(K_STAGES, k_desc.block_type.shape), k_desc.layout)
    v_shared = gl.allocate_shared_memory(DTYPE, boxes(V_STAGES, v_desc.block_type.shape), v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(K_STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
    for i in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()

    descriptors = (q_desc, k_desc, v_desc, d_out_desc)
    buffers = (q_shared, k_shared, v_shared, d_out_shared)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    sizes = (items, tiles, query_tiles, query_length, key_length, heads, kv_group, low, high)
    gl.warp_specialize(
        [
            (_consume, (
                descriptors, buffers, barriers, stats_ptr, acc_ptr, table_ptr, scale_log2, cap_scale, stats_tiles, sizes,
                0, BLOCK_N, BLOCK_D, STATS_ROWS, K_STAGES, V_STAGES, HAS_LOW, HAS_HIGH, PACKED)),
            (_consume, (
                descriptors, buffers, barriers, stats_ptr, acc_ptr, table_ptr, scale_log2, cap_scale, stats_tiles, sizes,
                1, BLOCK_N, BLOCK_D, STATS_ROWS, K_STAGES, V_STAGES, HAS_LOW, HAS_HIGH, PACKED)),
            (_produce, (
                descriptors, buffers, barriers, table_ptr, sizes, BLOCK_N, BLOCK_D, K_STAGES, V_STAGES, HAS_LOW, HAS_HIGH, PACKED)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
