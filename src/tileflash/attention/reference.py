"""Textbook attention: softmax(scale * Q K^T) V, every step a whole matrix. The judge of all other backends, not a fast path."""

import torch
from torch import Tensor

from tileflash.attention.band import Band
from tileflash.attention.logits import additive, alibi_shift, kept_weights, log_sum_exp, readable_rows, visible_keys
from tileflash.attention.problem import compute_dtype
from tileflash.kernels.options import PLAIN, Options


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float, options: Options = PLAIN, first_sequence: int = 0
) -> tuple[Tensor, Tensor]:
    """out [B, Sq, Hq, Dv] in q's dtype and lse [B, Hq, Sq] of q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv].

    Computed in fp64 for fp64 inputs, else in fp32; lse has the dtype of the computation. Differentiable any number of times. A
    query that sees no key gives out 0, lse -inf and gradients 0; a key may hold NaN without harm to the queries that do not see it.
    Needs O(Sq * Sk) memory. `options` without packed sequences; `first_sequence` is the number of the first one, for dropout.
    """
    compute = compute_dtype(q.dtype)
    batch, query_length, heads, _ = q.shape
    key_length = k.shape[1]
    group = heads // max(1, k.shape[2])
    visible = visible_keys(band, options, 0, query_length, key_length, q.device)  # [1 or B, 1 or Hq, Sq, Sk]
    queries, lost_queries = readable_rows(q.to(compute).transpose(1, 2))  # [B, Hq, Sq, D]
    keys, lost_keys = readable_rows(k.to(compute).transpose(1, 2).repeat_interleave(group, 1))  # [B, Hq, Sk, D]
    values = v.to(compute).transpose(1, 2).repeat_interleave(group, 1)  # [B, Hq, Sk, Dv]
    logits = queries @ keys.transpose(2, 3) * scale  # [B, Hq, Sq, Sk]
    logits = logits.masked_fill(visible & (lost_queries | lost_keys.transpose(2, 3)), torch.nan)
    if options.softcap:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    added = additive(
        options, alibi_shift(options, query_length, key_length), 0, query_length, key_length, compute, q.device
    )
    if added is not None:
        logits = logits + added.masked_fill(~visible, 0.0)  # -inf only where it is replaced next
    logits = logits.masked_fill(~visible, -torch.inf)
    if options.sinks is not None:  # a key without a value, seen by all
        sink = options.sinks.to(compute)[None, :, None, None].expand(batch, heads, query_length, 1)
        logits = torch.cat([logits, sink], 3)
    # The softmax of a row of -inf is NaN, in its gradient too: such rows are computed from zeros and then replaced.
    empty = (logits == -torch.inf).all(3)  # [B, Hq, Sq]
    logits = logits.masked_fill(empty[..., None], 0.0)
    lse = log_sum_exp(logits)
    # A row that sees NaN is NaN in its softmax whole, in the columns that it does not see, too. And a row may see keys whose logits
    # are all -inf, by overflow: it has no weights, as one that sees nothing.
    probabilities = torch.softmax(logits, 3)[..., :key_length].masked_fill(~visible | empty[..., None], 0.0)
    if options.dropout_p:
        keep = kept_weights(options, batch, heads, 0, query_length, key_length, first_sequence)
        probabilities = torch.where(keep, probabilities / (1 - options.dropout_p), 0.0)
    # 0 * NaN is NaN: values that are not finite count as 0, and NaN comes back to the rows that see them.
    finite = torch.isfinite(values)
    out = probabilities @ torch.where(finite, values, 0.0)
    seen = visible.to(compute).expand(batch, heads, query_length, key_length) @ (~finite).to(compute)
    out = out.masked_fill(seen > 0, torch.nan)
    # The output of rows that see nothing is cut off: what comes back for them, NaN even, meets no value.
    out = out.masked_fill(~visible.any(3)[..., None], 0.0).transpose(1, 2).to(q.dtype)
    return out, lse.masked_fill(empty, -torch.inf)
