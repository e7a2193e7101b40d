"""Pipeline parallelism by torch.distributed.pipelining: which layers are whose, and a step's micro-batches through them."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from tileflash.parallel.layout import Layout
from tileflash.parallel.ranks import Ranks
from tileflash.parallel.stage import Stage

_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb": ScheduleInterleavedZeroBubble,
}


def layers_of_stages(n_layer: int, layout: Layout) -> list[range]:
    """The numbers of each stage's layers; the first stages have one more where they do not divide, for the last has
    the head besides."""
    size, more = divmod(n_layer, layout.stages)
    starts = [stage * size + min(stage, more) for stage in range(layout.stages + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


class Pipeline:
    """The stages of this rank as PyTorch's schedule runs them, for steps of one shape: `micro_batches` of [`batch`, `length`] tokens,
    `length` being the positions that this rank has of a sequence."""

    def __init__(
        self, stages: list[Stage], ranks: Ranks, micro_batches: int, batch: int, length: int, device: torch.device
    ) -> None:
        layout = ranks.layout
        config = stages[0].model.config
        self._divisor = 1.0
        self._has_first, self._has_last = stages[0].is_first, stages[-1].is_last
        tokens = torch.empty(batch, length, dtype=torch.int64, device="meta")
        rows = length // (layout.tensor if layout.sequence_parallel else 1)
        stream = torch.empty(batch, rows, config.n_embd, device="meta", requires_grad=True)
        loss = torch.empty(1, device="meta", requires_grad=True)
        pipeline_stages = [
            PipelineStage(
                stage,
                stage.index,
                layout.stages,
                device,
                input_args=(tokens if stage.is_first else stream,),
                output_args=(loss if stage.is_last else stream,),
                group=ranks.pipeline_group,
            )
            for stage in stages
        ]
        several = layout.stages > layout.pipeline
        self._schedule = _SCHEDULES[layout.schedule](
            pipeline_stages if several else pipeline_stages[0],
            micro_batches,
            loss_fn=self._scaled,
            # The loss is a sum, divided by the number of valid tokens of the whole step.
            scale_grads=False,
        )

    def _scaled(self, loss_sum: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss_sum.sum() / self._divisor

    def step(self, tokens: torch.Tensor, divisor: float, **inputs: torch.Tensor) -> torch.Tensor:
        """Forward and backward of all micro-batches; fp32 scalar: this rank's part of the loss, 0 but on the last stage.

        `tokens`, and `inputs` of every stage's forward (targets among them): [micro-batches x batch, length].
        """
        self._divisor = divisor
        losses: list[torch.Tensor] = []
        first = (tokens,) if self._has_first else ()
        target = inputs["targets"] if self._has_last else None
        self._schedule.step(*first, target=target, losses=losses, **inputs)
        if not losses:
            return torch.zeros((), device=tokens.device)
        return torch.stack([loss.detach() for loss in losses]).sum()
