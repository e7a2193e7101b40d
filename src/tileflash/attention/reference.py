"""Textbook attention: softmax(scale * Q K^T) V, every step a whole matrix. The judge of all other backends, not a fast path."""

import torch
from torch import Tensor

from tileflash.attention.band import Band
from tileflash.attention.problem import compute_dtype


def reference_attention(q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> tuple[Tensor, Tensor]:
    """out [B, Sq, Hq, Dv] in q's dtype and lse [B, Hq, Sq] of q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv].

    Computed in fp64 for fp64 inputs, else in fp32; lse has the dtype of the computation. Differentiable any number of times. A
    query that sees no key gives out 0, lse -inf and gradients 0; a key no query sees may hold NaN without harm. Needs O(Sq * Sk)
    memory.
    """
    compute = compute_dtype(q.dtype)
    group = q.shape[2] // k.shape[2]
    visible = band.mask(0, q.shape[1], k.shape[1], q.device)  # [Sq, Sk]
    seen = visible.any(0)[None, :, None, None]  # 0 * NaN is NaN, so keys that nobody sees become 0
    queries = q.to(compute).transpose(1, 2)  # [B, Hq, Sq, D]
    keys = torch.where(seen, k, 0).to(compute).transpose(1, 2).repeat_interleave(group, 1)  # [B, Hq, Sk, D]
    values = torch.where(seen, v, 0).to(compute).transpose(1, 2).repeat_interleave(group, 1)  # [B, Hq, Sk, Dv]
    logits = (queries @ keys.transpose(2, 3) * scale).masked_fill(~visible, -torch.inf)  # [B, Hq, Sq, Sk]
    empty = ~visible.any(1)[:, None]  # [Sq, 1]
    # The softmax of a row of -inf is NaN, in its gradient too: such rows are computed from zeros and then replaced.
    logits = logits.masked_fill(empty, 0.0)
    lse = torch.logsumexp(logits, 3) if k.shape[1] else logits.new_full(logits.shape[:3], -torch.inf)
    probabilities = torch.softmax(logits, 3).masked_fill(empty, 0.0)
    out = (probabilities @ values).transpose(1, 2).to(q.dtype)
    return out, lse.masked_fill(empty[:, 0], -torch.inf)
