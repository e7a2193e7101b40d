"""Some layers of a model, or all of them, with what stands before the first and behind the last one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate, Shard

from tileflash.models import GPT2, Model
from tileflash.parallel.attention import DocumentAttention
from tileflash.parallel.context import Positions
from tileflash.parallel.cross_entropy import vocabulary_parallel_loss_sum
from tileflash.parallel.ranks import Ranks
from tileflash.parallel.tensor import first_row, local_part, whole, whole_for_parts

LossSum = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # logits [B, S, V], targets [B, S] -> scalar


class Stage(nn.Module):
    """Stage `index` of `count`; of tensors, this rank's parts throughout.

    The first takes tokens int64 [B, S], the others the residual stream [B, S, C] (with sequence parallelism [B, S / ranks, C]); the last
    gives logits [B, S, vocab_size] or, with targets, the sum of the valid losses, fp32 [1], the others the residual stream.

    `layers`: the numbers of its layers. `loss_sum` is the loss of whole logits, `ignored` the target that counts nothing, `dtype` that of
    the computation, `documents` the model's attention where it must be told of documents.
    """

    def __init__(
        self,
        model: Model,
        index: int,
        count: int,
        layers: range,
        ranks: Ranks,
        *,
        loss_sum: LossSum,
        ignored: int,
        dtype: torch.dtype,
        documents: DocumentAttention | None = None,
    ) -> None:
        super().__init__()
        self.index, self.is_first, self.is_last = index, index == 0, index == count - 1
        self.layout = ranks.layout
        self._ranks, self._loss_sum, self._ignored, self._dtype = ranks, loss_sum, ignored, dtype
        self._mesh = ranks.mesh["tensor"]
        self._positions = Positions(ranks.token_mesh["context"], zigzag=self.layout.zigzag)
        self._documents = documents
        self._split = Shard(1) if self.layout.sequence_parallel else Replicate()
        self.model = _part_of(model, layers, first=self.is_first, last=self.is_last)
        if self.layout.replicas > 1:
            self._share()

    def _share(self) -> None:
        """Hand weights and gradients to FSDP2, a layer at a time; whatever the ZeRO stage, it reduces gradients by a sum."""
        layout, mesh = self.layout, self._ranks.mesh
        data = mesh["shard"] if layout.shards_weights else mesh["replicate", "shard"]
        # Without shards a gathered weight is a second copy: it is given back after use, as in stage 3.
        brief = layout.zero_stage in (0, 3)
        if layout.pipeline > 1 and layout.schedule == "zb":
            # Its backward looks weights up in the autograd graph of the forward pass: given back between the two, they would not be
            # found, and would have no gradient.
            brief = False
        for layer in self._layers():
            fully_shard(layer, mesh=data, reshard_after_forward=brief)
        fully_shard(self, mesh=data)
        for module in self.modules():
            if isinstance(module, FSDPModule):
                # The loss is already divided by the number of valid tokens of all ranks.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def _layers(self) -> list[nn.Module]:
        return list(self.model.layers.children())

    def forward(
        self,
        x: torch.Tensor,
        targets: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        length = x.shape[1]
        if self.layout.sequence_parallel and not self.is_first:
            length *= self.layout.tensor
        positions = None
        if self.layout.context > 1:
            positions = self._positions(length * self.layout.context, x.device)
        if self._documents is not None:
            self._documents.ids = document_ids
        with torch.autocast(x.device.type, dtype=self._dtype, enabled=self._dtype != torch.float32):
            inputs = self.model.layer_inputs(length, positions)
            if self.is_first:
                x = self.model.embed(x, positions)
            update: Any = None
            for layer in self._layers():
                x, update = layer(x, update, *inputs)
            if not self.is_last:
                # What a norm would add first is added before it is sent: one tensor, and the same numbers.
                return x + update
            features = self.model.norm(x, update)[1]
            if self.layout.tensor > 1:
                features = whole_for_parts(features, self._mesh, self._split)
            logits = F.linear(features, local_part(self.model.head_weight))  # [B, S, V of this rank]
        return self._logits(logits) if targets is None else self._loss(logits, targets)[None]

    def _loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        config = self.model.config
        if self.layout.tensor == 1:
            return self._loss_sum(logits[..., : config.vocab_size], targets)
        return vocabulary_parallel_loss_sum(
            logits,
            targets,
            first=first_row(config.padded_vocab_size, self._mesh),
            vocab_size=config.vocab_size,
            ignored=self._ignored,
            group=self._ranks.tensor_group,
        )

    def _logits(self, logits: torch.Tensor) -> torch.Tensor:
        """[B, S, V of this rank] -> [B, S, vocab_size]; the last ranks may have fewer rows."""
        config, tensor = self.model.config, self.layout.tensor
        if tensor > 1:
            rows = -(-config.padded_vocab_size // tensor)
            logits = whole(F.pad(logits, (0, rows - logits.shape[-1])), self._mesh, Shard(2))
        return logits[..., : config.vocab_size]


def _part_of(model: Model, layers: range, *, first: bool, last: bool) -> Model:
    """`model` without what belongs to other stages; what it keeps are the same modules, under the same names."""
    part = copy.copy(model)
    part._modules, part._parameters = dict(model._modules), dict(model._parameters)
    # By their numbers in the whole model, so that every weight keeps its name.
    part.layers = nn.ModuleDict({str(number): model.layers[number] for number in layers})  # type: ignore[assignment]
    if not first:
        if not (last and part.head is None):  # else its weight is the head's
            del part.embedding
        if isinstance(part, GPT2):
            del part.positions
    if not last:
        del part.norm, part.head
    return part
