"""A step counted before it runs: the trainer's own code on tensors that have shapes and no memory (PyTorch's FakeTensorMode).

So every flag counts as what it does, and no table of bytes has to be kept true by hand.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tileflash.models import AttentionFunction, Model, ModelConfig, empty_model, unfused_attention
from tileflash.models.operators import PLAIN
from tileflash.plan.gpu_operators import GpuOperators, attend, register_planned_kernels
from tileflash.plan.tracker import StepTracker, Storage, Work
from tileflash.train.fused import fused_loss, fused_operators
from tileflash.train.optimizer import build_optimizer
from tileflash.train.step import Limits, accumulate, finish_step, plain_loss

# Of cuBLAS, for each thread that calls it: forward and backward passes are in two (docs/training.md, CUDA graphs).
GPU_WORKSPACE_BYTES = 2 * 32 * 2**20
PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "weights in 16 bits",
    "activations",
    "attention matrices",
    "logits",
    "messages",
    "workspace",
)


@dataclass(frozen=True)
class StepShape:
    """What a rank computes: a model, `micro_batches` forward passes of [`batch`, `length`] tokens of whole samples, and how."""

    model: ModelConfig
    batch: int
    length: int
    micro_batches: int = 1
    flash: bool = False
    fused_operators: bool = False
    dtype: torch.dtype = torch.bfloat16
    on_gpu: bool = True


@dataclass(frozen=True)
class Messages:
    """What a rank sends in a step."""

    nbytes: float
    number: float


@dataclass(frozen=True)
class Moment:
    """Bytes by PARTS, and of the activations by operator."""

    parts: dict[str, int]
    operators: dict[str, int]

    @property
    def nbytes(self) -> int:
        """The sum of the parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class StepCount:
    """The highest moment of each phase of a step, and what is computed and sent in it.

    Phases: "early", forward and the beginning of the backward pass, "late", the rest of it, and "update".
    """

    phases: dict[str, Moment]
    work: Work
    messages: dict[str, Messages] = field(default_factory=dict)  # by the kind of ranks that they are between

    @property
    def peak(self) -> Moment:
        """The highest moment of all."""
        return max(self.phases.values(), key=lambda moment: moment.nbytes)

    @property
    def peak_bytes(self) -> int:
        """What lives then."""
        return self.peak.nbytes


def count_step(shape: StepShape) -> StepCount:
    """One step of one rank, with moments that are there already."""
    with fake_step(shape) as (tracker, model):
        optimizer = build_optimizer(model, 1e-4, 0.1)
        make_moments(list(model.parameters()), optimizer)
        batches = data_of(shape)
        turn_in_the_middle(list(model.layers), tracker)
        loss_function = functools.partial(fused_loss, backend="triton") if shape.fused_operators else plain_loss
        total = torch.zeros(())
        work = Work()
        # The first micro-batch, and one that adds to its gradient: the further ones are as the second.
        for number in range(min(shape.micro_batches, 2)):
            tracker.begin("early")
            tracker.take_work()
            accumulate(model, *batches, 1, total, shape.dtype, loss_function)
            done = tracker.take_work()
            work.add(done, shape.micro_batches - 1 if number else 1)
        tracker.begin("update")
        gradients = tracker.numbers_of(parameter.grad for parameter in model.parameters())
        finish_step(model, optimizer, total, gradient_clip=1.0, limits=Limits(1e9, 1e9))
        tracker.begin("")
        work.add(tracker.take_work())
        moments = [value for state in optimizer.state.values() for value in state.values()]
        known = {
            "parameters": tracker.numbers_of(model.parameters()),
            "optimizer": tracker.numbers_of(moments),
            "gradients": gradients,
        }
        return sorted_count(shape, tracker, known, [p.shape for p in model.parameters()], work)


@contextmanager
def fake_step(shape: StepShape, attention: AttentionFunction | None = None) -> Iterator[tuple[StepTracker, Model]]:
    """A model without memory, and what counts the operators that are called within `with`."""
    register_planned_kernels()
    operators = fused_operators("triton") if shape.fused_operators else PLAIN
    chosen = attention or (attend if shape.flash else unfused_attention)
    model = empty_model(shape.model, chosen, "meta", operators=operators)
    tracker = StepTracker(rounded=shape.on_gpu)
    with FakeTensorMode(allow_non_fake_inputs=True):
        without_memory(model)
        with gpu_operators(shape.on_gpu), tracker:
            tracker.hold(model.parameters(), "parameter")
            tracker.weights = {tuple(parameter.shape) for parameter in model.parameters()}
            yield tracker, model


