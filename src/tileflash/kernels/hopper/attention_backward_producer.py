"""The producer warp of both backward kernels, and where their tiles lie.

A program owns KEYS keys of one K/V head. Its producer fetches K and V once, then Q, dO and their statistics (lse, delta) of every tile of
queries that sees a key, of one query head of the group after the other.

K, V, Q and dO lie in one array of tiles, and all barriers in another: a consumer that is no default partition gets an array's address in
a register and knows nothing of it, so with an array for each the addresses alone would fill its uniform registers.
"""

from tileflash.kernels.compat_gluon import fence_async_shared, gl, gluon, mbarrier, reinterpret, tma_load
from tileflash.kernels.hopper.tile import packed_entry, rows_at, scheduled_tile, visible_tiles

# Places in the array of barriers. From FIRST_STAGE on: Q and statistics have come, by stage; dO has come; the stage is free again.
K_FULL = gl.constexpr(0)
V_FULL = gl.constexpr(1)
KV_EMPTY = gl.constexpr(2)
FIRST_STAGE = gl.constexpr(3)


@gluon.jit
def make_barriers(STAGES: gl.constexpr):
    """The barriers between the producer and the two consumers."""
    barriers = gl.allocate_shared_memory(gl.int64, [FIRST_STAGE + 3 * STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(barriers.index(K_FULL), count=1)
    mbarrier.init(barriers.index(V_FULL), count=1)
    mbarrier.init(barriers.index(KV_EMPTY), count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(barriers.index(FIRST_STAGE + stage), count=1)
        mbarrier.init(barriers.index(FIRST_STAGE + STAGES + stage), count=1)
        mbarrier.init(barriers.index(FIRST_STAGE + 2 * STAGES + stage), count=2)
    fence_async_shared()
    return barriers


@gluon.jit
def query_tiles_of(
    tile, table_ptr, sizes,
    KEYS: gl.constexpr, BLOCK_M: gl.constexpr, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Of a tile of keys: its first key, batch * kv_heads + kv_head, the tiles of queries [begin, end) that see it; and of its batch entry
    or packed sequence: number of queries, of keys, band, first query, first key, the statistics' tile of its first queries."""
    _, _, key_blocks, _, query_length, key_length, _, _, low, high = sizes
    if PACKED:
        first, q_begin, queries, k_begin, keys, low_here, high_here, stats_tile = packed_entry(
            table_ptr, tile % key_blocks
        )
        last = gl.minimum(first + KEYS, keys) - 1
        begin, end = visible_tiles(first, last, queries, -high_here, -low_here, BLOCK_M, HAS_HIGH, HAS_LOW)
        return first, tile // key_blocks, begin, end, queries, keys, low_here, high_here, q_begin, k_begin, stats_tile
    else:
        first = tile % key_blocks * KEYS
        last = gl.minimum(first + KEYS, key_length) - 1
        begin, end = visible_tiles(first, last, query_length, -high, -low, BLOCK_M, HAS_HIGH, HAS_LOW)
        return first, tile // key_blocks, begin, end, query_length, key_length, low, high, 0, 0, 0


@gluon.jit
def only_tile(table_ptr, sizes, HAS_HIGH: gl.constexpr, PACKED: gl.constexpr):
    """The tile of a program that has one, or -1 (a packed slot without one). With a band the first keys are seen by most queries: their
    tiles start first, those of as many heads together as share the L2 cache (which `items` says here).
    """
    place = gl.program_id(0)
    if PACKED:
        return scheduled_tile(table_ptr, 0, sizes, True, True)
    elif HAS_HIGH:
        items, tiles, key_blocks = sizes[0], sizes[1], sizes[2]
        group = place // (items * key_blocks)
        together = gl.minimum(items, tiles // key_blocks - group * items)
        within = place - group * items * key_blocks
        return (group * items + within % together) * key_blocks + within // together
    else:
        return place


@gluon.jit
def _produce_tile(
    tile, item, count, descriptors, shared, table_ptr, sizes,
    KEYS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """One tile of keys and all that sees it. Returns the count of tiles of queries so far."""
    q_desc, k_desc, v_desc, d_out_desc, stats_desc, _, _, _ = descriptors
    tiles, stats_shared, barriers = shared
    PARTS: gl.constexpr = KEYS // BLOCK_M  # tiles that K and V take each
    query_tiles, kv_heads, kv_group = sizes[3], sizes[6], sizes[7]
    first, batch_kv_head, begin, end, queries, keys, _, _, q_begin, k_begin, stats_tile = query_tiles_of(
        tile, table_ptr, sizes, KEYS, BLOCK_M, HAS_LOW, HAS_HIGH, PACKED
    )
    batch = batch_kv_head // kv_heads
    kv_head = batch_kv_head % kv_heads
    mbarrier.wait(barriers.index(KV_EMPTY), (item & 1) ^ 1)
    mbarrier.expect(barriers.index(K_FULL), KEYS * BLOCK_D * 2)
    for part in gl.static_range(PARTS):
        k_at = rows_at(batch, kv_head, first + part * BLOCK_M, 0, k_begin, keys, PACKED)
        tma_load(k_desc, k_at, barriers.index(K_FULL), tiles.index(part))
    for member in range(kv_group):
        head = kv_head * kv_group + member
        stats_row = (batch * kv_heads * kv_group + head) * query_tiles + stats_tile
        for i_tile in range(begin, end):
            stage = count % STAGES
            q_full = barriers.index(FIRST_STAGE + stage)
            d_out_full = barriers.index(FIRST_STAGE + STAGES + stage)
            mbarrier.wait(barriers.index(FIRST_STAGE + 2 * STAGES + stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(q_full, BLOCK_M * BLOCK_D * 2 + 2 * BLOCK_M * 4)
            q_at = rows_at(batch, head, i_tile * BLOCK_M, 0, q_begin, queries, PACKED)
            tma_load(q_desc, q_at, q_full, tiles.index(2 * PARTS + stage))
            stats_at = [stats_row + i_tile, 0]
            tma_load(stats_desc, stats_at, q_full, stats_shared.index(stage))
            if (member == 0) & (i_tile == begin):  # V is wanted after the first Q
                mbarrier.expect(barriers.index(V_FULL), KEYS * BLOCK_D * 2)
                for part in gl.static_range(PARTS):
                    v_at = rows_at(batch, kv_head, first + part * BLOCK_M, 0, k_begin, keys, PACKED)
                    tma_load(v_desc, v_at, barriers.index(V_FULL), tiles.index(PARTS + part))
            mbarrier.expect(d_out_full, BLOCK_M * BLOCK_D * 2)
            tma_load(d_out_desc, q_at, d_out_full, tiles.index(2 * PARTS + STAGES + stage))
            count += 1
    return count


@gluon.jit
def produce(
    descriptors, shared, table_ptr, sizes,
    KEYS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, PERSISTENT: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """The producer warp."""
    if PERSISTENT:
        count = 0
        for item in range(sizes[0]):
            tile = scheduled_tile(table_ptr, item, sizes, True, PACKED)
            if tile >= 0:
                count = _produce_tile(
                    tile, item, count, descriptors, shared, table_ptr, sizes,
                    KEYS, BLOCK_M, BLOCK_D, STAGES, HAS_LOW, HAS_HIGH, PACKED,
                )  # fmt: skip
    else:
        nothing_yet = gl.to_tensor(0)
        tile = only_tile(table_ptr, sizes, HAS_HIGH, PACKED)
        if PACKED:
            if tile >= 0:
                _produce_tile(
                    tile, 0, nothing_yet, descriptors, shared, table_ptr, sizes,
                    KEYS, BLOCK_M, BLOCK_D, STAGES, HAS_LOW, HAS_HIGH, PACKED,
                )  # fmt: skip
        else:
            _produce_tile(
                tile, 0, nothing_yet, descriptors, shared, table_ptr, sizes,
                KEYS, BLOCK_M, BLOCK_D, STAGES, HAS_LOW, HAS_HIGH, PACKED,
            )  # fmt: skip


@gluon.jit
def load_statistics(stats_shared, stage, WHICH: gl.constexpr, BLOCK_M: gl.constexpr, COLUMNS: gl.constexpr):
    """lse * log2(e) (WHICH = 0) or delta (1) of a tile's queries, which are the columns of the transposed logits: [BLOCK_M]. Where
    BLOCK_M is half a tile, WHICH is 0 and 1 for the halves of the one, 2 and 3 for those of the other."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PARTS: gl.constexpr = stats_shared.shape[2] // BLOCK_M
    return reinterpret(stats_shared.index(stage), gl.float32, [PARTS, BLOCK_M], FLAT).index(WHICH).load(COLUMNS)
