"""From one head to tensors: how [B, S, H, D] maps on the matrices of the papers, and how PyTorch's autograd calls the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tileflash.attention.tutorial import flash_attention_2
from tileflash.attention.tutorial.blocks import Mask
from tileflash.attention.tutorial.dropout import random_state


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, B_r: int, B_c: int, tau: float | None = None, mask: Mask | None = None,
    p_drop: float = 0.0, seed: int = 0, offset: int = 0,
) -> Tensor:  # fmt: skip
    """FlashAttention-2 of q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv]: [B, Sq, Hq, Dv], with gradients.

    Each (batch, head) is a problem of its own: on a GPU, another worker. With fewer K/V heads than query heads (GQA), Hq / Hkv query
    heads in a row read the same K and V.
    """
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"q must have a multiple of k's {k.shape[2]} heads, has {q.shape[2]}")
    options = {"B_r": B_r, "B_c": B_c, "tau": tau, "mask": mask, "p_drop": p_drop}
    result: Tensor = _Attention.apply(q, k, v, seed, offset, options)
    return result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, seed: int, offset: int, options: dict[str, Any]) -> Tensor:
        out = q.new_empty(*q.shape[:3], v.shape[3])
        lse = q.new_empty(*q.shape[:3], 1)
        for batch, head, kv_head in _problems(q, k):
            Q, K, V = q[batch, :, head], k[batch, :, kv_head], v[batch, :, kv_head]  # views: [Sq, D], [Sk, D], [Sk, Dv]
            R = random_state(seed, offset, batch, head, q.shape[2])
            out[batch, :, head], lse[batch, :, head] = flash_attention_2.forward(Q, K, V, R=R, **options)
        ctx.save_for_backward(q, k, v, out, lse)  # what the backward pass needs: O(S) numbers beside q, k and v
        ctx.seed, ctx.offset, ctx.options = seed, offset, options
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # asked for by create_graph=True; what follows could not be differentiated rightly
            raise RuntimeError("the tutorial's attention has no second derivative")
        q, k, v, out, lse = ctx.saved_tensors
        d_q, d_k, d_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for batch, head, kv_head in _problems(q, k):
            Q, K, V = q[batch, :, head], k[batch, :, kv_head], v[batch, :, kv_head]
            O, dO, L = out[batch, :, head], d_out[batch, :, head], lse[batch, :, head]
            R = random_state(ctx.seed, ctx.offset, batch, head, q.shape[2])
            dQ, dK, dV = flash_attention_2.backward(Q, K, V, O, dO, L, R=R, **ctx.options)
            d_q[batch, :, head] = dQ
            d_k[batch, :, kv_head] += dK  # a K/V head gets the sum over the query heads that read it
            d_v[batch, :, kv_head] += dV
        return d_q, d_k, d_v, None, None, None


def _problems(q: Tensor, k: Tensor) -> list[tuple[int, int, int]]:
    """(batch, query head, K/V head) of every single-head problem."""
    group = q.shape[2] // k.shape[2]
    return [(batch, head, head // group) for batch in range(q.shape[0]) for head in range(q.shape[2])]
