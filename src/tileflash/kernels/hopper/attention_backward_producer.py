"""The producer warp of both backward kernels, and where their tiles lie.

A program owns KEYS keys of one K/V head. Its producer fetches K and V once, then Q, dO and their statistics (lse, delta) of every tile of
queries that sees a key, of one query head of the group after the other.
"""

from tileflash.kernels.compat_gluon import gl, gluon, mbarrier, reinterpret, tma
from tileflash.kernels.hopper.tile import scheduled_tile, visible_tiles


@gluon.jit
def query_tiles_of(
    tile, sizes, KEYS: gl.constexpr, BLOCK_M: gl.constexpr, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr
):
    """First key of a tile, its batch * kv_heads + kv_head, and the tiles of queries [begin, end) that see it."""
    _, _, key_blocks, _, query_length, key_length, _, _, low, high = sizes
    first = tile % key_blocks * KEYS
    last = gl.minimum(first + KEYS, key_length) - 1
    begin, end = visible_tiles(first, last, query_length, -high, -low, BLOCK_M, HAS_HIGH, HAS_LOW)
    return first, tile // key_blocks, begin, end


@gluon.jit
def only_tile(sizes, HAS_HIGH: gl.constexpr):
    """The tile of a program that has one. With a band the first keys are seen by most queries: their tiles start first, those of as many
    heads together as share the L2 cache (which `items` says here).
    """
    place = gl.program_id(0)
    if HAS_HIGH:
        items, tiles, key_blocks = sizes[0], sizes[1], sizes[2]
        group = place // (items * key_blocks)
        together = gl.minimum(items, tiles // key_blocks - group * items)
        within = place - group * items * key_blocks
        return (group * items + within % together) * key_blocks + within // together
    else:
        return place


@gluon.jit
def _produce_tile(
    tile, item, count, descriptors, buffers, barriers, sizes,
    KEYS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr,
):  # fmt: skip
    """One tile of keys and all that sees it. Returns the count of tiles of queries so far."""
    q_desc, k_desc, v_desc, d_out_desc, stats_desc, _, _, _ = descriptors
    q_shared, k_shared, v_shared, d_out_shared, stats_shared = buffers
    k_full, v_full, kv_empty, q_full, d_out_full, stage_empty = barriers
    query_tiles, kv_heads, kv_group = sizes[3], sizes[6], sizes[7]
    first, batch_kv_head, begin, end = query_tiles_of(tile, sizes, KEYS, BLOCK_M, HAS_LOW, HAS_HIGH)
    batch = batch_kv_head // kv_heads
    kv_head = batch_kv_head % kv_heads
    mbarrier.wait(kv_empty.index(0), (item & 1) ^ 1)
    mbarrier.expect(k_full.index(0), KEYS * BLOCK_D * 2)
    for part in gl.static_range(KEYS // 64):
        k_at = [batch, kv_head, first + part * 64, 0]
        tma.async_copy_global_to_shared(k_desc, k_at, k_full.index(0), k_shared.index(part))
    for member in range(kv_group):
        head = kv_head * kv_group + member
        stats_row = (batch * kv_heads * kv_group + head) * query_tiles
        for i_tile in range(begin, end):
            stage = count % STAGES
            mbarrier.wait(stage_empty.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(q_full.index(stage), BLOCK_M * BLOCK_D * 2 + 2 * BLOCK_M * 4)
            q_at = [batch, head, i_tile * BLOCK_M, 0]
            tma.async_copy_global_to_shared(q_desc, q_at, q_full.index(stage), q_shared.index(stage))
            stats_at = [stats_row + i_tile, 0]
            tma.async_copy_global_to_shared(stats_desc, stats_at, q_full.index(stage), stats_shared.index(stage))
            if (member == 0) & (i_tile == begin):  # V is wanted after the first Q
                mbarrier.expect(v_full.index(0), KEYS * BLOCK_D * 2)
                for part in gl.static_range(KEYS // 64):
                    v_at = [batch, kv_head, first + part * 64, 0]
                    tma.async_copy_global_to_shared(v_desc, v_at, v_full.index(0), v_shared.index(part))
            mbarrier.expect(d_out_full.index(stage), BLOCK_M * BLOCK_D * 2)
            tma.async_copy_global_to_shared(d_out_desc, q_at, d_out_full.index(stage), d_out_shared.index(stage))
            count += 1
    return count


@gluon.jit
def produce(
    descriptors, buffers, barriers, table_ptr, sizes,
    KEYS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, PERSISTENT: gl.constexpr,
):  # fmt: skip
    """The producer warp."""
    items, tiles = sizes[0], sizes[1]
    if PERSISTENT:
        count = 0
        for item in range(items):
            tile = scheduled_tile(table_ptr, item, items, tiles, True)
            if tile >= 0:
                count = _produce_tile(
                    tile, item, count, descriptors, buffers, barriers, sizes, KEYS, BLOCK_M, BLOCK_D, STAGES, HAS_LOW, HAS_HIGH,
                )  # fmt: skip
    else:
        nothing_yet = gl.to_tensor(0)
        _produce_tile(
            only_tile(sizes, HAS_HIGH), 0, nothing_yet,
            descriptors, buffers, barriers, sizes, KEYS, BLOCK_M, BLOCK_D, STAGES, HAS_LOW, HAS_HIGH,
        )  # fmt: skip


@gluon.jit
def load_statistics(stats_shared, stage, WHICH: gl.constexpr, BLOCK_M: gl.constexpr, COLUMNS: gl.constexpr):
    """lse * log2(e) (WHICH = 0) or delta (1) of a tile's queries, which are the columns of the transposed logits: [BLOCK_M]. Where
    BLOCK_M is half a tile, WHICH is 0 and 1 for the halves of the one, 2 and 3 for those of the other."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PARTS: gl.constexpr = stats_shared.shape[2] // BLOCK_M
    return reinterpret(stats_shared.index(stage), gl.float32, [PARTS, BLOCK_M], FLAT).index(WHICH).load(COLUMNS)
