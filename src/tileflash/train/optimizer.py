"""AdamW with the habits of GPT training: decay on matrices only, betas 0.9 and 0.95, fused over all weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def build_optimizer(model: nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """`optimizer_of` the `model`'s parameters (fp32), weights shared between layers once."""
    return optimizer_of(
        (parameter for parameter in model.parameters() if parameter.requires_grad), learning_rate, weight_decay
    )


def optimizer_of(parameters: Iterable[nn.Parameter], learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW over `parameters`.

    Weights with 2 or more dimensions decay; biases and the gains of normalisations, which have 1, do not.
    """
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    # Fused is also what lets a step be skipped on the device, with no wait for the host (see `step.py`).
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), eps=1e-8, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Use `learning_rate` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
