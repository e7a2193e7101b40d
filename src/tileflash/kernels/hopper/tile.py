"""What the Hopper kernels share: which tiles the band lets see each other, masks, and the walk through the schedule.

Query i sees key j where low <= j - i <= high. The launcher has cut off the rows that see nothing and the keys that nobody sees, so
every query of a problem sees a key and every key is seen.
"""

from tileflash.kernels.compat_gluon import gl, gluon

# Integers that packed_tiles.py writes for a slot.
ENTRY = gl.constexpr(8)
# Where packed rows end for a descriptor; see `rows_at`.
RAGGED_END = gl.constexpr(2**30)
LN_2 = gl.constexpr(0.6931471805599453)
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.constexpr_function
def boxes(count, shape):
    """The shape of `count` pieces of what a descriptor moves."""
    return [count, *shape]


@gluon.jit
def scheduled_tile(table_ptr, item, sizes, HAS_TABLE: gl.constexpr, PACKED: gl.constexpr):
    """The tile that this program works on as its `item`-th, or -1. Without a table tiles are dealt out in turn.

    `sizes` begins with items, tiles and the tiles of a head. Packed sequences have a program for each slot of each head, and a table of
    slots (packed_tiles.py), of which some have no tile.
    """
    items, tiles, slots = sizes[0], sizes[1], sizes[2]
    place = item * gl.num_programs(0) + gl.program_id(0)
    if PACKED:
        first = gl.load(table_ptr + place % slots * ENTRY, mask=place < tiles, other=-1)
        return gl.where(first >= 0, place, -1)
    elif HAS_TABLE:
        return gl.load(table_ptr + place, mask=item < items, other=-1)
    else:
        return gl.where(place < tiles, place, -1)


@gluon.jit
def packed_entry(table_ptr, slot):
    """What packed_tiles.py wrote of a slot: first row of the tile, and of its sequence (first query, queries, first key, keys, low, high,
    tile of the statistics). Rows and keys are those that see something."""
    entry = table_ptr + slot * ENTRY
    return (
        gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3), gl.load(entry + 4), gl.load(entry + 5),
        gl.load(entry + 6), gl.load(entry + 7),
    )  # fmt: skip


@gluon.jit
def rows_at(batch, head, row, column, begin, length, PACKED: gl.constexpr):
    """Where a descriptor finds rows from `row` on: of a batch entry, or of a packed sequence of `length` rows from row `begin` on.

    The descriptor of packed rows has two dimensions more, whose strides add up to 2^64 (as in triton.tools.ragged_tma): so that it ends
    where the sequence ends, rows beyond are read as 0 and not written.
    """
    if PACKED:
        return RAGGED_END, begin + length, head, RAGGED_END - length + row, column
    else:
        return batch, head, row, column


@gluon.jit
def visible_tiles(
    first, last, other_length, low, high, BLOCK: gl.constexpr, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr
):
    """The tiles [begin, end) of BLOCK rows of the other side that some row of first .. last sees, where row i sees low <= j - i <= high.

    Queries ask for keys with the band's own bounds, keys for queries with -high and -low.
    """
    begin = 0
    end = gl.cdiv(other_length, BLOCK)
    if HAS_LOW:
        begin = gl.maximum(first + low, 0) // BLOCK
    if HAS_HIGH:
        end = gl.cdiv(gl.minimum(last + high + 1, other_length), BLOCK)
    return begin, end


@gluon.jit
def unmasked_tiles(
    first, last, other_length, low, high, begin, end, BLOCK: gl.constexpr, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr
):
    """Of the tiles [begin, end), those whose rows are all there and are all seen by all of first .. last: a range inside it."""
    full_begin = begin
    full_end = gl.minimum(end, other_length // BLOCK)
    if HAS_LOW:
        full_begin = gl.minimum(gl.cdiv(gl.maximum(last + low, 0), BLOCK), end)
    if HAS_HIGH:
        full_end = gl.minimum(full_end, gl.maximum(first + high + 1, 0) // BLOCK)
    return full_begin, gl.maximum(full_end, full_begin)


@gluon.jit
def mask_logits(logits, i_columns, first, last, HAS_FIRST: gl.constexpr, HAS_LAST: gl.constexpr):
    """-inf outside columns first .. last of each row. `i_columns` [N]; `first` and `last` [M], so that an element costs one comparison with
    a register for each bound."""
    if HAS_FIRST and HAS_LAST:
        visible = (i_columns[None, :] >= first[:, None]) & (i_columns[None, :] <= last[:, None])
    elif HAS_FIRST:
        visible = i_columns[None, :] >= first[:, None]
    else:
        visible = i_columns[None, :] <= last[:, None]
    return gl.where(visible, logits, float("-inf"))


@gluon.jit
def locate_queries(tile, table_ptr, sizes, BLOCK_M: gl.constexpr, PACKED: gl.constexpr):
    """Of a tile of queries: first and last row, batch, head, K/V head; and of its batch entry or packed sequence: its length, the number of
    keys, the band, first query, first key, tile of the statistics."""
    _, _, query_tiles, query_length, key_length, heads, kv_group, low, high = sizes
    if PACKED:
        head = tile // query_tiles
        first, q_begin, length, k_begin, keys, low_here, high_here, stats_tile = packed_entry(
            table_ptr, tile % query_tiles
        )
        last = gl.minimum(first + BLOCK_M, length) - 1
        return (
            first,
            last,
            gl.to_tensor(0),
            head,
            head // kv_group,
            length,
            keys,
            low_here,
            high_here,
            q_begin,
            k_begin,
            stats_tile,
        )
    else:
        first = tile % query_tiles * BLOCK_M
        batch_head = tile // query_tiles
        head = batch_head % heads
        last = gl.minimum(first + BLOCK_M, query_length) - 1
        return first, last, batch_head // heads, head, head // kv_group, query_length, key_length, low, high, 0, 0, 0


@gluon.jit
def mask_keys(logits, i_key, i_queries, key_length, low, high, BLOCK_N: gl.constexpr, HAS_LOW: gl.constexpr):
    """-inf in [64, BLOCK_N] logits where the query does not see the key."""
    i_keys = i_key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, logits.type.layout))
    last = gl.minimum(i_queries + high, key_length - 1)
    return mask_logits(logits, i_keys, i_queries + low, last, HAS_LOW, True)


@gluon.jit
def soft_capped(products, cap_scale):
    """(tanh(x), its derivative) of x = products * cap_scale, where cap_scale is the scale of the logits divided by the soft cap.

    By exp, for the hardware's tanh has 11 bits. Near 0 tanh is a series, where the formula with exp would cancel (a large cap multiplies
    that); far from it the derivative is not 1 - tanh^2, which would.
    """
    x = products * cap_scale
    size = gl.abs(x)
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315))))
    decay = gl.exp2(size * -2.8853900817779268)  # exp(-2 |x|): never overflows
    # A division would take eight instructions more.
    rest = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + decay], dtype=gl.float32, is_pure=True, pack=1
    )
    far = (1.0 - decay) * rest
    far = gl.where(x < 0.0, -far, far)
    return gl.where(size < 0.25, series, far), 4.0 * decay * rest * rest


@gluon.jit
def named_barrier_sync(BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """Wait until THREADS threads of the program have come to hardware barrier BARRIER. Triton itself uses the lower numbers."""
    gl.inline_asm_elementwise(
        "bar.sync $1, $2; mov.b32 $0, 0;", "=r,n,n", [BARRIER, THREADS], dtype=gl.int32, is_pure=False, pack=1
    )
