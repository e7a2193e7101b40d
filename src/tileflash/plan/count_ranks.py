"""A step of one rank among several, counted: the ranks' own code (FSDP2, DTensor, ring attention) with messages that nobody gets.

PyTorch's "fake" process group has as many ranks as it is told, so a layout of 1,024 is counted on a laptop.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule

from tileflash.models import AttentionFunction, empty_model, unfused_attention
from tileflash.parallel.attention import ContextAttention
from tileflash.parallel.layout import Layout
from tileflash.parallel.model import ParallelModel
from tileflash.parallel.pieces import Piece, Pieces
from tileflash.parallel.ranks import Ranks
from tileflash.plan.count import (
    Messages,
    StepCount,
    StepShape,
    data_of,
    gpu_operators,
    make_moments,
    sorted_count,
    turn_in_the_middle,
    without_memory,
)
from tileflash.plan.gpu_operators import KERNELS, attend, register_planned_kernels
from tileflash.plan.tracker import StepTracker, Work
from tileflash.train.optimizer import optimizer_of
from tileflash.train.step import IGNORED_TARGET, Limits, apply_gradients, token_loss_sum


def count_rank_step(shape: StepShape, layout: Layout, pipeline_rank: int = 0) -> StepCount:
    """One step of the first rank that has part `pipeline_rank` of the layers, with moments that are there already.

    `shape` is of one data rank: `batch` samples of `length` tokens a pass, whoever shares them. ValueError where the layout cannot be.
    """
    layout.check_model(shape.model, shape.length)
    layout.check_micro_batches(shape.micro_batches)
    if layout.pipeline > 1 and layout.schedule not in ("gpipe", "1f1b"):
        raise ValueError(f'pipeline_schedule is "{layout.schedule}": the plan knows gpipe and 1f1b')
    if layout.context > 1 and layout.context_kind == "ulysses":
        raise ValueError('context_parallel_kind is "ulysses": the plan knows ring')
    if shape.fused_operators:
        raise ValueError("fused_operators is set: fused operators are for one rank as yet")
    register_planned_kernels()
    rank = pipeline_rank * layout.tensor * layout.replicas
    with _fake_group(layout.ranks, rank), Ranks(layout, "cpu", 60.0, rank) as ranks:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        whole = empty_model(shape.model, _attention(shape, ranks), "meta")
        with mode:
            without_memory(whole)
        shapes = {name: parameter.shape for name, parameter in whole.named_parameters()}
        # Outside the mode: meshes are true tensors. What is made of fake ones is fake without it.
        model = ParallelModel(whole, ranks, loss_sum=token_loss_sum, ignored=IGNORED_TARGET, dtype=shape.dtype)
        del whole
        pieces = Pieces(model, ranks, shapes)
        tracker = StepTracker(rounded=shape.on_gpu)
        with mode, gpu_operators(shape.on_gpu), tracker:
            return count_step_of(shape, layout, model, pieces, tracker, ranks)


def count_step_of(
    shape: StepShape, layout: Layout, model: ParallelModel, pieces: Pieces, tracker: StepTracker, ranks: Ranks
) -> StepCount:
    """The count of one step of a rank's `model`, whose weights are `pieces`, within `tracker`."""
    parameters = [piece.local for piece in pieces]
    tracker.hold(parameters, "parameter")
    tracker.weights = {tuple(p.shape) for p in parameters} | {_of_tensor_rank(piece, layout) for piece in pieces}
    optimizer = optimizer_of(parameters, 1e-4, 0.1)
    make_moments(parameters, optimizer)
    (stage,) = model.stages
    layers: Any = stage.model
    turn_in_the_middle(list(layers.layers.children()), tracker)
    tracker.take_work()
    data = data_of(shape)
    work = Work()
    passes = (
        _pipelined(shape, layout, model, ranks, tracker, data)
        if layout.pipeline > 1
        else _passes(shape, layout, model, data)
    )
    tracker.begin("early")
    for times in passes:
        work.add(tracker.take_work(), times)
        tracker.begin("early")
    tracker.begin("update")
    pieces.take_gradients()
    norm, loss = pieces.gradient_norm_and_loss(torch.zeros(()))
    gradients = [piece.local.grad for piece in pieces]
    known_gradients = tracker.numbers_of(gradients)
    owners = [piece.local for piece in pieces if piece.local.grad is not None]
    del gradients
    apply_gradients(owners, optimizer, loss, norm, gradient_clip=1.0, limits=Limits(1e9, 1e9))
    tracker.begin("")
    work.add(tracker.take_work())
    moments = [value for state in optimizer.state.values() for value in state.values()]
    known = {
        "parameters": tracker.numbers_of(parameters),
        "optimizer": tracker.numbers_of(moments),
        "gradients": known_gradients,
    }
    found = sorted_count(shape, tracker, known, [torch.Size(size) for size in tracker.weights], work)
    found.messages.update(_by_axis(work, ranks))
    return found