@contextmanager
def gpu_operators(on_gpu: bool) -> Iterator[None]:
    if not on_gpu:
        yield
        return
    with GpuOperators():
        yield


def without_memory(model: nn.Module) -> None:
    """Put fake tensors of the CPU in the place of a model's parameters and buffers, which are on "meta"."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype))
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def make_moments(parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer make its moments, as a first step does."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def turn_in_the_middle(layers: Sequence[nn.Module], tracker: StepTracker) -> None:
    """Let the phase "late" begin when the backward pass has done half of the layers.

    Memory is highest at one end of the backward pass, where all activations are there, or at the other, where all gradients are; each end
    grows by the same with every layer.
    """

    def after_forward(module: nn.Module, given: Any, result: tuple[torch.Tensor, ...]) -> None:
        if result[0].requires_grad:
            result[0].register_hook(lambda gradient: tracker.begin("late"))

    layers[len(layers) // 2].register_forward_hook(after_forward)


def data_of(shape: StepShape) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens and targets of one micro-batch; all of a step's, and the next step's, are there too."""
    numbers = torch.zeros(2 * 2 * shape.micro_batches, shape.batch, shape.length, dtype=torch.int64)
    return numbers[0], numbers[1]


def sorted_count(
    shape: StepShape, tracker: StepTracker, known: dict[str, set[int]], weights: Sequence[torch.Size], work: Work
) -> StepCount:
    """What lived at the peak, by what it is for. `known`: numbers of storages by part; `weights`: the shapes of weights, by which copies
    of them and their gradients are known."""
    of = {number: part for part, numbers in known.items() for number in numbers}
    matrices = {tuple(size) for size in weights if len(size) == 2}
    phases = {}
    for phase, (_, storages) in tracker.highest.items():
        parts: Counter[str] = Counter({"workspace": GPU_WORKSPACE_BYTES if shape.on_gpu else 0})
        operators: Counter[str] = Counter()
        for number, storage in storages.items():
            part = of.get(number) or _part(shape, storage, matrices)
            parts[part] += storage.nbytes
            if part == "activations":
                operators[storage.operator.rpartition("::")[2]] += storage.nbytes
        phases[phase] = Moment({part: parts[part] for part in PARTS}, dict(operators.most_common()))
    return StepCount(phases, work)


def _part(shape: StepShape, storage: Storage, matrices: set[tuple[int, ...]]) -> str:
    size = storage.shape
    if storage.operator == "aten::empty":
        return "messages"  # FSDP's gathered weights, and what is sent or comes
    if size in matrices or size[::-1] in matrices:
        return "weights in 16 bits" if storage.dtype in (torch.bfloat16, torch.float16) else "gradients"
    if len(size) >= 2 and size[-1] in _vocabularies(shape.model) and size[-1] != shape.model.n_embd:
        return "logits"
    if not shape.flash and len(size) >= 3 and size[-2:] == (shape.length, shape.length):
        return "attention matrices"
    return "activations"


def _vocabularies(model: ModelConfig) -> set[int]:
    """How wide logits are, of one rank and of several."""
    return {-(-size // ranks) for size in (model.vocab_size, model.padded_vocab_size) for ranks in (1, 2, 4, 8, 16)}


def extrapolated(few: StepCount, one_more: StepCount, layers: int) -> StepCount:
    """The count of as many layers more than `few` has, `one_more` being of one layer more."""

    def grown(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
        found = {name: a.get(name, 0) + layers * (b.get(name, 0) - a.get(name, 0)) for name in {**a, **b}}
        return {name: max(number, 0) for name, number in found.items()}

    phases = {
        phase: Moment(
            grown(few.phases[phase].parts, moment.parts), grown(few.phases[phase].operators, moment.operators)
        )
        for phase, moment in one_more.phases.items()
    }
    work = Work()
    work.add(few.work, 1 - layers)
    work.add(one_more.work, layers)
    messages = {
        axis: Messages(
            *(a + layers * (b - a) for a, b in zip(astuple(few.messages[axis]), astuple(message), strict=True))
        )
        for axis, message in one_more.messages.items()
    }
    return StepCount(phases, work, messages)
