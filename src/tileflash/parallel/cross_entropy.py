"""Cross entropy of logits whose vocabulary is cut among the tensor ranks: no rank ever holds them whole.

Shoeybi et al., "Megatron-LM", 2019, section 3. PyTorch's loss_parallel is the same for a vocabulary without padding;
ours has rows that must not count, and they may be any rank's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def vocabulary_parallel_loss_sum(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    first: int,
    vocab_size: int,
    ignored: int,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Sum of the cross entropies of all valid tokens, fp32, the same on all ranks of `group`.

    `logits` [..., V of this rank], of the vocabulary's rows `first` on; rows from `vocab_size` on are padding and take
    no part. `targets` int64 [...]; `ignored` is one that counts nothing.
    """
    result: torch.Tensor = _CrossEntropySum.apply(
        logits.float().flatten(0, -2), targets.flatten(), first, vocab_size, ignored, group
    )
    return result


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        logits: torch.Tensor,  # [N, v]
        targets: torch.Tensor,  # [N]
        first: int,
        vocab_size: int,
        ignored: int,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        rows, width = logits.shape
        real = min(max(vocab_size - first, 0), width)
        largest = logits[:, :real].amax(1) if real else logits.new_full((rows,), float("-inf"))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        weights = (logits - largest[:, None]).exp_()  # [N, v]
        weights[:, real:] = 0.0
        column = targets - first
        here = (column >= 0) & (column < real)
        column = column.where(here, 0)
        own = logits.gather(1, column[:, None])[:, 0].where(here, 0.0) if width else logits.new_zeros(rows)
        sums = torch.stack([weights.sum(1), own])  # one message for both
        dist.all_reduce(sums, group=group)
        total, chosen = sums.unbind()
        valid = targets != ignored
        context.save_for_backward(weights.div_(total[:, None]), column, here, valid)
        return (largest + total.log() - chosen).where(valid, 0.0).sum()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weights, column, here, valid = context.saved_tensors
        result = weights.clone()
        if result.shape[1]:
            result.scatter_add_(1, column[:, None], -here.to(result.dtype)[:, None])
        result = result.masked_fill_(~valid[:, None], 0.0).mul_(gradient)
        return result, None, None, None, None, None
