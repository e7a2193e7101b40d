"""A model's step with fused operators in place of chains of small ones: docs/operators.md."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

from tileflash.models import GPT2, LayerOperators, Llama3
from tileflash.models.operators import Biased, Update
from tileflash.operators.gated import swiglu
from tileflash.operators.linear_cross_entropy import linear_cross_entropy
from tileflash.operators.norm import layer_norm, rms_norm
from tileflash.operators.rotary import rotary
from tileflash.operators.tied_embedding import tied_lookup


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


def fused_operators(backend: str = "auto") -> LayerOperators:
    """The functions of `tileflash.operators` as a model calls them; `backend` as they have it."""

    def rotary_of_both(
        qk: torch.Tensor, q_heads: int, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        half = qk.shape[-1] // 2
        q, k = qk.split([q_heads, qk.shape[2] - q_heads], dim=2)
        # The model's angles come twice, side by side, and in the first half of the sine with the sign of the rotation.
        return rotary(q, k, cos[:, 0, :half], sin[:, 0, half:], backend=backend)

    def layer_norm_of_update(
        x: torch.Tensor, update: Update | None, weight: torch.Tensor, bias: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(update, Biased):
            return layer_norm(x, update.product, weight, bias, epsilon, update_bias=update.bias, backend=backend)
        return layer_norm(x, update, weight, bias, epsilon, backend=backend)

    return LayerOperators(
        layer_norm_of_update,
        functools.partial(rms_norm, backend=backend),
        functools.partial(swiglu, backend=backend),
        rotary_of_both,
        _project,
    )


def _project(linear: nn.Linear, x: torch.Tensor) -> Update:
    """The norm behind it adds the bias, and has its gradient at hand: a matrix product with one would need a launch for that."""
    return linear(x) if linear.bias is None else Biased(F.linear(x, linear.weight), linear.bias)


def fuse_embedding(model: nn.Module, backend: str = "auto") -> None:
    """Let a model with tied embeddings add the gradient of its lookup to its head's (`tied_lookup`); others stay as they are."""
    assert isinstance(model, GPT2 | Llama3)
    if model.head is None:
        weight = model.embedding.weight
        embedding: nn.Module = model.embedding
        embedding.forward = lambda tokens: tied_lookup(tokens, weight, backend=backend)


FUSED = fused_operators()
