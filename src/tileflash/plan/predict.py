"""How long a counted step takes on a machine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tileflash.parallel.layout import Layout
from tileflash.plan.count import Messages, StepCount, StepShape
from tileflash.plan.machine import (
    ATTENTION_SHARE,
    EAGER_OPERATOR_US,
    LINK_SHARE,
    MEMORY_SHARE,
    MESSAGE_US,
    OPERATOR_US,
    PRODUCT_SHARE,
    Machine,
)


@dataclass(frozen=True)
class StepTime:
    """Milliseconds of a step: computing, messages that are waited for by the kind of ranks, and idle in the pipeline."""

    compute_ms: float
    waiting_ms: dict[str, float] = field(default_factory=dict)
    idle_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        """All of it."""
        return self.compute_ms + sum(self.waiting_ms.values()) + self.idle_ms


def step_time(count: StepCount, shape: StepShape, layout: Layout, machine: Machine) -> StepTime:
    """The time of a step of `layout` whose slowest rank is `count`. See `machine.assumptions`."""
    work, peak, memory = count.work, machine.gpu.bf16_tflops * 1e9, machine.gpu.memory_gb_per_s * 1e6  # in a ms
    attention_ms = work.attention_flops / (peak * ATTENTION_SHARE)
    compute_ms = work.product_flops / (peak * PRODUCT_SHARE) + attention_ms + work.moved_bytes / (memory * MEMORY_SHARE)
    compute_ms += work.operators * OPERATOR_US * 1e-3
    if layout.ranks > 1:
        compute_ms = max(compute_ms, work.operators * EAGER_OPERATOR_US * 1e-3)
    passes = shape.micro_batches
    waiting = {axis: _message_ms(axis, messages, layout, machine) for axis, messages in count.messages.items()}
    if "data" in waiting:
        # What the messages can hide behind: backward of the last pass; with gathered weights the first pass, too; stages 2 and 3 send in
        # every pass.
        window = {0: 2 / 3 / passes, 1: 1 / passes, 2: 2 / 3 + 1 / 3 / passes, 3: 1.0}[layout.zero_stage] * compute_ms
        layers = shape.model.n_layer // layout.pipeline + 1
        waiting["data"] = max(waiting["data"] - window, waiting["data"] / layers)
    if "context" in waiting:
        waiting["context"] = max(waiting["context"] - attention_ms, 0.0)
    idle_ms = 0.0
    if layout.pipeline > 1:
        idle_ms = (layout.pipeline - 1) / passes * compute_ms
        rows = shape.length // layout.context // (layout.tensor if layout.sequence_parallel else 1)
        one = Messages(4.0 * shape.batch * rows * shape.model.n_embd, 1)
        # There and back once through all ranks; further messages are on their way while others compute.
        waiting["pipeline"] = 2 * (layout.pipeline - 1) * _message_ms("pipeline", one, layout, machine)
    return StepTime(compute_ms, waiting, idle_ms)


def _message_ms(axis: str, messages: Messages, layout: Layout, machine: Machine) -> float:
    inner = {
        "tensor": 1,
        "context": layout.tensor,
        "data": layout.tensor,
        "pipeline": layout.tensor * layout.replicas,
    }.get(axis, 1)
    size = {
        "tensor": layout.tensor,
        "context": layout.context,
        "data": layout.replicas,
        "pipeline": layout.pipeline,
    }.get(axis, layout.ranks)
    speed = machine.link_gb_per_s
    if inner * size > machine.gpus_per_host:
        # A ring enters and leaves a host once, by the networks of all its members there.
        members = max(1, machine.gpus_per_host // inner)
        speed = min(speed, machine.network_gb_per_s * (1 if axis == "pipeline" else members))
    hops = 1.0 if axis in ("context", "pipeline") else max(1.0, math.log2(size))
    return messages.nbytes / (speed * LINK_SHARE * 1e6) + messages.number * MESSAGE_US * hops * 1e-3
