"""FlashAttention's forward pass for Hopper in Gluon, with the structure of FlashAttention 3 (Shah et al. 2024, sections 3.1 and 3.2).

A program is one producer warp, which fetches tiles by TMA, and two or three consumer warpgroups of 64 query rows each, which multiply by
wgmma straight from shared memory. In a consumer the product Q K^T of the next tile and P V of the tile before run on the tensor
cores while the softmax of the tile between them runs on the other units. P never leaves the registers. Programs are persistent: each
walks through its column of a table of tiles. docs/kernels/hopper.md draws the timeline.
"""

from tileflash.kernels.compat_gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tileflash.kernels.hopper.attention_forward_again import attend_again
from tileflash.kernels.hopper.tile import (
    LN_2,
    LOG2_E,
    boxes,
    locate_queries,
    mask_keys,
    rows_at,
    scheduled_tile,
    soft_capped,
    unmasked_tiles,
    visible_tiles,
)


@gluon.jit
def _produce(
    descriptors, buffers, barriers, table_ptr, sizes,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, WARPGROUPS: gl.constexpr,
    HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """The producer warp: K of a tile is fetched before V of the tile before it, as the consumers want them."""
    q_desc, k_desc, v_desc, _ = descriptors
    q_shared, k_shared, v_shared, _ = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    items = sizes[0]
    BLOCK_M: gl.constexpr = 64 * WARPGROUPS
    TILE_BYTES: gl.constexpr = BLOCK_N * BLOCK_D * 2
    count = 0  # of key tiles fetched so far: gives the stage and the phase of its barrier
    for item in range(items):
        tile = scheduled_tile(table_ptr, item, sizes, HAS_HIGH, PACKED)
        if tile >= 0:
            (
                first, last, batch, head, kv_head, query_length, key_length, low, high, q_begin, k_begin, _stats,
            ) = locate_queries(tile, table_ptr, sizes, BLOCK_M, PACKED)  # fmt: skip
            begin, end = visible_tiles(first, last, key_length, low, high, BLOCK_N, HAS_LOW, HAS_HIGH)
            stage = count % STAGES
            mbarrier.wait(k_empty.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(k_full.index(stage), TILE_BYTES)
            k_at = rows_at(batch, kv_head, (end - 1) * BLOCK_N, 0, k_begin, key_length, PACKED)
            tma_load(k_desc, k_at, k_full.index(stage), k_shared.index(stage))
            for warpgroup in gl.static_range(WARPGROUPS):
                mbarrier.wait(q_empty.index(warpgroup), (item & 1) ^ 1)
                mbarrier.expect(q_full.index(warpgroup), 64 * BLOCK_D * 2)
                q_at = rows_at(batch, head, first + warpgroup * 64, 0, q_begin, query_length, PACKED)
                tma_load(q_desc, q_at, q_full.index(warpgroup), q_shared.index(warpgroup))
            for i_tile in range(1, end - begin):
                next_stage = (count + 1) % STAGES
                mbarrier.wait(k_empty.index(next_stage), ((count + 1) // STAGES & 1) ^ 1)
                mbarrier.expect(k_full.index(next_stage), TILE_BYTES)
                k_at = rows_at(batch, kv_head, (end - 1 - i_tile) * BLOCK_N, 0, k_begin, key_length, PACKED)
                tma_load(k_desc, k_at, k_full.index(next_stage), k_shared.index(next_stage))
                stage = count % STAGES
                mbarrier.wait(v_empty.index(stage), (count // STAGES & 1) ^ 1)
                mbarrier.expect(v_full.index(stage), TILE_BYTES)
                v_at = rows_at(batch, kv_head, (end - i_tile) * BLOCK_N, 0, k_begin, key_length, PACKED)
                tma_load(v_desc, v_at, v_full.index(stage), v_shared.index(stage))
                count += 1
            stage = count % STAGES
            mbarrier.wait(v_empty.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(v_full.index(stage), TILE_BYTES)
            v_at = rows_at(batch, kv_head, begin * BLOCK_N, 0, k_begin, key_length, PACKED)
            tma_load(v_desc, v_at, v_full.index(stage), v_shared.index(stage))
            count += 1


@gluon.jit
def _skip_tiles(tiles, count, barriers, STAGES: gl.constexpr):
    """Hand back `tiles` key tiles that other warpgroups of the program want and this one does not see."""
    _, _, k_full, k_empty, v_full, v_empty = barriers
    for _i_tile in range(tiles):
        stage = count % STAGES
        phase = count // STAGES & 1
        mbarrier.wait(k_full.index(stage), phase)
        mbarrier.arrive(k_empty.index(stage), count=1)
        mbarrier.wait(v_full.index(stage), phase)
        mbarrier.arrive(v_empty.index(stage), count=1)
        count += 1
    return count


@gluon.jit
def _row_sums_in_threads(weights):
    """[64, N] summed within each thread to [64, 4]: the four threads that share a row are added up once, at the end."""
    ROWS: gl.constexpr = weights.shape[0]
    COLUMNS: gl.constexpr = weights.shape[1]
    return gl.sum(gl.sum(weights.reshape([ROWS, COLUMNS // 8, 4, 2]), 3), 1)


@gluon.jit
def _softmax_step(logits, row_max, scale_log2, MASKED: gl.constexpr):
    """Of logits [64, BLOCK_N] and the maximum so far: the new maximum, the factor for what was summed up with the old one, the weights."""
    new_max = gl.maximum(row_max, gl.max(logits, 1))  # [64]
    if MASKED:
        # A row that has seen nothing yet has the maximum -inf; subtracting it from -inf would be NaN.
        shift = gl.where(new_max == float("-inf"), 0.0, new_max * scale_log2)
        rescale = gl.exp2(row_max * scale_log2 - shift)
    else:
        shift = new_max * scale_log2
        rescale = gl.exp2((row_max - new_max) * scale_log2)
    return new_max, rescale, gl.exp2(logits * scale_log2 - shift[:, None])


@gluon.jit
def _with_sink(row_max, total, sink):
    """(lse, what one weight exp2(logit - row_max) is of the whole) where a key without a value has the logit `sink`, which may be larger
    or smaller than all others by any amount. row_max [64] is in base 2, total [64] relative to it."""
    sink *= LOG2_E
    largest = gl.maximum(row_max, sink)
    keep = gl.exp2(row_max - largest)
    total = total * keep + gl.exp2(sink - largest)
    return largest * LN_2 + gl.log(total), keep / total


@gluon.jit
def _consume(
    descriptors, buffers, barriers, table_ptr, lse_ptr, lse_stride, scale_log2, sizes, inputs, sinks_ptr, cap_scale,
    WARPGROUP: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, WARPGROUPS: gl.constexpr,
    HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, OUT_IN_Q: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: 64 query rows of every tile."""
    out_desc = descriptors[3]
    q_shared, k_shared, v_shared, out_shared = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    items, heads = sizes[0], sizes[5]
    DTYPE: gl.constexpr = out_desc.dtype
    BLOCK_M: gl.constexpr = 64 * WARPGROUPS
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    ROWS: gl.constexpr = gl.SliceLayout(1, LOGITS)
    q = q_shared.index(WARPGROUP).reshape([64, BLOCK_D])
    # NaN from the first tile on whose rows hold NaN: each thread looks at what it holds, and what it found is put together at the end.
    lost = _row_sums_in_threads(gl.zeros([64, BLOCK_D], gl.float32, OUT))
    count = 0
    next_tile = scheduled_tile(table_ptr, 0, sizes, HAS_HIGH, PACKED)
    for item in range(items):
        tile = next_tile
        next_tile = scheduled_tile(table_ptr, item + 1, sizes, HAS_HIGH, PACKED)
        if tile >= 0:
            (
                first, last, batch, head, _kv_head, query_length, key_length, low, high, q_begin, _k_begin, _stats,
            ) = locate_queries(tile, table_ptr, sizes, BLOCK_M, PACKED)  # fmt: skip
            begin, end = visible_tiles(first, last, key_length, low, high, BLOCK_N, HAS_LOW, HAS_HIGH)
            own_first = first + WARPGROUP * 64
            own_last = gl.minimum(own_first + 63, query_length - 1)
            if own_first >= query_length:
                count = _skip_tiles(end - begin, count, barriers, STAGES)
                mbarrier.wait(q_full.index(WARPGROUP), item & 1)
                mbarrier.arrive(q_empty.index(WARPGROUP), count=1)
            else:
                own_begin, own_end = visible_tiles(
                    own_first, own_last, key_length, low, high, BLOCK_N, HAS_LOW, HAS_HIGH
                )
                full_begin, full_end = unmasked_tiles(
                    own_first, own_last, key_length, low, high, own_begin, own_end, BLOCK_N, HAS_LOW, HAS_HIGH
                )
                if HAS_HIGH:
                    count = _skip_tiles(end - own_end, count, barriers, STAGES)

                # The first tile: nothing to rescale, and no V of a tile before.
                stage = count % STAGES
                mbarrier.wait(q_full.index(WARPGROUP), item & 1)
                mbarrier.wait(k_full.index(stage), count // STAGES & 1)
                k = k_shared.index(stage).reshape([BLOCK_N, BLOCK_D])
                no_logits = gl.zeros([64, BLOCK_N], gl.float32, LOGITS)
                logits = warpgroup_mma(q, k.permute((1, 0)), no_logits, use_acc=False, is_async=True)
                logits = warpgroup_mma_wait(0, deps=(logits,))  # [64, BLOCK_N]
                mbarrier.arrive(k_empty.index(stage), count=1)
                if cap_scale is not None:
                    logits, _derivative = soft_capped(logits, cap_scale)
                i_queries = own_first + gl.arange(0, 64, layout=ROWS)
                i_key = (own_end - 1) * BLOCK_N
                if HAS_HIGH:
                    if (own_end > full_end) | (own_end <= full_begin):
                        logits = mask_keys(logits, i_key, i_queries, key_length, low, high, BLOCK_N, HAS_LOW)
                row_max = gl.full([64], float("-inf"), gl.float32, ROWS)
                row_max, rescale, fp32_weights = _softmax_step(logits, row_max, scale_log2, HAS_HIGH)
                row_sum = _row_sums_in_threads(fp32_weights)
                weights = gl.convert_layout(fp32_weights.to(DTYPE), WEIGHTS)
                acc = gl.zeros([64, BLOCK_D], gl.float32, OUT)
                after = count + 1
                mbarrier.wait(k_full.index(after % STAGES), after // STAGES & 1, pred=own_end - own_begin > 1)

                # The others, downwards. On entry to a step the weights of the tile before are still to be multiplied with its V, and K
                # of this tile has arrived.
                for i_tile in range(1, own_end - own_begin):
                    stage = count % STAGES
                    next_stage = (count + 1) % STAGES
                    k = k_shared.index(next_stage).reshape([BLOCK_N, BLOCK_D])
                    v = v_shared.index(stage).reshape([BLOCK_N, BLOCK_D])
                    logits = warpgroup_mma(q, k.permute((1, 0)), no_logits, use_acc=False, is_async=True)
                    mbarrier.wait(v_full.index(stage), count // STAGES & 1)
                    acc = warpgroup_mma(weights, v, acc, is_async=True)  # [64, BLOCK_D]
                    logits = warpgroup_mma_wait(1, deps=(logits,))
                    mbarrier.arrive(k_empty.index(next_stage), count=1)
                    if cap_scale is not None:
                        logits, _derivative = soft_capped(logits, cap_scale)
                    if HAS_HIGH:
                        key_tile = own_end - 1 - i_tile
                        if (key_tile >= full_end) | (key_tile < full_begin):
                            i_key = key_tile * BLOCK_N
                            logits = mask_keys(logits, i_key, i_queries, key_length, low, high, BLOCK_N, HAS_LOW)
                    row_max, rescale, fp32_weights = _softmax_step(logits, row_max, scale_log2, HAS_HIGH)
                    sums = _row_sums_in_threads(fp32_weights)
                    row_sum = (
                        row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout))[:, None] + sums
                    )
                    # The assembler moves a wait for wgmma as far up as it can, here above the exponentials, and the overlap is gone. A
                    # wait for an mbarrier ends the basic block, and what the softmax made passes through the wait for wgmma: so
                    # that comes after it.
                    after = count + 2
                    more = i_tile + 1 < own_end - own_begin
                    mbarrier.wait(k_full.index(after % STAGES), after // STAGES & 1, pred=more)
                    acc, fp32_weights, row_sum = warpgroup_mma_wait(0, deps=(acc, fp32_weights, row_sum))
                    mbarrier.arrive(v_empty.index(stage), count=1)
                    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, OUT))[:, None]
                    weights = gl.convert_layout(fp32_weights.to(DTYPE), WEIGHTS)  # renames registers, moves nothing
                    count += 1

                # V of the last tile, and out.
                if not OUT_IN_Q:
                    mbarrier.arrive(q_empty.index(WARPGROUP), count=1)
                stage = count % STAGES
                mbarrier.wait(v_full.index(stage), count // STAGES & 1)
                v = v_shared.index(stage).reshape([BLOCK_N, BLOCK_D])
                acc = warpgroup_mma(weights, v, acc, is_async=True)
                total = gl.convert_layout(gl.sum(row_sum, 1), ROWS)
                if sinks_ptr is not None:
                    lse, share = _with_sink(row_max * scale_log2, total, gl.load(sinks_ptr + head))
                else:
                    lse = row_max * (scale_log2 * LN_2) + gl.log(total)
                lse_row = lse_ptr + (batch * heads + head).to(gl.int64) * lse_stride + q_begin
                gl.store(lse_row + i_queries, lse, mask=i_queries < query_length)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(v_empty.index(stage), count=1)
                if sinks_ptr is None:
                    share = 1.0 / total
                acc = acc * gl.convert_layout(share, gl.SliceLayout(1, OUT))[:, None]
                if HAS_HIGH:
                    lost += _row_sums_in_threads(acc) * 0.0
                out = out_shared.index(WARPGROUP)
                if not OUT_IN_Q:
                    tma_store_wait(0)  # the tile before may still be leaving
                out.reshape([64, BLOCK_D]).store(acc.to(DTYPE))
                fence_async_shared()
                tma_store(out_desc, rows_at(batch, head, own_first, 0, q_begin, query_length, PACKED), out)
                if OUT_IN_Q:
                    tma_store_wait(0)
                    mbarrier.arrive(q_empty.index(WARPGROUP), count=1)
                count += 1
                if HAS_LOW:
                    count = _skip_tiles(own_begin - begin, count, barriers, STAGES)
    if HAS_HIGH:
        found = gl.sum(gl.sum(lost, 1), 0)
        if found != found:
            for item in range(items):
                tile = scheduled_tile(table_ptr, item, sizes, HAS_HIGH, PACKED)
                (
                    first, _last, batch, head, kv_head, query_length, key_length, low, high, q_begin, k_begin, _stats,
                ) = locate_queries(tile, table_ptr, sizes, BLOCK_M, PACKED)  # fmt: skip
                own_first = first + WARPGROUP * 64
                if (tile >= 0) & (own_first < query_length):
                    out = out_shared.index(WARPGROUP)
                    tma_store_wait(0)
                    attend_again(
                        out.reshape([64, BLOCK_D]), inputs, batch, head, kv_head, q_begin, k_begin, own_first, query_length, key_length,
                        low, high, scale_log2, sinks_ptr, cap_scale, HAS_LOW, BLOCK_D,
                    )  # fmt: skip
                    fence_async_shared()
                    tma_store(out_desc, rows_at(batch, head, own_first, 0, q_begin, query_length, PACKED), out)
    tma_store_wait(0)


# Lengths and counts are not specialised: a new length must not mean a new compilation.
@gluon.jit(
    do_not_specialize=[
        "lse_stride", "items", "tiles", "query_tiles", "query_length", "key_length", "heads", "kv_group", "low", "high",
        "q_batch", "q_row", "q_head", "k_batch", "k_row", "k_head", "v_batch", "v_row", "v_head", "D", "DV",
    ],
    do_not_specialize_on_alignment=["lse_ptr"],  # which may begin at any row
)  # fmt: skip
def attention_forward_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, table_ptr, q_ptr, k_ptr, v_ptr, sinks_ptr,
    lse_stride, items, tiles, query_tiles, query_length, key_length, heads, kv_group, scale_log2, low, high,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, D, DV, cap_scale,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, WARPGROUPS: gl.constexpr,
    HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, OUT_IN_Q: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """out [B, Sq, Hq, Dv] and lse [B, Hq, Sq] (fp32, natural logarithm) of q [B, Sq, Hq, D], k [B, Sk, Hq // kv_group, D], v likewise.

    The descriptors see the tensors as [B, H, S, D] in tiles of [1, 1, 64 or BLOCK_N, BLOCK_D]; what lies outside is read as 0 and not
    written. `table_ptr` [items, programs] has the tiles of each program (int32, -1 for none); it is not read without a band. The
    pointers to q, k and v, their strides and head dimensions are for rows that are made again. `sinks_ptr` [Hq] fp32 may be None. So
    may `cap_scale`: with a soft cap it is scale / cap, and `scale_log2` is cap * log2(e). PACKED sequences have descriptors of five
    dimensions (`rows_at`), slots for tiles of a head, a program for each, and in `table_ptr` what packed_tiles.py makes of cu_seqlens.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    q_shared = gl.allocate_shared_memory(DTYPE, boxes(WARPGROUPS, q_desc.block_type.shape), q_desc.layout)
    k_shared = gl.allocate_shared_memory(DTYPE, boxes(STAGES, k_desc.block_type.shape), k_desc.layout)
    v_shared = gl.allocate_shared_memory(DTYPE, boxes(STAGES, k_desc.block_type.shape), v_desc.layout)
    if OUT_IN_Q:
        out_shared = q_shared
    else:
        out_shared = gl.allocate_shared_memory(DTYPE, boxes(WARPGROUPS, q_desc.block_type.shape), out_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(WARPGROUPS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=WARPGROUPS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=WARPGROUPS)
    fence_async_shared()

    descriptors = (q_desc, k_desc, v_desc, out_desc)
    buffers = (q_shared, k_shared, v_shared, out_shared)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    sizes = (items, tiles, query_tiles, query_length, key_length, heads, kv_group, low, high)
    inputs = (
        (q_batch, q_row, q_head), (k_batch, k_row, k_head), (v_batch, v_row, v_head), q_ptr, k_ptr, v_ptr, D, DV,
    )  # fmt: skip
    # The tuples of arguments stand inside the call: constants in a tuple that has a name stop being constants.
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (
                    descriptors, buffers, barriers, table_ptr, lse_ptr, lse_stride, scale_log2, sizes, inputs, sinks_ptr, cap_scale,
                    0, BLOCK_N, BLOCK_D, STAGES, WARPGROUPS, HAS_LOW, HAS_HIGH, OUT_IN_Q, PACKED)),
                (_consume, (
                    descriptors, buffers, barriers, table_ptr, lse_ptr, lse_stride, scale_log2, sizes, inputs, sinks_ptr, cap_scale,
                    1, BLOCK_N, BLOCK_D, STAGES, WARPGROUPS, HAS_LOW, HAS_HIGH, OUT_IN_Q, PACKED)),
                (_produce, (
                    descriptors, buffers, barriers, table_ptr, sizes,
                    BLOCK_N, BLOCK_D, STAGES, WARPGROUPS, HAS_LOW, HAS_HIGH, PACKED)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    descriptors, buffers, barriers, table_ptr, lse_ptr, lse_stride, scale_log2, sizes, inputs, sinks_ptr, cap_scale,
                    0, BLOCK_N, BLOCK_D, STAGES, WARPGROUPS, HAS_LOW, HAS_HIGH, OUT_IN_Q, PACKED)),
                (_consume, (
                    descriptors, buffers, barriers, table_ptr, lse_ptr, lse_stride, scale_log2, sizes, inputs, sinks_ptr, cap_scale,
                    1, BLOCK_N, BLOCK_D, STAGES, WARPGROUPS, HAS_LOW, HAS_HIGH, OUT_IN_Q, PACKED)),
                (_consume, (
                    descriptors, buffers, barriers, table_ptr, lse_ptr, lse_stride, scale_log2, sizes, inputs, sinks_ptr, cap_scale,
                    2, BLOCK_N, BLOCK_D, STAGES, WARPGROUPS, HAS_LOW, HAS_HIGH, OUT_IN_Q, PACKED)),
                (_produce, (
                    descriptors, buffers, barriers, table_ptr, sizes,
                    BLOCK_N, BLOCK_D, STAGES, WARPGROUPS, HAS_LOW, HAS_HIGH, PACKED)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
