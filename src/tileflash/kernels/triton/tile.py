"""What the attention kernels share: matrix products of tiles, loads with optional edges, and the order of programs.

Names in kernels: S is a sequence length, D a head dimension; `i_` is an index, `b_` a tile in registers; each tile carries its shape
in a comment. `low` and `high` bound the band: query i sees key j where low <= j - i <= high.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# The small tiles in which rows are made once more that met something not finite. With options they have 32 keys, over which products
# sum: over 16, Triton 3.6 multiplies wrongly if bytes decide about the weights (`offline.narrow_products`). Without, 32 would spill.
PART_M = tl.constexpr(16)
PART_N = tl.constexpr(16)
PART_N_WITH_OPTIONS = tl.constexpr(32)


@triton.jit
def tile_dot(a, b, PRECISION: tl.constexpr):
    """a [M, K] @ b [K, N] accumulated in fp32. PRECISION "ieee" keeps fp32 inputs exact, "tf32" does not; "upcast" is for Triton's
    interpreter, whose dot multiplies the raw bits of bf16 (triton#11584)."""
    if PRECISION == "upcast":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def tile_dot_add(a, b, acc, PRECISION: tl.constexpr):
    """acc [M, N] + a [M, K] @ b [K, N], all in fp32 registers."""
    if PRECISION == "upcast":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def load_rows(
    base, i_row, begin, end, stride, D,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN_COLUMNS: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Rows i_row .. i_row + ROWS of a [S, D] matrix as [ROWS, COLUMNS]; with EDGE, rows outside [begin, end) read as 0, and columns
    beyond D always do.

    Rows that nobody sees must be read as 0 and not merely be masked later: 0 * NaN is NaN. The first row's offset is 64-bit, for
    one head may span more than 2^31 elements; inside a tile 32 bits do.
    """
    i_rows = tl.arange(0, ROWS)
    i_columns = tl.arange(0, COLUMNS)
    pointers = base + tl.cast(i_row, tl.int64) * stride + (i_rows[:, None] * stride + i_columns[None, :])
    if EDGE:
        inside = ((i_row + i_rows >= begin) & (i_row + i_rows < end))[:, None]
        if EVEN_COLUMNS:
            return tl.load(pointers, mask=inside, other=0.0)
        return tl.load(pointers, mask=inside & (i_columns < D)[None, :], other=0.0)
    if EVEN_COLUMNS:
        return tl.load(pointers)
    return tl.load(pointers, mask=(i_columns < D)[None, :], other=0.0)


@triton.jit
def in_band(inside, i_query, i_key, low, high, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr):
    """`inside` and within the band; positions broadcast ([M, 1] and [1, N], or the other way round)."""
    visible = inside
    if HAS_LOW:
        visible = visible & (i_key - i_query >= low)
    if HAS_HIGH:
        visible = visible & (i_key - i_query <= high)
    return visible


@triton.jit
def poison_unreadable(b_p, b_v, visible):
    """(weights, values) whose product keeps NaN and Inf of a value from the rows that do not see its key: 0 * NaN is NaN.

    Values that are not finite are read as 0, and rows that see their key get a weight that is NaN.
    """
    readable = is_finite(b_v)  # [BLOCK_N, BLOCK_DV]
    b_v = tl.where(readable, b_v, 0.0)
    unreadable = tl.max(tl.where(readable, 0, 1), 1)  # [BLOCK_N]
    return tl.where(visible & (unreadable != 0)[None, :], float("nan"), b_p), b_v


@triton.jit
def finite_or_zero(tile):
    """The tile with 0 for NaN and Inf, for where a weight of 0 stands for a key that is hidden."""
    return tl.where(is_finite(tile), tile, 0.0)


@triton.jit
def is_finite(tile):
    """Neither NaN nor Inf. In fp32, for the interpreter does not calculate with bf16 but with its bits."""
    tile = tile.to(tl.float32)
    return tile - tile == 0.0


@triton.jit
def store_rows(base, tile, i_row, S, stride, D, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Writes a [ROWS, COLUMNS] tile to rows i_row .. of a [S, D] matrix in the matrix's dtype; what lies outside is left alone."""
    i_rows = tl.arange(0, ROWS)
    i_columns = tl.arange(0, COLUMNS)
    pointers = base + tl.cast(i_row, tl.int64) * stride + (i_rows[:, None] * stride + i_columns[None, :])
    mask = (i_row + i_rows < S)[:, None] & (i_columns < D)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def query_tile(program, query_length, batch_heads, head_group, BLOCK_M: tl.constexpr):
    """The query tile of a program: (first row, batch * heads + head).

    Programs run through the heads in groups whose K and V fit the L2 cache together; inside a group the last rows of all its heads
    come first, because under a causal mask they take longest.
    """
    tiles = tl.cdiv(query_length, BLOCK_M)
    group = program // (head_group * tiles)
    group_size = tl.minimum(head_group, batch_heads - group * head_group)
    within = program - group * head_group * tiles
    return (tiles - 1 - within // group_size) * BLOCK_M, group * head_group + within % group_size


@triton.jit
def visible_range(
    i_own, own_length, other_length, low, high,
    BLOCK_OWN: tl.constexpr, BLOCK_OTHER: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr,
):  # fmt: skip
    """What a tile of rows sees of the other side, where row i sees low <= j - i <= high: (begin, full_begin, full_end, end).

    Some row sees a j of [begin, end); all rows see all of [full_begin, full_end), which is whole tiles of BLOCK_OTHER. full_begin
    and full_end are multiples of it unless the ranges beside them are empty. A tile of queries asks for keys with the band's own
    bounds, a tile of keys for queries with -high and -low: i - j is bounded where j - i is.
    """
    begin = 0
    end = other_length
    full_begin = 0
    full_end = other_length // BLOCK_OTHER * BLOCK_OTHER
    if HAS_LOW:
        begin = tl.maximum(0, i_own + low)
        full_begin = tl.cdiv(tl.maximum(0, i_own + BLOCK_OWN - 1 + low), BLOCK_OTHER) * BLOCK_OTHER
    if HAS_HIGH:
        end = tl.minimum(other_length, tl.minimum(i_own + BLOCK_OWN, own_length) + high)
        full_end = tl.minimum(full_end, tl.maximum(0, i_own + high + 1) // BLOCK_OTHER * BLOCK_OTHER)
    full_begin = tl.minimum(full_begin, tl.maximum(end, 0))
    full_end = tl.maximum(full_end, full_begin)
    return begin, full_begin, full_end, end