def _of_tensor_rank(piece: Piece, layout: Layout) -> tuple[int, ...]:
    """The shape of a weight as a rank has it while it computes."""
    size = list(piece.shape)
    if piece.tensor_dim is not None:
        size[piece.tensor_dim] = -(-size[piece.tensor_dim] // layout.tensor)
    return tuple(size)


def _passes(
    shape: StepShape, layout: Layout, model: ParallelModel, data: tuple[torch.Tensor, torch.Tensor]
) -> Iterator[float]:
    """The passes of a step that differ; after each how often there is one like it."""
    (stage,) = model.stages
    # The last one sends gradients; with stages 1 and 2 the first one alone gathers weights.
    times = [1.0]
    if shape.micro_batches > 1:
        first = [1.0, shape.micro_batches - 2.0] if layout.zero_stage in (1, 2) else [shape.micro_batches - 1.0]
        times = [*(number for number in first if number), 1.0]
    for number, often in enumerate(times):
        model.before_micro_batch(stage, number == len(times) - 1)
        (model(*data) / 1.0).backward()
        yield often


def _pipelined(
    shape: StepShape,
    layout: Layout,
    model: ParallelModel,
    ranks: Ranks,
    tracker: StepTracker,
    data: tuple[torch.Tensor, torch.Tensor],
) -> Iterator[float]:
    """One stage as 1F1B or GPipe has it: some passes forward, one forward and one backward in turn, the rest backward."""
    (stage,) = model.stages
    if isinstance(stage, FSDPModule):
        stage.set_requires_gradient_sync(False)
        stage.set_reshard_after_forward(False)
        stage.set_reshard_after_backward(False)
    live = (
        shape.micro_batches
        if layout.schedule == "gpipe"
        else min(layout.pipeline - ranks.pipeline_rank, shape.micro_batches)
    )
    shown = min(shape.micro_batches, live + 1)
    waiting: list[tuple[torch.Tensor | None, torch.Tensor]] = []
    done = 0
    for number in range(shown):
        tracker.begin("early")
        waiting.append(_forward(shape, layout, model, stage, data))
        if len(waiting) == live or number == shown - 1:
            while waiting and (len(waiting) == live or number == shown - 1):
                done += 1
                if done == shown and isinstance(stage, FSDPModule):
                    yield shape.micro_batches / shown
                    stage.set_requires_gradient_sync(True)
                    stage.set_reshard_after_backward(True)
                _backward(layout, ranks, *waiting.pop(0))
    yield 1.0 if isinstance(stage, FSDPModule) else shape.micro_batches / shown


def _forward(
    shape: StepShape, layout: Layout, model: ParallelModel, stage: nn.Module, data: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor]:
    tokens, inputs = model.part_of(*data)
    received = None
    if not stage.is_first:
        rows = tokens.shape[1] // (layout.tensor if layout.sequence_parallel else 1)
        received = torch.empty(shape.batch, rows, shape.model.n_embd, requires_grad=True)
    return received, stage(tokens if received is None else received, **inputs)


def _backward(layout: Layout, ranks: Ranks, received: torch.Tensor | None, result: torch.Tensor) -> None:
    del received
    if ranks.pipeline_rank == layout.pipeline - 1:
        result.sum().backward()
    else:
        result.backward(torch.empty_like(result))


def _attention(shape: StepShape, ranks: Ranks) -> AttentionFunction:
    if not shape.flash:
        return unfused_attention
    layout = ranks.layout
    if layout.context == 1:
        return attend
    return ContextAttention(ranks.token_mesh["context"], layout.context_kind, attend, KERNELS)


@contextmanager
def _fake_group(size: int, rank: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError(
            "a process group is there already: a plan makes one of its own, and must be alone in its process"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # as in the trainer
            yield
    finally:
        dist.destroy_process_group()


def _by_axis(work: Work, ranks: Ranks) -> dict[str, Messages]:
    axes: dict[str, str] = {}
    for axis, group in _groups(ranks):
        axes.setdefault(group.group_name, axis)
    sent: Counter[str] = Counter()
    number: Counter[str] = Counter()
    for (name, kind), nbytes in work.messages.items():
        axis = axes.get(name, "all")
        sent[axis] += nbytes
        number[axis] += work.message_counts[name, kind]
    return {axis: Messages(float(sent[axis]), float(number[axis])) for axis in sent}


def _groups(ranks: Ranks) -> Sequence[tuple[str, Any]]:
    return (
        ("tensor", ranks.tensor_group),
        ("context", ranks.token_mesh.get_group("context")),
        ("data", ranks.replica_group),
        ("pipeline", ranks.pipeline_group),
    )
