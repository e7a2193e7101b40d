"""One optimizer step: forward, loss, backward by micro-batches, clipping, update. Nothing here waits for the GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from tileflash.train.adamw import FusedAdamW

IGNORED_TARGET = -100  # PyTorch's own convention: a target that takes no part in the loss


@dataclass(frozen=True)
class Limits:
    """The largest loss and gradient norm at which a step is still applied; NaN and Inf are beyond any limit."""

    loss: float
    gradient_norm: float


NOTHING_PASSES = Limits(float("-inf"), float("-inf"))


def token_loss_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum of the cross entropies of all valid tokens, fp32.

    `logits` [B, S, V] of any float dtype, `targets` int64 [B, S]; -100 is ignored. The softmax is in fp32.
    """
    return F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum"
    )


def compute(model: nn.Module, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Logits [B, S, V] of `tokens` int64 [B, S], computed in `dtype` over the fp32 weights."""
    with torch.autocast(tokens.device.type, dtype=dtype, enabled=dtype != torch.float32):
        return model(tokens)


class LossFunction(Protocol):
    """Loss of one micro-batch, fp32 []: the sum of its valid tokens' cross entropies divided by `divisor`.

    `tokens`, `targets`: int64 [B, S]; the model computes in `dtype` over its fp32 weights.
    """

    def __call__(
        self,
        model: nn.Module,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        divisor: int | torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor: ...


def plain_loss(
    model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor, divisor: int | torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """A LossFunction that makes all logits, then the loss of them."""
    return token_loss_sum(compute(model, tokens, dtype), targets) / divisor


def accumulate(
    model: nn.Module,
    tokens: torch.Tensor,
    targets: torch.Tensor,
    divisor: int | torch.Tensor,
    total: torch.Tensor,
    dtype: torch.dtype,
    loss_function: LossFunction = plain_loss,
) -> None:
    """Forward and backward of one micro-batch: its part of the step's loss is added to `total`, of the gradient to the weights'.

    `tokens`, `targets`: int64 [B, S]; `divisor`: the step's number of valid tokens, at least 1; `total`: fp32 scalar.
    """
    loss = loss_function(model, tokens, targets, divisor, dtype)
    loss.backward()
    total += loss.detach()


def forward_backward(
    model: nn.Module,
    tokens: torch.Tensor,
    targets: torch.Tensor,
    valid_tokens: int | torch.Tensor,
    dtype: torch.dtype,
    loss_function: LossFunction = plain_loss,
    after_micro_batch: Callable[[], None] | None = None,
) -> torch.Tensor:
    """Loss (fp32, on the device) of the whole step; leaves its gradient in the weights.

    `tokens`, `targets`: int64 [M, B, S], M micro-batches; `valid_tokens`: a number, or a tensor that is at least 1.
    The loss is the sum over the valid tokens of all of them divided by their number. (A mean of the micro-batches'
    means would weigh tokens of a sparse micro-batch more.) `after_micro_batch` is called after each backward pass.
    """
    total = torch.zeros((), device=tokens.device)
    divisor = valid_tokens if isinstance(valid_tokens, torch.Tensor) else max(valid_tokens, 1)
    for micro_tokens, micro_targets in zip(tokens, targets, strict=True):
        accumulate(model, micro_tokens, micro_targets, divisor, total, dtype, loss_function)
        if after_micro_batch is not None:
            after_micro_batch()
    return total


def gatherer(optimizer: torch.optim.Optimizer, micro_batches: int) -> Callable[[], None] | None:
    """What is to be called after each backward pass of a step of so many micro-batches; None: nothing is."""
    return optimizer.gather if isinstance(optimizer, FusedAdamW) and micro_batches > 1 else None


def finish_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: torch.Tensor,
    *,
    gradient_clip: float,
    limits: Limits,
    keep_gradients: bool = False,
) -> torch.Tensor:
    """Clip the gradients that are in the weights and apply them, unless `loss` or their norm is beyond `limits`.

    Returns what `train_step` does. The gradients are gone afterwards; with `keep_gradients` their tensors stay where
    they are, filled with zeros.
    """
    if isinstance(optimizer, FusedAdamW):
        return optimizer.finish(
            loss,
            gradient_clip=gradient_clip,
            loss_limit=limits.loss,
            gradient_limit=limits.gradient_norm,
            keep_gradients=keep_gradients,
        )
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm(gradients, foreach=True)
    return apply_gradients(
        parameters,
        optimizer,
        loss,
        norm,
        gradient_clip=gradient_clip,
        limits=limits,
        keep_gradients=keep_gradients,
    )


def apply_gradients(
    parameters: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    loss: torch.Tensor,
    norm: torch.Tensor,
    *,
    gradient_clip: float,
    limits: Limits,
    keep_gradients: bool = False,
) -> torch.Tensor:
    """`finish_step` from the gradients' `norm` on; `parameters`: those that have a gradient."""
    if gradient_clip > 0:
        nn.utils.clip_grads_with_norm_(parameters, gradient_clip, norm, foreach=True)
    # Every comparison with NaN is false, and Inf is above any finite limit: one expression covers all causes.
    healthy = (loss <= limits.loss) & (norm <= limits.gradient_norm)
    skipped = healthy.logical_not().float()
    # The protocol by which torch.amp.GradScaler skips steps; the fused optimizer's kernel reads the flag.
    optimizer.found_inf = skipped  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad(set_to_none=not keep_gradients)
    return torch.stack([loss, norm, skipped])


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens: torch.Tensor,
    targets: torch.Tensor,
    valid_tokens: int | torch.Tensor,
    *,
    dtype: torch.dtype,
    gradient_clip: float,
    limits: Limits,
    loss_function: LossFunction = plain_loss,
) -> torch.Tensor:
    """Do one step; return fp32 [3] on the device: loss, gradient norm before clipping, 1 if it was skipped else 0.

    Whether to skip is decided on the device: the fused optimizer leaves weights, moments and its own step count alone
    where `found_inf` is 1. So the host, which at small batches is what limits the speed, waits once a step, when it
    reads the result.
    """
    gather = gatherer(optimizer, len(tokens))
    loss = forward_backward(model, tokens, targets, valid_tokens, dtype, loss_function, gather)
    return finish_step(model, optimizer, loss, gradient_clip=gradient_clip, limits=limits)
