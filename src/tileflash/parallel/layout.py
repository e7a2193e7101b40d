"""How ranks share the work, as facts: numbers that multiply to the world size, checked before anything is built."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tileflash.parallel.blocks import key_head_copies

if TYPE_CHECKING:
    from tileflash.models import ModelConfig

CONTEXT_KINDS = ("ring", "ulysses")


@dataclass(frozen=True)
class Layout:
    """`pipeline` x `data` x `context` x `tensor` ranks, numbered with the last one fastest.

    `zero_stage`: what ranks that would hold copies of the weights (data and context ranks) hold one part each of instead;
    `context_kind`: what context ranks do to share a sequence; `schedule`: in which order pipeline ranks work. See docs/parallel.md.
    """

    data: int = 1
    tensor: int = 1
    sequence_parallel: bool = False
    zero_stage: int = 0
    context: int = 1
    context_kind: str = "ring"
    pipeline: int = 1
    schedule: str = "1f1b"

    @property
    def ranks(self) -> int:
        """How many processes there are."""
        return self.pipeline * self.data * self.context * self.tensor

    @property
    def stages(self) -> int:
        """Parts into which the layers are cut: one for each pipeline rank, or two where the schedule goes round twice."""
        return self.pipeline * (2 if self.pipeline > 1 and self.schedule in ("interleaved", "zb") else 1)

    @property
    def replicas(self) -> int:
        """Ranks that have the same part of the model and different tokens: their gradients are summed."""
        return self.data * self.context

    @property
    def shards_weights(self) -> bool:
        """Whether each of the `replicas` keeps only its part of weights and moments between steps (stages 1 to 3)."""
        return self.replicas > 1 and self.zero_stage > 0

    @property
    def zigzag(self) -> bool:
        """Whether a context rank has an early and a late piece of each sequence, not one run of it."""
        return self.context > 1 and self.context_kind == "ring"

    @property
    def length_multiple(self) -> int:
        """Sequences must be a multiple of this many tokens."""
        # What a context rank has of a sequence is cut among its tensor ranks.
        return self.context * math.lcm(2 if self.zigzag else 1, self.tensor if self.sequence_parallel else 1)

    @property
    def label(self) -> str:
        """The end of the log line; CP and ZeRO's stage are in it where there are ranks for them to act on."""
        sequence = self.tensor if self.sequence_parallel else 1
        context = f", CP={self.context}" if self.context > 1 else ""
        zero = f", ZeRO={self.zero_stage}" if self.replicas > 1 else ""
        return f"DP={self.data}, TP={self.tensor}, SP={sequence}, PP={self.pipeline}{context}{zero}"

    def check_world(self, world_size: int | None) -> None:
        """ValueError unless the layout takes exactly `world_size` ranks; None: not started by torchrun."""
        factors = {"data_parallel": self.data, "tensor_parallel": self.tensor}
        if self.pipeline > 1:
            factors["pipeline_parallel"] = self.pipeline
        if self.context > 1:
            factors["context_parallel"] = self.context
        numbers = " * ".join(str(number) for number in factors.values())
        product = f"{' * '.join(factors)} is {numbers} = {self.ranks}"
        if world_size is None and self.ranks > 1:
            raise ValueError(
                f"{product}, and this is a single process: start it by torchrun --nproc-per-node {self.ranks} -m "
                "tileflash train ..."
            )
        if world_size is not None and world_size != self.ranks:
            others = self.ranks // self.data
            fitting = f"--data-parallel {world_size // others}" if world_size % others == 0 else "others"
            raise ValueError(f"{product}: it must be the number of ranks, {world_size} (for example {fitting})")

    def check_micro_batches(self, micro_batches: int) -> None:
        """ValueError where the pipeline's schedule cannot run this many micro-batches in a step."""
        if self.pipeline == 1:
            return
        rounds = max(1, micro_batches // self.pipeline)
        told = f"a step has {micro_batches} micro-batches (total_batch_size / (batch_size * sequence_length * data_parallel))"
        if self.schedule == "1f1b" and micro_batches < self.pipeline:
            raise ValueError(f"{told}: with 1f1b it must have at least pipeline_parallel, {self.pipeline}")
        if self.stages > self.pipeline and micro_batches % rounds:
            fitting = micro_batches // self.pipeline * self.pipeline
            raise ValueError(f"{told}: with {self.schedule} it must be a multiple of {rounds} (for example {fitting})")

    def check_model(self, model: ModelConfig, sequence_length: int) -> None:
        """ValueError where the ranks cannot share the model: what is cut by heads, columns or positions must divide."""
        tensor = self.tensor
        columns = 4 * model.n_embd if model.family == "gpt2" else model.intermediate_size
        for name, value in (("n_head", model.n_head), ("n_kv_head", model.n_kv_head), ("the MLP's width", columns)):
            if value % tensor:
                raise ValueError(
                    f"tensor_parallel is {tensor}: it must divide {name}, {value}, for each rank has whole ones"
                )
        if model.n_layer < self.stages:
            twice = f", and {self.schedule} gives each two of its stages" if self.stages > self.pipeline else ""
            raise ValueError(
                f"pipeline_parallel is {self.pipeline}{twice}: n_layer, {model.n_layer}, must be at least {self.stages}"
            )
        if sequence_length % self.length_multiple:
            given = [f"tensor_parallel, {tensor}"] if self.sequence_parallel else []
            if self.context > 1:
                twice = "twice context_parallel" if self.zigzag else "context_parallel"
                given.insert(0, f"{twice}, {self.context * (2 if self.zigzag else 1)}")
            with_sequence = "with sequence_parallel " if self.sequence_parallel else ""
            raise ValueError(
                f"sequence_length is {sequence_length}: {with_sequence}it must be a multiple of "
                f"{' and of '.join(given)} (for example {-(-sequence_length // self.length_multiple) * self.length_multiple})"
            )
        if self.context > 1 and self.context_kind == "ulysses":
            key_head_copies(model.n_head // tensor, model.n_kv_head // tensor, self.context)


SINGLE = Layout()
