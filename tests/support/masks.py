"""Every way to hide keys, each with the visible keys written down by hand, and a run of attention with it: what tests of masks share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import tileflash

_TABLE = torch.rand(37, 40, generator=torch.Generator().manual_seed(6)) < 0.6
_TABLE[[5, 33]] = False  # rows without a visible key, in both tiles of queries
_CU_Q, _CU_K = (0, 17, 20, 38), (0, 15, 15, 35)


@dataclass(frozen=True)
class Kind:
    """`visible(i, j)` of [Sq, 1] and [1, Sk] says what query i sees; `arguments` ask attention for it (and are moved to the device)."""

    sq: int
    sk: int
    visible: Callable[[Tensor, Tensor], Tensor]
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def packed(self) -> bool:
        return "cu_seqlens_q" in self.arguments

    def table(self) -> Tensor:
        """bool [Sq, Sk]."""
        visible = self.visible(torch.arange(self.sq)[:, None], torch.arange(self.sk)[None, :])
        return visible.expand(self.sq, self.sk)


def _same_sequence(i: Tensor, j: Tensor) -> Tensor:
    """Packed, causal bottom-right: 17 queries with 15 keys, 3 with none, 18 with 20, and two rows of slack on both sides."""
    first, last = (i < 17) & (j < 15) & (j <= i - 2), (i >= 20) & (i < 38) & (j >= 15) & (j < 35)
    return first | (last & (j - 15 <= i - 20 + 2))


_PACKED = {
    "cu_seqlens_q": torch.tensor(_CU_Q, dtype=torch.int32),
    "cu_seqlens_k": torch.tensor(_CU_K, dtype=torch.int32),
}
KINDS = {
    "causal": Kind(37, 40, lambda i, j: j <= i + 3, {"causal": True}),
    "causal, fewer keys": Kind(40, 34, lambda i, j: j <= i - 6, {"causal": True}),
    "top-left": Kind(37, 40, lambda i, j: j <= i, {"causal": "top-left"}),
    "top-left, fewer keys": Kind(40, 34, lambda i, j: j <= i, {"causal": "top-left"}),
    "window": Kind(37, 40, lambda i, j: (j >= i + 3 - 4) & (j <= i + 3 + 2), {"window": (4, 2)}),
    "window of the past": Kind(40, 34, lambda i, j: (j >= i - 6 - 5) & (j <= i - 6), {"window": (5, 0)}),
    "window of the future": Kind(37, 40, lambda i, j: j >= i + 3, {"window": (0, None)}),
    "mask": Kind(37, 40, lambda i, j: _TABLE, {"bias": _TABLE[None, None]}),
    "bias": Kind(37, 40, lambda i, j: _TABLE, {"bias": torch.zeros(37, 40).masked_fill(~_TABLE, -torch.inf)}),
    "documents": Kind(  # the queries 26 to 36 belong to one that has no key
        37,
        40,
        lambda i, j: i // 13 == j // 20,
        {"document_ids": (torch.arange(37)[None] // 13, torch.arange(40)[None] // 20)},
    ),
    "prefix": Kind(
        40,
        34,
        lambda i, j: (j <= i - 6) | (j < 9),
        {"causal": True, "prefix_lengths": torch.tensor([9])},
    ),
    "packed": Kind(40, 37, _same_sequence, {"causal": True, **_PACKED}),
    "packed documents": Kind(
        40,
        37,
        lambda i, j: _same_sequence(i, j) & (i // 6 % 3 == j // 5 % 3),
        {"causal": True, "document_ids": (torch.arange(40) // 6 % 3, torch.arange(37) // 5 % 3), **_PACKED},
    ),
}
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": torch.tensor([0.1, -0.2])},
    "dropout": {"dropout_p": 0.3, "dropout_seed": (8, 9)},
    "sinks": {"sinks": torch.tensor([0.3, -0.4])},
}


def arguments_of(kind: Kind, device: str, **more: Any) -> dict[str, Any]:
    """Keyword arguments on `device`; tensors are copies of their own."""

    def moved(value: Any) -> Any:
        if isinstance(value, tuple) and all(isinstance(each, Tensor) for each in value):
            return tuple(moved(each) for each in value)
        return value.clone().to(device) if isinstance(value, Tensor) else value

    return {name: moved(value) for name, value in (kind.arguments | more).items()}


def draw(
    kind: Kind, device: str, dtype: torch.dtype = torch.float32, heads: int = 2, kv_heads: int = 2, seed: int = 0
) -> list[Tensor]:
    """q [Sq, H, 16], k [Sk, Hkv, 16], v [Sk, Hkv, 8] and d_out [Sq, H, 8], without a batch dimension."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((kind.sq, heads, 16), (kind.sk, kv_heads, 16), (kind.sk, kv_heads, 8), (kind.sq, heads, 8))
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


@dataclass
class Ran:
    """out [Sq, H, Dv], lse [H, Sq], gradients of q, k, v and of the differentiable options."""

    out: Tensor
    lse: Tensor
    d_q: Tensor
    d_k: Tensor
    d_v: Tensor
    others: dict[str, Tensor]


def run(kind: Kind, tensors: list[Tensor], backend: str, d_lse: Tensor | None = None, **more: Any) -> Ran:
    """Forward and backward; `tensors` are q, k, v and d_out."""
    q, k, v = (tensor.detach().clone().requires_grad_() for tensor in tensors[:3])
    arguments = arguments_of(kind, str(q.device), **more)
    leaves = {
        name: value.requires_grad_()
        for name, value in arguments.items()
        if name in ("bias", "alibi_slopes", "sinks") and value.is_floating_point()
    }
    if kind.packed:
        out, lse = tileflash.attention_varlen(q, k, v, **arguments, return_lse=True, backend=backend)
    else:
        out, lse = tileflash.attention(q[None], k[None], v[None], **arguments, return_lse=True, backend=backend)
        out, lse = out[0], lse[0]
    grads = [tensors[3], torch.zeros_like(lse) if d_lse is None else d_lse]
    d_q, d_k, d_v, *others = torch.autograd.grad((out, lse), (q, k, v, *leaves.values()), grads)
    return Ran(out.detach(), lse.detach(), d_q, d_k, d_v, dict(zip(leaves, others, strict=True)))
