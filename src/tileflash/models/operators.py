"""What the layers compute between their matrix products, as functions: plain PyTorch here, other ones from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Biased(NamedTuple):
    """What is still to be added to the residual stream: product [B, S, C] + bias [C], of which the next norm makes the sum."""

    product: Tensor
    bias: Tensor


Update = Tensor | Biased


class LayerOperators(NamedTuple):
    """The functions that a model calls beside matrix products and attention; `PLAIN` is the readable set.

    layer_norm(x, update, weight, bias, epsilon) and rms_norm(x, update, weight, epsilon) -> (x + update, its norm), all [B, S, C];
    update None: nothing is added. project(linear, x) -> linear(x) as the update of a layer_norm, which may be a `Biased`.
    swiglu(gate, up) [B, S, I] -> silu(gate) * up. rotary(qk, q_heads, cos, sin) -> (q, k), the first `q_heads` and the other heads of qk
    [B, S, H, D], rotated; cos and sin as `RotaryEmbedding` gives them.
    """

    layer_norm: Callable[[Tensor, Update | None, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rms_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
    swiglu: Callable[[Tensor, Tensor], Tensor]
    rotary: Callable[[Tensor, int, Tensor, Tensor], tuple[Tensor, Tensor]]
    project: Callable[[nn.Linear, Tensor], Update]


def layer_norm(x: Tensor, update: Update | None, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The residual stream after an update, and its LayerNorm. Weights narrower than the stream are widened to it."""
    if isinstance(update, Biased):
        update = update.product + update.bias
    x = x if update is None else x + update
    return x, F.layer_norm(x, (x.shape[-1],), weight.to(x.dtype), bias.to(x.dtype), epsilon)


def rms_norm(x: Tensor, update: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The residual stream after an update, and its RMSNorm."""
    x = x if update is None else x + update
    if x.dtype == torch.float64:
        # LLaMA as published goes through float32 whatever the input; a float64 run must give its numbers.
        wide = x.float()
        return x, weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)
    return x, F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), epsilon)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU's product (Shazeer, 2020)."""
    return F.silu(gate) * up


def rotary(qk: Tensor, q_heads: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q and k, rotated by their positions."""
    q, k = apply_rotary(qk, cos, sin).split([q_heads, qk.shape[2] - q_heads], dim=2)
    return q, k


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, S, H, D] by its positions; dimension i is paired with i + D / 2, as in Hugging Face's layout.

    The products are in float32 at least, the result in x's dtype.
    """
    swapped = torch.roll(x, x.shape[-1] // 2, dims=-1)
    return (x * cos + swapped * sin).to(x.dtype)


def project(linear: nn.Linear, x: Tensor) -> Tensor:
    """The projection into the residual stream."""
    out: Tensor = linear(x)
    return out


PLAIN = LayerOperators(layer_norm, rms_norm, swiglu, rotary, project)
