"""A model's step with fused operators in place of chains of small ones: docs/operators.md."""

from __future__ import annotations

import torch
from torch import nn

from tileflash.models import GPT2, Llama3
from tileflash.operators.linear_cross_entropy import linear_cross_entropy


def fused_loss(
    model: nn.Module,
    tokens: torch.Tensor,
    targets: torch.Tensor,
    divisor: int | torch.Tensor,
    dtype: torch.dtype,
    backend: str = "auto",
) -> torch.Tensor:
    """A LossFunction (see `step`) whose logits are never whole: the head and the loss are one operator."""
    assert isinstance(model, GPT2 | Llama3)
    with torch.autocast(tokens.device.type, dtype=dtype, enabled=dtype != torch.float32):
        return linear_cross_entropy(
            model.features(tokens),
            model.head_weight,
            targets,
            divisor=divisor,
            vocab_size=model.config.vocab_size,
            backend=backend,
        )
