"""The baseline of every comparison: attention as a chain of small operators, the way it is written by hand."""

from __future__ import annotations

import math

import torch


def unfused_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, scale: float | None = None
) -> torch.Tensor:
    """softmax(scale * q k^T) v with the whole S x S matrix of scores held in memory, several times over.

    q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv], any floating dtype, Hq a multiple of Hkv -> [B, Sq, Hq,
    Dv]. `causal` aligns the last query with the last key (bottom-right); `scale` defaults to 1 / sqrt(D). Under
    autocast the products run in the autocast dtype and the softmax in float32, as PyTorch's rules have it. Raises
    ValueError when Hq is no multiple of Hkv, or when a causal query would see no key (Sq > Sk).
    """
    query_length, key_length = q.shape[1], k.shape[1]
    query_heads, key_heads = q.shape[2], k.shape[2]
    if query_heads % key_heads:
        raise ValueError(f"q has {query_heads} heads; it must be a multiple of the {key_heads} heads of k")
    if causal and query_length > key_length:
        raise ValueError(f"q has {query_length} positions; with causal it must be at most the {key_length} of k")
    if query_heads != key_heads:
        k = k.repeat_interleave(query_heads // key_heads, dim=2)
        v = v.repeat_interleave(query_heads // key_heads, dim=2)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H, S, D]
    scores = torch.matmul(q, k.transpose(-2, -1))  # [B, H, Sq, Sk]
    scores = scores * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        hidden = torch.ones(query_length, key_length, dtype=torch.bool, device=q.device)
        hidden = hidden.triu(key_length - query_length + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights, v).transpose(1, 2)  # [B, Sq, H, Dv]
