"""What the options of attention do to a tile of logits. A kernel without options compiles as if this file were not there.

FEATURES says at compile time which options are on, as a sum of the bits below. Their operands travel in two tuples:

    bias     (pointer, its strides by batch, head, query, key, its last query and key)
    extras   (see `operands`)

Positions come as columns and rows that broadcast: i_query [M, 1] with i_key [1, N], or [1, M] with [N, 1] in the kernel that works on
transposed tiles.
"""

import triton
import triton.language as tl

from tileflash.kernels.triton.tile import LOG2_E

ALIBI = tl.constexpr(1)
SOFTCAP = tl.constexpr(2)
BIAS = tl.constexpr(4)  # additive; -inf hides
MASK = tl.constexpr(8)  # bool: True is visible
DOCUMENTS = tl.constexpr(16)
PREFIX = tl.constexpr(32)
SINKS = tl.constexpr(64)
DROPOUT = tl.constexpr(128)
VARLEN = tl.constexpr(256)
ANY_SCALE = tl.constexpr(512)  # a scale that is not positive: the maximum of the logits is not that of the products

# The logits are made explicitly, rather than the scale being folded into exp2's argument.
EXPLICIT = tl.constexpr(1 | 2 | 4 | 512)
# Any tile may have a key hidden from a row: there are no full tiles.
HIDING = tl.constexpr(4 | 8 | 16 | 32)


@triton.jit
def tanh(x):
    """(tanh, its derivative), each with a relative error of a few roundings.

    Near 0 tanh is a series, where the formula with exp would cancel; far from it the derivative is not 1 - tanh^2, which would.
    """
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315))))
    rest = 1.0 / (
        1.0 + tl.exp(2.0 * tl.abs(x))
    )  # (1 - |tanh|) / 2; exp overflows to inf for large x, which gives 0 as it should
    far = 1.0 - 2.0 * rest
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0.0, -far, far)), 4.0 * rest * (1.0 - rest)


@triton.jit
def operands(bias, extras, sequence, head, heads, shift, query_begin, key_begin, FEATURES: tl.constexpr):
    """What the functions below need of the options, for one head of one sequence.

    `shift` is the key position at which query 0 stands; `query_begin` and `key_begin` are where a packed sequence starts (else 0).
    """
    bias_base = 0
    slope = 0.0
    sink = 0.0
    seed = 0
    offset = 0
    stream = 0
    query_ids = 0
    key_ids = 0
    prefix = 0
    stride_bias_query = 0
    stride_bias_key = 0
    bias_last_query = 0
    bias_last_key = 0
    softcap = 1.0
    drop_below = 0
    keep_scale = 1.0
    if FEATURES != 0:
        (
            slopes_ptr, sinks_ptr, rng_ptr, query_ids_ptr, key_ids_ptr, prefix_ptr, _cu_q, _cu_k,
            stride_slopes, stride_query_ids, stride_key_ids, _sequences, _steps, _total_q, _total_k,
            softcap, drop_below, keep_scale, _top_left,
        ) = extras  # fmt: skip
        if ALIBI & FEATURES:
            slope = tl.load(slopes_ptr + sequence * stride_slopes + head).to(tl.float32)
        if (BIAS & FEATURES) | (MASK & FEATURES):
            (
                bias_ptr, stride_bias_batch, stride_bias_head, stride_bias_query, stride_bias_key, bias_last_query, bias_last_key,
            ) = bias  # fmt: skip
            bias_base = (
                bias_ptr + tl.cast(sequence, tl.int64) * stride_bias_batch + tl.cast(head, tl.int64) * stride_bias_head
            )
        if SINKS & FEATURES:
            sink = tl.load(sinks_ptr + head).to(tl.float32)
        if DROPOUT & FEATURES:
            seed = tl.load(rng_ptr)
            offset = tl.load(rng_ptr + 1)
            # Philox has room for 32 bits of the offset in its counter; the others change the key.
            seed = seed ^ (offset >> 32 << 32)
            offset = offset.to(tl.int32)
            stream = (sequence * heads + head).to(tl.int32)
        if DOCUMENTS & FEATURES:
            query_ids = query_ids_ptr + sequence * stride_query_ids + query_begin
            key_ids = key_ids_ptr + sequence * stride_key_ids + key_begin
        if PREFIX & FEATURES:
            prefix = tl.load(prefix_ptr + sequence)
    return (
        bias_base, stride_bias_query, stride_bias_key, slope, sink, seed, offset, stream, query_ids, key_ids, prefix,
        softcap, drop_below, keep_scale, shift, bias_last_query, bias_last_key,
    )  # fmt: skip


