"""The lookup of a weight that is the head's, too: its gradient is added to the head's in place, where there is one already."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tileflash.operators.choice import uses_triton


def tied_lookup(tokens: Tensor, weight: Tensor, *, backend: str = "auto") -> Tensor:
    """weight[tokens], where `weight` (a leaf, [V, C]) also takes part in what comes after, as the head of a model with tied embeddings.

    tokens int64, any shape -> [..., C] in weight's dtype. Autograd would make a second gradient [V, C], of zeros but for N rows, and
    add both. Here the backward pass adds the rows to `weight.grad`, which holds the head's by then; where it holds nothing the gradient
    is made as usual. Only `backward()` sees it, `torch.autograd.grad` does not. `backend` as in `linear_cross_entropy`.
    """
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return F.embedding(tokens, weight)
    # Not `weight` itself: autograd would hold back the head's gradient until the lookup's has come.
    anchor = torch.empty(0, device=weight.device, requires_grad=True)
    return _Lookup.apply(anchor, tokens, _Holder(weight), backend)


class _Holder:
    """Hands a tensor through autograd unseen."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tokens: Tensor, holder: _Holder, backend: str) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.holder, ctx.backend = holder, backend
        return F.embedding(tokens, holder.weight)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError("tied_lookup has no second derivative; torch.nn.functional.embedding has")
        (tokens,), weight = ctx.saved_tensors, ctx.holder.weight
        width = weight.shape[1]
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        add_rows(weight.grad, tokens.reshape(-1), d_out.reshape(-1, width).contiguous(), backend=ctx.backend)
        return None, None, None, None


def add_rows(sums: Tensor, tokens: Tensor, rows: Tensor, *, backend: str = "auto") -> None:
    """sums[tokens[i]] += rows[i], rounded once; sums [V, C], tokens int64 [N], rows [N, C], contiguous."""
    if uses_triton(backend, sums.device, torch.promote_types(sums.dtype, rows.dtype)) and sums.is_contiguous():
        from tileflash.kernels.triton.embedding import add_rows as add_by_kernel

        add_by_kernel(sums, tokens, rows)
        return
    wide = torch.promote_types(sums.dtype, torch.float32)
    touched, index = tokens.unique(return_inverse=True)
    totals = sums[touched].to(wide).index_add_(0, index, rows.to(wide))
    sums[touched] = totals.to(sums.dtype)
