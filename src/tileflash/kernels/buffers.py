"""Outputs of the attention kernels, uninitialised. At small shapes making them is a good part of a call's host time, so each is made in the
way that measured cheapest: torch.empty takes half as long again to read its sizes."""

from __future__ import annotations

import torch
from torch import Tensor


def empty_contiguous(tensor: Tensor) -> Tensor:
    """A contiguous tensor of the same shape, dtype and device."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def empty_out(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out [B, Sq, Hq, Dv] in q's dtype and lse [B, Hq, Sq] fp32, contiguous, of q [B, Sq, Hq, D] and v [B, Sk, Hkv, Dv]."""
    batch, length, heads, head_dim = q.shape
    width = v.shape[3]
    if width == head_dim:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    else:
        out = torch.empty((batch, length, heads, width), dtype=q.dtype, device=q.device)
    strides = (heads * length, length, 1)
    return out, torch.empty_strided((batch, heads, length), strides, dtype=torch.float32, device=q.device)