@triton.jit
def sink_of(operands):
    """The sink's logit of this head."""
    return operands[4]


@triton.jit
def prefix_of(operands):
    """How many keys at the beginning every query sees."""
    return operands[10]


@triton.jit
def keep_scale_of(operands):
    """What dropout multiplies the weights by that it keeps: 1 / (1 - p)."""
    return operands[13]


@triton.jit
def distance(i_query, i_key, operands):
    """How far key and query are apart, fp32."""
    return tl.abs(i_key - i_query - operands[14]).to(tl.float32)


@triton.jit
def _bias_pointers(
    bias_base,
    i_query,
    i_key,
    stride_bias_query,
    stride_bias_key,
    bias_last_query,
    bias_last_key,
    FEATURES: tl.constexpr,
):
    """Where the bias of each pair lies. A packed sequence longer than its max_seqlen was said to be finds the last place, not others'."""
    if VARLEN & FEATURES:
        i_query = tl.minimum(i_query, bias_last_query)
        i_key = tl.minimum(i_key, bias_last_key)
    return bias_base + (tl.cast(i_query, tl.int64) * stride_bias_query + tl.cast(i_key, tl.int64) * stride_bias_key)


@triton.jit
def explicit_logits(b_s, i_query, i_key, inside, scale, operands, FEATURES: tl.constexpr):
    """(logits, derivative of the soft cap, where the bias does not hide) of the products b_s.

    They stay in base e until their maximum is taken off: in base 2 a bias of the lowest fp32 number, as people hide keys with, would be
    -inf, and a large one would be rounded once more. `inside` says where both positions exist; the bias is not read elsewhere.
    """
    (
        bias_base, stride_bias_query, stride_bias_key, slope, _sink, _seed, _offset, _stream, _query_ids, _key_ids, _prefix,
        softcap, _drop_below, _keep_scale, shift, bias_last_query, bias_last_key,
    ) = operands  # fmt: skip
    logits = b_s * scale
    derivative = 1.0
    shown = inside
    if SOFTCAP & FEATURES:
        capped, derivative = tanh(logits / softcap)
        logits = softcap * capped
    if ALIBI & FEATURES:
        logits -= slope * tl.abs(i_key - i_query - shift).to(tl.float32)
    if BIAS & FEATURES:
        pointers = _bias_pointers(
            bias_base, i_query, i_key, stride_bias_query, stride_bias_key, bias_last_query, bias_last_key, FEATURES
        )
        values = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
        logits += values
        shown = inside & (values != -float("inf"))
    return logits, derivative, shown


@triton.jit
def own_lse(lse, FEATURES: tl.constexpr):
    """A row's log-sum-exp as the backward kernels compare logits with it: in base 2, with explicit logits in base e.

    There -inf, of a row whose logits are all -inf, becomes +inf: its weights are 0 and not NaN.
    """
    if EXPLICIT & FEATURES:
        return tl.where(lse == -float("inf"), float("inf"), lse)
    else:
        return lse * LOG2_E


@triton.jit
def explicit_weights(logits, lse):
    """exp(logits - lse), at most 1: where both are large, a difference of roundings alone would make it huge."""
    below = logits - lse
    return tl.exp2(tl.where(below > 0.0, 0.0, below) * LOG2_E)


