"""A model cut for this rank, used as if it were whole: tokens in, the loss or logits out."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate, Shard

from tileflash.models import Model
from tileflash.parallel.attention import DocumentAttention
from tileflash.parallel.blocks import Part
from tileflash.parallel.context import context_positions
from tileflash.parallel.cross_entropy import vocabulary_parallel_loss_sum
from tileflash.parallel.ranks import Ranks
from tileflash.parallel.tensor import cut_model, first_row, local_part, whole, whole_for_parts

LossSum = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # logits [B, S, V], targets [B, S] -> scalar


class ParallelModel(nn.Module):
    """tokens int64 [B, S] -> logits [B, S, vocab_size] or, with targets, the sum of the valid losses of this rank's positions.

    `loss_sum` is the loss of whole logits, `ignored` the target that counts nothing, `dtype` that of the computation, `documents` the
    model's attention where it must be told of documents. Logits are the same on all ranks of a data rank, the loss on those of a
    tensor group.
    """

    def __init__(
        self,
        model: Model,
        ranks: Ranks,
        *,
        loss_sum: LossSum,
        ignored: int,
        dtype: torch.dtype,
        documents: DocumentAttention | None = None,
    ) -> None:
        super().__init__()
        self.layout = ranks.layout
        self._ranks, self._loss_sum, self._ignored, self._dtype = ranks, loss_sum, ignored, dtype
        self._mesh, self._context_mesh = ranks.mesh["tensor"], ranks.token_mesh["context"]
        self._documents = documents
        self._split = Shard(1) if self.layout.sequence_parallel else Replicate()
        if self.layout.tensor > 1:
            cut_model(model, self._mesh, sequence_parallel=self.layout.sequence_parallel)
        self.model = model
        if self.layout.replicas > 1:
            self._share()

    def _share(self) -> None:
        """Hand weights and gradients to FSDP2, a layer at a time; whatever the stage, it reduces gradients by a sum."""
        layout, mesh = self.layout, self._ranks.mesh
        data = mesh["shard"] if layout.shards_weights else mesh["replicate", "shard"]
        # Without shards a gathered weight is a second copy: it is given back after use, as in stage 3.
        brief = layout.zero_stage in (0, 3)
        for layer in self.model.layers:
            fully_shard(layer, mesh=data, reshard_after_forward=brief)
        fully_shard(self, mesh=data)
        for module in self.modules():
            if isinstance(module, FSDPModule):
                # The loss is already divided by the number of valid tokens of all ranks.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def before_micro_batch(self, last: bool) -> None:
        """Say which micro-batch of the step comes: stages 0 and 1 reduce gradients once a step, 2 and 3 each time."""
        if isinstance(self, FSDPModule):
            self.set_requires_gradient_sync(last or self.layout.zero_stage >= 2)
            # Stages 1 and 2 gather the weights once a step.
            self.set_reshard_after_backward(last or self.layout.zero_stage in (0, 3))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        length = tokens.shape[1]
        # Samples of text have any length; what comes after a token does not reach it.
        tokens = F.pad(tokens, (0, -length % self.layout.length_multiple))
        positions = self._positions(tokens)
        if self._documents is not None:
            self._documents.ids = _at(self._documents.ids_of(tokens), positions)
        tokens = _at(tokens, positions)
        if targets is not None:
            targets = _at(targets, positions)
        logits_or_loss = (
            self._whole(tokens, targets, positions)
            if self.layout.tensor == 1
            else self._cut(tokens, targets, positions)
        )
        if targets is not None or positions is None:
            return logits_or_loss if targets is not None else logits_or_loss[:, :length]
        return self._whole_sequence(logits_or_loss)[:, :length]

    def _positions(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """int64: where in the samples this rank's tokens stand; None: it has all of them."""
        if self.layout.context == 1:
            return None
        return context_positions(tokens.shape[1], self._context_mesh, zigzag=self.layout.zigzag).to(tokens.device)

    def _whole(
        self, tokens: torch.Tensor, targets: torch.Tensor | None, positions: torch.Tensor | None
    ) -> torch.Tensor:
        with self._autocast(tokens):
            logits: torch.Tensor = self.model(tokens, positions)
        return logits if targets is None else self._loss_sum(logits, targets)

    def _cut(self, tokens: torch.Tensor, targets: torch.Tensor | None, positions: torch.Tensor | None) -> torch.Tensor:
        config = self.model.config
        with self._autocast(tokens):
            features = whole_for_parts(self.model.features(tokens, positions), self._mesh, self._split)
            logits = F.linear(features, local_part(self.model.head_weight))  # [B, S, V of this rank]
        if targets is not None:
            return vocabulary_parallel_loss_sum(
                logits,
                targets,
                first=first_row(config.padded_vocab_size, self._mesh),
                vocab_size=config.vocab_size,
                ignored=self._ignored,
                group=self._ranks.tensor_group,
            )
        return self._whole_logits(logits)[..., : config.vocab_size]

    def _whole_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """[B, S, V of this rank] -> [B, S, padded vocabulary]; the last ranks may have fewer rows."""
        rows = -(-self.model.config.padded_vocab_size // self.layout.tensor)
        padded = F.pad(logits, (0, rows - logits.shape[-1]))
        return whole(padded, self._mesh, Shard(2))

    def _whole_sequence(self, logits: torch.Tensor) -> torch.Tensor:
        """[B, S of this rank, V] -> [B, S, V]."""
        ranks = self.layout.context
        length = logits.shape[1] * ranks
        parts = [
            Part.of(length, rank, ranks, zigzag=self.layout.zigzag).positions(logits.device) for rank in range(ranks)
        ]
        return whole(logits.contiguous(), self._context_mesh, Shard(1))[:, torch.cat(parts).argsort()]

    def _autocast(self, tokens: torch.Tensor) -> torch.autocast:
        return torch.autocast(tokens.device.type, dtype=self._dtype, enabled=self._dtype != torch.float32)


def _at(x: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    """`x` [B, S] at this rank's positions."""
    return x if positions is None else x[:, positions]
