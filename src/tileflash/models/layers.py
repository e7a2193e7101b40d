"""The layers that the models share."""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from .config import RopeScaling
from .operators import LayerOperators, Update


class AttentionFunction(Protocol):
    """Whatever computes attention: q [B, S, Hq, D], k and v [B, S, Hkv, D] -> [B, S, Hq, D]."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float | None
    ) -> torch.Tensor: ...


class LayerNorm(nn.LayerNorm):
    """LayerNorm behind the residual add: (x, update or None) [B, S, C] -> (x + update, its norm) (Ba et al., 2016)."""

    def __init__(self, width: int, epsilon: float, operators: LayerOperators) -> None:
        super().__init__(width, eps=epsilon)
        self.operators = operators

    def forward(self, x: torch.Tensor, update: Update | None = None) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return self.operators.layer_norm(x, update, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """The same with RMSNorm, x / sqrt(mean(x^2) + epsilon) * weight, float32 inside (Zhang and Sennrich, 2019)."""

    def __init__(self, width: int, epsilon: float, operators: LayerOperators) -> None:
        super().__init__()
        self.epsilon, self.operators = epsilon, operators
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor, update: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return self.operators.rms_norm(x, update, self.weight, self.epsilon)


class RotaryEmbedding(nn.Module):
    """Cosines and sines of the rotary position embedding (Su et al., 2021), in float32 whatever the model's dtype.

    The angles are those that LLaMA was trained with: inverse frequencies and their product with the position in
    float32.
    """

    inverse_frequency_bits: torch.Tensor

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None) -> None:
        super().__init__()
        self.head_dim, self.theta, self.scaling = head_dim, theta, scaling
        # Held as int32 because `model.to(bfloat16)` rounds every floating buffer, and rounded frequencies are wrong
        # ones.
        bits = torch.empty(head_dim // 2, dtype=torch.int32)
        self.register_buffer("inverse_frequency_bits", bits, persistent=False)
        self.reset()

    def reset(self) -> None:
        """Fill the buffer, which has no value after `to_empty`. Computed on the CPU, so the same on every device."""
        inverse = inverse_frequencies(self.head_dim, self.theta, self.scaling)
        self.inverse_frequency_bits.copy_(inverse.view(torch.int32))

    def forward(self, length: int, positions: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) for `positions` (int64 [length]; None: 0 ... length - 1), each [length, 1, head_dim] float32, for
        `operators.rotary`."""
        inverse = self.inverse_frequency_bits.view(torch.float32)  # [D / 2]
        if positions is None:
            positions = torch.arange(length, device=inverse.device, dtype=torch.float32)
        angles = positions.float()[:, None] * inverse  # [S, D / 2]
        cos, sin = angles.cos(), angles.sin()
        # The sine carries the minus sign of the rotation, which saves a negation per layer.
        return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """Radians per position of each pair of dimensions, [head_dim / 2] float32 on the CPU, with LLaMA-3.1's scaling."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    inverse = 1.0 / (theta**exponents)
    if scaling is None:
        return inverse
    wavelength = 2 * math.pi / inverse
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    original = scaling.original_max_sequence_length
    keep = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    between = (1 - keep) * inverse / scaling.factor + keep * inverse
    # The ends are chosen, not interpolated with 0 or 1, so that they keep every bit.
    inner = torch.where(wavelength > original / low, inverse / scaling.factor, between)
    return torch.where(wavelength < original / high, inverse, inner)


def vocabulary_logits(features: torch.Tensor, weight: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """features [..., C] times weight [padded vocabulary, C] -> [..., vocab_size]: a view without the padding."""
    return F.linear(features, weight)[..., :vocab_size]


def require_length(length: int, max_sequence_length: int) -> None:
    """ValueError when a sequence is longer than the model's positions."""
    if length > max_sequence_length:
        raise ValueError(
            f"tokens has {length} positions; it must have at most max_sequence_length, {max_sequence_length}"
        )
