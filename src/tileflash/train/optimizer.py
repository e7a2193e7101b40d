"""AdamW with the habits of GPT training: decay on matrices only, betas 0.9 and 0.95, fused over all weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tileflash.train.adamw import FusedAdamW


def build_optimizer(model: nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """`optimizer_of` the `model`'s parameters (fp32), weights shared between layers once."""
    return optimizer_of(
        (parameter for parameter in model.parameters() if parameter.requires_grad), learning_rate, weight_decay
    )


def optimizer_of(parameters: Iterable[nn.Parameter], learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW over `parameters`.

    Weights with 2 or more dimensions decay; biases and the gains of normalisations, which have 1, do not.
    """
    groups = _groups(list(parameters), weight_decay)
    # Fused is also what lets a step be skipped on the device, with no wait for the host (see `step.py`).
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), eps=1e-8, fused=True)


def _groups(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_fused_optimizer(
    model: nn.Module, learning_rate: float, weight_decay: float, *, split: bool, sum_in_fp32: bool
) -> FusedAdamW:
    """The same over the `model`'s parameters as a `FusedAdamW`; with `split` they become bf16."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = _groups(parameters, weight_decay)
    return FusedAdamW(groups, lr=learning_rate, split=split, sum_in_fp32=sum_in_fp32)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Use `learning_rate` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