@triton.jit
def hide(visible, i_query, i_key, inside, query_length, key_length, operands, FEATURES: tl.constexpr):
    """`visible`, the band, changed by the prefix, the documents and the mask, and restricted to `inside`."""
    (
        bias_base, stride_bias_query, stride_bias_key, _slope, _sink, _seed, _offset, _stream, query_ids, key_ids, prefix,
        _softcap, _drop_below, _keep_scale, _shift, bias_last_query, bias_last_key,
    ) = operands  # fmt: skip
    if PREFIX & FEATURES:
        visible = visible | (i_key < prefix)
    visible = visible & inside
    if DOCUMENTS & FEATURES:
        own = tl.load(query_ids + i_query, mask=(i_query >= 0) & (i_query < query_length), other=0)
        other = tl.load(key_ids + i_key, mask=(i_key >= 0) & (i_key < key_length), other=0)
        visible = visible & (own == other)
    if MASK & FEATURES:
        pointers = _bias_pointers(
            bias_base, i_query, i_key, stride_bias_query, stride_bias_key, bias_last_query, bias_last_key, FEATURES
        )
        visible = visible & (tl.load(pointers, mask=inside, other=0) != 0)
    return visible


@triton.jit
def documents_meet(i_query, i_key, query_length, key_length, operands, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Whether a tile can hold a query and a key of one document: whether the ranges of their numbers meet.

    Where documents lie one behind the other this leaves out every tile that is hidden whole; numbers in any order only leave out fewer.
    """
    (
        _bias_base, _stride_bias_query, _stride_bias_key, _slope, _sink, _seed, _offset, _stream, query_ids, key_ids, _prefix,
        _softcap, _drop_below, _keep_scale, _shift, _bias_last_query, _bias_last_key,
    ) = operands  # fmt: skip
    rows = i_query + tl.arange(0, BLOCK_M)
    columns = i_key + tl.arange(0, BLOCK_N)
    rows_inside = (rows >= 0) & (rows < query_length)
    columns_inside = (columns >= 0) & (columns < key_length)
    own = tl.load(query_ids + rows, mask=rows_inside, other=0)
    other = tl.load(key_ids + columns, mask=columns_inside, other=0)
    least, most = -2147483648, 2147483647
    own_first = tl.min(tl.where(rows_inside, own, most), 0)
    own_last = tl.max(tl.where(rows_inside, own, least), 0)
    other_first = tl.min(tl.where(columns_inside, other, most), 0)
    other_last = tl.max(tl.where(columns_inside, other, least), 0)
    return (own_first <= other_last) & (other_first <= own_last)


@triton.jit
def kept(i_query, i_key, operands, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """bool [BLOCK_M, BLOCK_N]: what dropout keeps of the tile at (i_query, i_key), where i_key is a multiple of 4.

    Philox 4x32-10 with the counter (key / 4, query, sequence * heads + head, offset): its four words are for four keys in a row. So
    it depends on positions alone and not on the tile's size, and the backward pass makes the same again.
    """
    (
        _bias_base, _stride_bias_query, _stride_bias_key, _slope, _sink, seed, offset, stream, _query_ids, _key_ids, _prefix,
        _softcap, drop_below, _keep_scale, _shift, _bias_last_query, _bias_last_key,
    ) = operands  # fmt: skip
    quads = i_key // 4 + tl.arange(0, BLOCK_N // 4)[None, :]
    rows = i_query + tl.arange(0, BLOCK_M)[:, None]
    zero = tl.zeros([BLOCK_M, BLOCK_N // 4], tl.int32)
    word_0, word_1, word_2, word_3 = tl.philox(seed, zero + quads, zero + rows, zero + stream, zero + offset)
    words = tl.join(tl.join(word_0, word_2), tl.join(word_1, word_3))  # [BLOCK_M, BLOCK_N / 4, 2, 2]
    words = tl.reshape(words, [BLOCK_M, BLOCK_N])
    return (words >> 1).to(tl.int32) >= drop_below
