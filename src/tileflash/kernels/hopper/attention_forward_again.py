"""Rows of the forward pass made once more, key by key, where something that is not finite reached rows that do not see it.

A hidden key has the weight 0, but 0 * NaN is NaN: a V that is not finite spoils all 64 rows that are multiplied with its tile. To look
for it in every tile of V would cost as much as the softmax. To look for NaN in what comes out costs next to nothing: a program does
it once, at its end, and then makes all its rows once more. (To decide it for each tile was measured: a barrier more and code
between the loops took 5 to 10 % of the time at lengths up to 1,024.)
"""

from tileflash.kernels.compat_gluon import gl, gluon
from tileflash.kernels.hopper.tile import LOG2_E, soft_capped

ROWS_AT_A_TIME = gl.constexpr(16)


@gluon.jit
def attend_again(
    out, inputs, batch, head, kv_head, q_begin, k_begin, first, query_length, key_length, low, high, scale_log2, sinks_ptr, cap_scale,
    HAS_LOW: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """64 rows of the output from row `first` on, in fp32 until they are stored to `out` (shared memory, [64, BLOCK_D]).

    What is not seen is multiplied with nothing. All is read from global memory: shared memory is laid out for tiles. A key costs a
    hundred cycles or so.
    """
    begin = 0
    if HAS_LOW:
        begin = gl.maximum(first + low, 0)
    end = gl.minimum(first + 64 + high, key_length)
    q_strides, k_strides, v_strides, q_ptr, k_ptr, v_ptr, D, DV = inputs
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    i_columns = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, LAYOUT))
    q_base = (
        q_ptr
        + batch.to(gl.int64) * q_strides[0]
        + head.to(gl.int64) * q_strides[2]
        + gl.to_tensor(q_begin).to(gl.int64) * q_strides[1]
    )
    k_base = (
        k_ptr
        + batch.to(gl.int64) * k_strides[0]
        + kv_head.to(gl.int64) * k_strides[2]
        + gl.to_tensor(k_begin).to(gl.int64) * k_strides[1]
    )
    v_base = (
        v_ptr
        + batch.to(gl.int64) * v_strides[0]
        + kv_head.to(gl.int64) * v_strides[2]
        + gl.to_tensor(k_begin).to(gl.int64) * v_strides[1]
    )
    for part in gl.static_range(64 // ROWS_AT_A_TIME):
        i_queries = first + part * ROWS_AT_A_TIME + gl.arange(0, ROWS_AT_A_TIME, layout=ROWS)
        inside = (i_queries < query_length)[:, None] & (i_columns < D)[None, :]
        places = i_queries.to(gl.int64)[:, None] * q_strides[1] + i_columns[None, :]
        q = gl.load(q_base + places, mask=inside, other=0.0).to(gl.float32)  # [16, BLOCK_D]
        if cap_scale is None:
            q *= scale_log2
        row_max = gl.full([ROWS_AT_A_TIME], float("-inf"), gl.float32, ROWS)
        row_sum = gl.zeros([ROWS_AT_A_TIME], gl.float32, ROWS)
        acc = gl.zeros([ROWS_AT_A_TIME, BLOCK_D], gl.float32, LAYOUT)
        for i_key in range(begin, end):
            k = gl.load(
                k_base + gl.to_tensor(i_key).to(gl.int64) * k_strides[1] + i_columns, mask=i_columns < D, other=0.0
            )
            v = gl.load(
                v_base + gl.to_tensor(i_key).to(gl.int64) * v_strides[1] + i_columns, mask=i_columns < DV, other=0.0
            )
            logits = gl.sum(q * k.to(gl.float32)[None, :], 1)
            if cap_scale is not None:
                logits, _derivative = soft_capped(logits, cap_scale)
                logits *= scale_log2
            visible = (i_key >= i_queries + low) & (i_key <= i_queries + high)
            logits = gl.where(visible, logits, float("-inf"))
            new_max = gl.maximum(row_max, logits)
            shift = gl.where(new_max == float("-inf"), 0.0, new_max)
            rescale = gl.exp2(row_max - shift)
            weights = gl.exp2(logits - shift)
            row_sum = row_sum * rescale + weights
            added = gl.where(visible[:, None], weights[:, None] * v.to(gl.float32)[None, :], 0.0)
            acc = acc * rescale[:, None] + added
            row_max = new_max
        if sinks_ptr is not None:
            sink = gl.load(sinks_ptr + head) * LOG2_E
            largest = gl.maximum(row_max, sink)
            keep = gl.exp2(row_max - largest)
            acc *= keep[:, None]
            row_sum = row_sum * keep + gl.exp2(sink - largest)
        acc = acc / gl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
        out.slice(part * ROWS_AT_A_TIME, ROWS_AT_A_TIME, dim=0).store(acc.to(out.dtype))
