"""Attention in plain PyTorch with O(S) memory: a strip of queries at a time, forward and backward. Slow, but runs anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tileflash.attention.band import Band
from tileflash.attention.logits import (
    additive,
    alibi_shift,
    distances,
    kept_weights,
    log_sum_exp,
    readable_rows,
    visible_keys,
)
from tileflash.attention.problem import compute_dtype
from tileflash.kernels.options import PLAIN, OptionGradients, Options

# A strip's logits hold at most this many elements (64 MiB in fp32), whatever the sequence length.
_STRIP_ELEMENTS = 2**24


class _Strip(NamedTuple):
    """Weights of a strip of queries; matrices are [B, Hkv, group, rows, Sk] or broadcast to it."""

    visible: Tensor
    queries: Tensor  # [B, Hkv, group, rows, D], 0 where it is not finite, as are keys and values [B, Hkv, 1, Sk, D]
    keys: Tensor
    values: Tensor
    logits: Tensor
    capped: Tensor | None  # tanh of the soft cap
    keep: Tensor | None  # what dropout keeps, times 1 / (1 - p)
    lost_values: Tensor  # [B, Hkv, 1, Sk, 1]: values that were not finite


def tiled_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, low: int | None, high: int | None, options: Options = PLAIN,
    first_sequence: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out [B, Sq, Hq, Dv] and lse [B, Hq, Sq] (fp32; fp64 for fp64 inputs) of q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v likewise."""
    compute = compute_dtype(q.dtype)
    batch, query_length, heads, _ = q.shape
    kv_heads = k.shape[2]
    out = torch.zeros((batch, query_length, heads, v.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.full((batch, heads, query_length), -torch.inf, dtype=compute, device=q.device)
    for begin, end in _bounds(q, k):
        strip = _strip(q, k, v, scale, Band(low, high), options, begin, end, first_sequence)
        row_lse = log_sum_exp(strip.logits)  # [B, Hkv, group, rows]
        if options.sinks is not None:
            row_lse = torch.logaddexp(row_lse, _sinks(options.sinks, kv_heads, compute))
        weights, _ = _softmax(strip, options, kv_heads)
        if strip.keep is not None:
            weights = weights * strip.keep
        weights = weights.masked_fill(strip.visible & strip.lost_values.transpose(3, 4), torch.nan)
        rows = (weights @ strip.values).permute(0, 3, 1, 2, 4)  # [B, rows, Hkv, group, Dv]
        out[:, begin:end] = rows.reshape(batch, end - begin, heads, -1).to(q.dtype)
        lse[:, :, begin:end] = row_lse.reshape(batch, heads, end - begin)
    return out, lse


def tiled_backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float, low: int | None, high: int | None, options: Options = PLAIN, first_sequence: int = 0,
) -> tuple[Tensor, Tensor, Tensor, OptionGradients]:  # fmt: skip
    """d_q, d_k, d_v and the options' gradients. A strip's weights are made again. `lse` may be that of more keys than are given here, as in
    ring attention: these have their share of the whole then."""
    compute = lse.dtype
    batch, query_length, heads, _ = q.shape
    key_length, kv_heads = k.shape[1:3]
    d_q = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    d_k = torch.zeros(k.shape, dtype=compute, device=q.device).transpose(1, 2)  # [B, Hkv, Sk, D]
    d_v = torch.zeros(v.shape, dtype=compute, device=q.device).transpose(1, 2)
    d_bias, d_slopes, d_sinks = (
        None if x is None else torch.zeros(x.shape, dtype=compute, device=q.device)
        for x in (options.bias if options.bias_gradient else None, options.alibi_slopes, options.sinks)
    )
    for begin, end in _bounds(q, k):
        strip = _strip(q, k, v, scale, Band(low, high), options, begin, end, first_sequence)
        d_outs, outs = (_grouped(tensor[:, begin:end], kv_heads, compute) for tensor in (d_out, out))
        row_lse = lse[:, :, begin:end].unflatten(1, (kv_heads, -1))
        # Where nothing is seen all is 0, whatever the gradients of that row hold: 0 * NaN is NaN.
        empty = row_lse == -torch.inf
        d_outs = d_outs.masked_fill(empty[..., None], 0.0)
        weights, sink_weights = _softmax(strip, options, kv_heads)
        own_lse = log_sum_exp(strip.logits)
        if options.sinks is not None:
            own_lse = torch.logaddexp(own_lse, _sinks(options.sinks, kv_heads, compute))
        share = _share(own_lse, row_lse)
        weights = weights * share[..., None]
        delta = (d_outs * outs).sum(4)
        if d_lse is not None:
            delta = delta - d_lse[:, :, begin:end].unflatten(1, (kv_heads, -1))
        d_weights = d_outs @ strip.values.transpose(3, 4)
        dropped = weights
        if strip.keep is not None:
            d_weights, dropped = d_weights * strip.keep, weights * strip.keep
        d_weights = d_weights.masked_fill(strip.visible & strip.lost_values.transpose(3, 4), torch.nan)
        d_logits = (weights * (d_weights - delta[..., None])).masked_fill(~strip.visible, 0.0)
        if sink_weights is not None and d_sinks is not None:
            parts = torch.where(empty, 0.0, sink_weights * share * delta)
            d_sinks -= parts.sum((0, 3)).flatten()
        if options.alibi_slopes is not None and d_slopes is not None:
            away = distances(alibi_shift(options, query_length, key_length), begin, end, key_length, compute, q.device)
            parts = (d_logits * away).sum((3, 4)).flatten(1)  # [B, Hq]
            d_slopes -= parts.sum(0) if d_slopes.dim() == 1 else parts.sum_to_size(d_slopes.shape)
        if options.bias is not None and d_bias is not None:
            part = d_logits.flatten(1, 2)
            rows = slice(begin, end) if d_bias.shape[2] > 1 else slice(0, 1)
            d_bias[:, :, rows] += part.sum_to_size((*d_bias.shape[:2], d_bias[:, :, rows].shape[2], d_bias.shape[3]))
        if strip.capped is not None:
            # hidden once more: the derivative at a hidden key that is NaN is NaN, too
            d_logits = (d_logits * (1 - strip.capped * strip.capped)).masked_fill(~strip.visible, 0.0)
        d_v += (dropped.transpose(3, 4) @ d_outs).sum(2)
        d_k += (d_logits.transpose(3, 4) @ strip.queries).sum(2) * scale
        d_q[:, begin:end] = (
            (d_logits @ strip.keys * scale).permute(0, 3, 1, 2, 4).reshape(batch, end - begin, heads, -1).to(q.dtype)
        )
    gradients = OptionGradients(
        None if d_bias is None or options.bias is None else d_bias.to(options.bias.dtype),
        None if d_slopes is None or options.alibi_slopes is None else d_slopes.to(options.alibi_slopes.dtype),
        None if d_sinks is None or options.sinks is None else d_sinks.to(options.sinks.dtype),
    )
    return d_q, d_k.transpose(1, 2).to(k.dtype).contiguous(), d_v.transpose(1, 2).to(v.dtype).contiguous(), gradients


def strip_rows(batch: int, heads: int, key_length: int) -> int:
    """Queries of a strip: of all heads and batches at once, so that their logits [B, Hq, rows, Sk] keep within the bound."""
    return max(1, _STRIP_ELEMENTS // max(1, batch * heads * key_length))


def _bounds(q: Tensor, k: Tensor) -> Iterator[tuple[int, int]]:
    """Begin and end of each strip of queries."""
    query_length = q.shape[1] if q.shape[0] and q.shape[2] else 0
    rows = strip_rows(q.shape[0], q.shape[2], k.shape[1])
    return ((begin, min(begin + rows, query_length)) for begin in range(0, query_length, rows))


def _strip(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    band: Band,
    options: Options,
    begin: int,
    end: int,
    first_sequence: int,
) -> _Strip:
    compute = compute_dtype(q.dtype)
    batch, query_length, heads, _ = q.shape
    key_length, kv_heads = k.shape[1:3]

    def grouped(matrix: Tensor) -> Tensor:  # [1 or B, 1 or Hq, ...] -> [1 or B, 1 or Hkv, 1 or group, ...]
        return matrix.unsqueeze(1) if matrix.shape[1] == 1 and heads != 1 else matrix.unflatten(1, (kv_heads, -1))

    visible = grouped(visible_keys(band, options, begin, end, key_length, q.device))
    # 0 * NaN is NaN: what is not finite counts as 0, and NaN comes back where it is seen.
    queries, lost_queries = readable_rows(_grouped(q[:, begin:end], kv_heads, compute))
    keys, lost_keys = readable_rows(k.to(compute).transpose(1, 2).unsqueeze(2))
    values, lost_values = readable_rows(v.to(compute).transpose(1, 2).unsqueeze(2))
    logits = queries @ keys.transpose(3, 4) * scale  # [B, Hkv, group, rows, Sk]
    logits = logits.masked_fill(lost_queries | lost_keys.transpose(3, 4), torch.nan)
    capped = None
    if options.softcap:
        capped = torch.tanh(logits / options.softcap)
        logits = options.softcap * capped
    shift = alibi_shift(options, query_length, key_length)
    added = additive(options, shift, begin, end, key_length, compute, q.device)
    if added is not None:
        logits = logits + grouped(added)
    keep = None
    if options.dropout_p:
        keep = kept_weights(options, batch, heads, begin, end, key_length, first_sequence)
        keep = keep.unflatten(1, (kv_heads, -1)).to(compute) / (1 - options.dropout_p)
    logits = logits.masked_fill(~visible, -torch.inf)
    return _Strip(visible, queries, keys, values, logits, capped, keep, lost_values)


def _softmax(strip: _Strip, options: Options, kv_heads: int) -> tuple[Tensor, Tensor | None]:
    """Weights [B, Hkv, group, rows, Sk] of the logits, and those of the sinks [B, Hkv, group, rows].

    Not exp(logits - lse): beside a large maximum fp32 has no room for the logarithm of the sum, and the weights would not sum to 1.
    """
    logits = strip.logits
    sink = None if options.sinks is None else _sinks(options.sinks, kv_heads, logits.dtype)[..., None]
    if logits.shape[4] == 0 and sink is None:
        return logits, None
    if sink is not None:
        logits = torch.cat([logits, sink.expand(*logits.shape[:4], 1)], 4)
    most = logits.amax(4, keepdim=True)
    powers = torch.exp(logits - most.masked_fill(most == -torch.inf, 0.0))
    sums = powers.sum(4, keepdim=True)
    weights = powers / sums.masked_fill(sums == 0, 1.0)
    sink_weights = None
    if sink is not None:
        weights, sink_weights = weights[..., :-1], weights[..., -1]
    return weights.masked_fill(
        ~strip.visible, 0.0
    ), sink_weights  # a row that sees NaN has weights that are, hidden ones too


def _share(own_lse: Tensor, row_lse: Tensor) -> Tensor:
    """exp(own_lse - row_lse), and 1 where they are the same but for rounding, of which beside large logits much comes out of exp."""
    difference = own_lse - row_lse  # NaN where both are infinite, or a row sees NaN, whose weights are NaN already
    rounding = 4 * torch.finfo(row_lse.dtype).eps * row_lse.abs()
    return torch.where((difference.abs() <= rounding) | difference.isnan(), 1.0, difference.exp())


def _grouped(tensor: Tensor, kv_heads: int, compute: torch.dtype) -> Tensor:
    """[B, S, Hq, D] -> [B, Hkv, Hq // Hkv, S, D]: the query heads that share a K/V head side by side."""
    batch, length, heads, head_dim = tensor.shape
    return tensor.to(compute).view(batch, length, kv_heads, heads // kv_heads, head_dim).permute(0, 2, 3, 1, 4)


def _sinks(sinks: Tensor, kv_heads: int, compute: torch.dtype) -> Tensor:
    """[Hq] -> [1, Hkv, group, 1]."""
    return sinks.to(compute).view(1, kv_heads, -1, 1)
