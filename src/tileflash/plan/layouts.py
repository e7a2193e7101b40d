"""Which layouts of N ranks there are for a model, and the plan of each."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tileflash.parallel.layout import Layout
from tileflash.plan.count import StepCount, StepShape, count_step, extrapolated
from tileflash.plan.machine import Machine
from tileflash.plan.predict import StepTime, step_time

LONG = 16384  # tokens from which on context ranks are worth looking at
MOST_STAGES = 16  # pipeline ranks
_FEW = (2, 3)  # layers of a rank from which more are reckoned


@dataclass(frozen=True)
class Plan:
    """A layout with what its fullest rank holds and how long its slowest takes. `time` is None where the dtype is not bf16."""

    layout: Layout
    shape: StepShape
    count: StepCount
    time: StepTime | None
    step_tokens: int
    fits: bool

    @property
    def tokens_per_s(self) -> float | None:
        """Of all ranks."""
        return None if self.time is None else self.step_tokens / self.time.total_ms * 1e3


def plan_layouts(
    wanted: Sequence[tuple[StepShape, Layout]], machine: Machine, *, by_few_layers: bool = False
) -> list[Plan]:
    """The plan of each, in order; ValueError where one cannot be.

    `by_few_layers`: counted with 2 and with 3 layers a rank, from which all follow in the tenth of the time.
    """
    tasks = [(shape, layout, rank) for shape, layout in wanted for rank in _seen(layout)]
    counts = iter(_counted(tasks, by_few_layers=by_few_layers))
    plans = []
    for shape, layout in wanted:
        of_ranks = [next(counts) for _ in _seen(layout)]
        fullest = max(of_ranks, key=lambda count: count.peak_bytes)
        time = None
        if str(shape.dtype) == "torch.bfloat16":
            time = max((step_time(count, shape, layout, machine) for count in of_ranks), key=lambda time: time.total_ms)
        tokens = shape.batch * shape.length * shape.micro_batches * layout.data
        plans.append(Plan(layout, shape, fullest, time, tokens, fullest.peak_bytes <= machine.usable_bytes))
    return plans


def _seen(layout: Layout) -> tuple[int, ...]:
    """The pipeline ranks that differ: the first holds most passes, the last has the logits."""
    return (0, layout.pipeline - 1) if layout.pipeline > 1 else (0,)


Task = tuple[StepShape, Layout, int]  # of which pipeline rank


def _counted(tasks: list[Task], *, by_few_layers: bool) -> list[StepCount]:
    parts = [_with_few_layers(task) if by_few_layers else [(task, 0)] for task in tasks]
    counts = iter(_in_processes([task for part in parts for task, _ in part]))
    found = []
    for part in parts:
        few = next(counts)
        found.append(few if len(part) == 1 else extrapolated(few, next(counts), part[0][1]))
    return found


def _with_few_layers(task: Task) -> list[tuple[Task, int]]:
    """What to count of a rank with many layers, and how many layers it has more: every phase of the step grows by the same with each."""
    shape, layout, pipeline_rank = task
    layers, more = divmod(shape.model.n_layer, layout.pipeline)
    layers += int(pipeline_rank < more)
    if layers <= _FEW[1]:
        return [(task, 0)]
    return [
        (
            (replace(shape, model=replace(shape.model, n_layer=few * layout.pipeline)), layout, pipeline_rank),
            layers - few,
        )
        for few in _FEW
    ]


def _in_processes(tasks: list[Task]) -> list[StepCount]:
    """Each task in a process of its own: PyTorch keeps what it knows of process groups, and a next one would find the last one's."""
    if all(layout.ranks == 1 for _, layout, _ in tasks):
        return [count_step(shape) for shape, _, _ in tasks]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tileflash.plan.count_ranks"])
    with context.Pool(min(len(tasks), max(2, (os.cpu_count() or 2) - 1)), maxtasksperchild=1) as pool:
        return pool.map(_count, tasks, chunksize=1)


def _count(task: Task) -> StepCount:
    import torch

    from tileflash.plan.count_ranks import count_rank_step

    torch.set_num_threads(1)
    shape, layout, pipeline_rank = task
    return count_step(shape) if layout.ranks == 1 else count_rank_step(shape, layout, pipeline_rank)


def layouts_for(
    shape: StepShape, world: int, gpus_per_host: int, step_samples: int, *, zero_stages: Sequence[int] = (0, 1, 3)
) -> Iterator[tuple[StepShape, Layout]]:
    """Layouts of `world` ranks with a step of `step_samples` samples each, tensor ranks within a host; `shape.batch` samples a pass.

    Tensor ranks share the sequence, too; context ranks only where samples are of LONG tokens or more, at most
    MOST_STAGES pipeline ranks. What the model or the step does not allow is left out.
    """
    powers = (_powers(gpus_per_host), _powers(world), _powers(min(world, MOST_STAGES)))
    for tensor, context, pipeline in itertools.product(*powers):
        others = tensor * context * pipeline
        if world % others or (context > 1 and not (shape.flash and shape.length >= LONG)):
            continue
        data = world // others
        if step_samples % (shape.batch * data):
            continue
        passes = step_samples // (shape.batch * data)
        for zero in zero_stages if data * context > 1 else (0,):
            layout = Layout(data, tensor, tensor > 1, zero, context, "ring", pipeline, "1f1b")
            try:
                layout.check_model(shape.model, shape.length)
                layout.check_micro_batches(passes)
            except ValueError:  # a layout that cannot be is none to choose from
                continue
            yield replace(shape, micro_batches=passes), layout


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]
