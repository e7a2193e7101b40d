"""FlashAttention 1 as the tutorial has it, as a variant: what the algorithm alone is worth, without a kernel."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

_BLOCK = 512  # rows and columns: large, since each block is a dozen launches


def flash_attention_1(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """q, k, v [B, S, H, D] -> [B, S, H, D], with gradients; every head by `torch.vmap` in the same operators."""
    if q.shape[2] != k.shape[2]:
        raise NotImplementedError("the tutorial's FlashAttention 1 has as many K and V heads as query heads")
    result: Tensor = _FlashAttention1.apply(q, k, v, causal)
    return result


class _FlashAttention1(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        from tileflash.attention.tutorial import flash_attention_1 as tutorial

        heads = [_heads(tensor) for tensor in (q, k, v)]
        ctx.options = _options(q.shape[1], k.shape[1], causal)
        out, ell, m = torch.vmap(partial(tutorial.forward, **ctx.options))(*heads)
        ctx.save_for_backward(*heads, out, ell, m)
        ctx.shape, ctx.dtype = q.shape, q.dtype
        return _tensor(out, q.shape).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        from tileflash.attention.tutorial import flash_attention_1 as tutorial

        q, k, v, out, ell, m = ctx.saved_tensors
        backward = torch.vmap(partial(tutorial.backward, **ctx.options))
        results = backward(q, k, v, out, _heads(gradients[0]), ell, m)
        return (*(_tensor(result, ctx.shape).to(ctx.dtype) for result in results), None)


def _options(seq_q: int, seq_k: int, causal: bool) -> dict[str, Any]:
    from tileflash.attention.tutorial.blocks import causal as causal_mask

    return {"B_r": _BLOCK, "B_c": _BLOCK, "mask": causal_mask(seq_q, seq_k) if causal else None}


def _heads(tensor: Tensor) -> Tensor:
    """[B, S, H, D] -> [B * H, S, D], in fp32 at least: what the paper's kernel keeps on chip is not rounded to 16 bits."""
    heads = tensor.transpose(1, 2).flatten(0, 1)
    return heads.float() if heads.dtype.itemsize < 4 else heads


def _tensor(heads: Tensor, shape: torch.Size) -> Tensor:
    """[B * H, S, D] -> [B, S, H, D]."""
    return heads.unflatten(0, (shape[0], shape[2])).transpose(1, 2)
