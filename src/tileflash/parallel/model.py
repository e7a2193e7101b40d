"""A model cut for this rank, used as if it were whole: tokens in, the loss or logits out."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard

from tileflash.models import Model
from tileflash.parallel.attention import DocumentAttention
from tileflash.parallel.blocks import Part
from tileflash.parallel.context import Positions
from tileflash.parallel.pipeline import Pipeline, layers_of_stages
from tileflash.parallel.ranks import Ranks
from tileflash.parallel.stage import LossSum, Stage
from tileflash.parallel.tensor import cut_model, whole


class ParallelModel(nn.Module):
    """tokens int64 [B, S] -> logits [B, S, vocab_size] or, with targets, the sum of the valid losses of this rank's positions.

    `loss_sum` is the loss of whole logits, `ignored` the target that counts nothing, `dtype` that of the computation, `documents` the
    model's attention where it must be told of documents. Logits are the same on all ranks of a data rank, the loss on those of a
    tensor and pipeline group. With several pipeline ranks this call goes through them one after the other and has no gradient; `step`
    is what trains.
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
        self.config, self.layout = model.config, ranks.layout
        self._ranks, self._documents = ranks, documents
        self._context_mesh = ranks.token_mesh["context"]
        self._positions = Positions(self._context_mesh, zigzag=self.layout.zigzag)
        self._pipeline: Pipeline | None = None  # from the first step on
        if self.layout.tensor > 1:
            cut_model(model, ranks.mesh["tensor"], sequence_parallel=self.layout.sequence_parallel)
        count, layers = self.layout.stages, layers_of_stages(self.config.n_layer, self.layout)
        self.stages = nn.ModuleList(
            Stage(
                model, index, count, layers[index], ranks,
                loss_sum=loss_sum, ignored=ignored, dtype=dtype, documents=documents,
            )
            for index in range(ranks.pipeline_rank, count, self.layout.pipeline)
        )  # fmt: skip

    def step(self, tokens: torch.Tensor, targets: torch.Tensor, divisor: int) -> torch.Tensor:
        """Forward and backward of a step's micro-batches, tokens and targets int64 [M, B, S].

        The gradient is left in the weights; fp32 scalar: this rank's part of the sum of losses divided by `divisor`.
        """
        if self.layout.pipeline > 1:
            return self._pipelined(tokens, targets, divisor)
        (stage,) = self.stages
        total, last = torch.zeros((), device=tokens.device), len(tokens) - 1
        for index, (micro_tokens, micro_targets) in enumerate(zip(tokens, targets, strict=True)):
            self.before_micro_batch(stage, index == last)
            part = self(micro_tokens, micro_targets) / divisor
            part.backward()
            total += part.detach()
        return total

    def before_micro_batch(self, stage: nn.Module, last: bool) -> None:
        """ZeRO stages 0 and 1 reduce gradients once a step, 2 and 3 with each micro-batch."""
        if isinstance(stage, FSDPModule):
            stage.set_requires_gradient_sync(last or self.layout.zero_stage >= 2)
            # Stages 1 and 2 gather the weights once a step.
            stage.set_reshard_after_backward(last or self.layout.zero_stage in (0, 3))

    def _pipelined(self, tokens: torch.Tensor, targets: torch.Tensor, divisor: int) -> torch.Tensor:
        micro_batches, batch, _ = tokens.shape
        x, inputs = self.part_of(tokens.flatten(0, 1), targets.flatten(0, 1))
        if self._pipeline is None:
            stages: list[Any] = list(self.stages)
            self._pipeline = Pipeline(stages, self._ranks, micro_batches, batch, x.shape[1], tokens.device)
        return self._pipeline.step(x, float(divisor), **inputs)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        length = tokens.shape[1]
        # Samples of text have any length; what comes after a token does not reach it.
        tokens = F.pad(tokens, (0, -length % self.layout.length_multiple))
        x, inputs = self.part_of(tokens, targets)
        if self.layout.pipeline == 1:
            result: torch.Tensor = self.stages[0](x, **inputs)
        else:
            result = self._one_after_the_other(x, inputs)
        if targets is not None:
            return result[0]
        if self.layout.context > 1:
            result = self._whole_sequence(result)
        return result[:, :length]

    def part_of(
        self, tokens: torch.Tensor, targets: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(tokens, further inputs of every stage) [B, S], at this rank's positions of whole samples."""
        inputs = {} if targets is None else {"targets": targets}
        if self._documents is not None:
            inputs["document_ids"] = self._documents.ids_of(tokens)
        if self.layout.context > 1:
            positions = self._positions(tokens.shape[1], tokens.device)
            tokens, inputs = tokens[:, positions], {name: tensor[:, positions] for name, tensor in inputs.items()}
        return tokens, inputs

    @torch.no_grad()
    def _one_after_the_other(self, tokens: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """What the last stage gives, on all ranks of the pipeline."""
        layout, config = self.layout, self.config
        batch, length = tokens.shape
        own = {int(stage.index): stage for stage in self.stages}  # type: ignore[arg-type]
        shape: tuple[int, ...] = (batch, length // (layout.tensor if layout.sequence_parallel else 1), config.n_embd)
        x = tokens
        for index in range(layout.stages):
            if index == layout.stages - 1:
                shape = (1,) if "targets" in inputs else (batch, length, config.vocab_size)
            # Of a mixed precision too: the residual stream is in fp32, and logits lose nothing.
            x = (
                own[index](x, **inputs).float().contiguous()
                if index in own
                else torch.empty(shape, device=tokens.device)
            )
            dist.broadcast(x, group=self._ranks.pipeline_group, group_src=index % layout.pipeline)
        return x

    def _whole_sequence(self, logits: torch.Tensor) -> torch.Tensor:
        """[B, S of this rank, V] -> [B, S, V]."""
        ranks = self.layout.context
        length = logits.shape[1] * ranks
        parts = [Part.of(length, rank, ranks, zigzag=self.layout.zigzag) for rank in range(ranks)]
        places = torch.cat([part.positions(logits.device) for part in parts]).argsort()
        return whole(logits.contiguous(), self._context_mesh, Shard(1))[:, places]
