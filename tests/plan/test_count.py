"""What is counted without memory against what is measured: storages of true steps on the CPU, and peaks of an H200 in the ledger."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tileflash
from tileflash.bench.ledger import Line, read
from tileflash.models import ModelConfig, build_model, model_config, parameter_count, unfused_attention
from tileflash.parallel.layout import SINGLE
from tileflash.plan.count import GPU_WORKSPACE_BYTES, StepShape, count_step, extrapolated
from tileflash.plan.machine import machine
from tileflash.plan.predict import step_time
from tileflash.train.optimizer import build_optimizer
from tileflash.train.step import Limits, token_loss_sum, train_step

pytestmark = pytest.mark.usefixtures("one_thread")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SHAPE = StepShape(model_config("llama3-tiny", n_layer=2), 2, 64, flash=True)


@pytest.fixture
def one_thread() -> None:
    torch.set_num_threads(1)


def _measured(suite: str, metric: str) -> dict[tuple[str, int, int, str], Line]:
    lines = read(RESULTS / "train.jsonl", suite=suite, gpu="NVIDIA H200", metric=metric)
    found = {}
    for line in lines:
        if line.median is not None:
            case = line.case
            found[str(case["model"]), int(case["batch"]), int(case["seq"]), line.variant] = line
    return found


def _shape(model: str, batch: int, length: int, variant: str) -> StepShape:
    config: ModelConfig = model_config(model)
    if length > config.max_sequence_length:
        config = replace(config, max_sequence_length=length)
    return StepShape(config, batch, length, flash=variant == "flash")


@pytest.mark.parametrize(
    "case",
    [
        ("gpt2", 4, 64, "flash"),
        ("gpt2", 4, 4096, "baseline"),
        ("llama3-1b", 4, 1024, "baseline"),
        ("llama3-1b", 4, 8192, "flash"),
    ],
)
def test_peaks_and_times_of_an_h200(case: tuple[str, int, int, str]) -> None:
    """Measured with `tileflash compare`, in CUDA graphs: from small batches, where gradients fill the peak, to 126 GB."""
    shape = _shape(*case)
    count = count_step(shape)
    measured = _measured("train", "peak_bytes")[case].median
    assert count.peak_bytes == pytest.approx(measured, rel=0.01)
    if shape.flash:
        time = step_time(count, shape, SINGLE, machine("h200"))
        assert time.total_ms == pytest.approx(_measured("train", "step_ms")[case].median, rel=0.1)


class _Saved:
    """Bytes of the storages that autograd keeps, each once, parameters left out."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.kept: dict[int, torch.UntypedStorage] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._weights:
            self.kept[storage.data_ptr()] = storage
        return tensor

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes() for storage in self.kept.values())


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama3-tiny"])
@pytest.mark.parametrize("flash", [False, True])
def test_what_a_true_step_keeps_on_the_cpu(name: str, flash: bool) -> None:
    """PyTorch's own hooks, in fp32 and without the GPU's operators: tensors saved for the backward pass, and the states of AdamW."""
    config, batch, length = model_config(name), 2, 128
    attention: Any = functools.partial(tileflash.attention, backend="tiled") if flash else unfused_attention
    model = build_model(config, attention, seed=0)
    optimizer = build_optimizer(model, 1e-4, 0.1)
    tokens = torch.randint(config.vocab_size, (1, batch, length))
    limits = Limits(1e9, 1e9)
    train_step(model, optimizer, tokens, tokens, 1, dtype=torch.float32, gradient_clip=1.0, limits=limits)
    states = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    saved = _Saved(model)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        loss = token_loss_sum(model(tokens[0]), tokens[0])
    kept = saved.nbytes
    assert loss.requires_grad
    counted = count_step(StepShape(config, batch, length, flash=flash, dtype=torch.float32, on_gpu=False)).phases[
        "early"
    ]
    parts = dict(counted.parts)
    assert parts["parameters"] == sum(parameter.nbytes for parameter in model.parameters())
    assert parts["optimizer"] == states
    # At the highest moment the backward pass has begun: the logits and their gradient are there twice, and a copy of them.
    extra = 3 * 4 * batch * length * config.padded_vocab_size
    others = counted.nbytes - parts["parameters"] - parts["optimizer"]
    assert kept * 0.95 <= others <= kept * 1.05 + extra


def test_parts_by_hand() -> None:
    config = model_config("llama3-tiny", n_layer=2, tied=False)
    count = count_step(replace(SHAPE, model=config, on_gpu=False))
    weights = 4 * parameter_count(config)
    peak = count.peak.parts
    assert peak["parameters"] == weights
    assert peak["optimizer"] == 2 * weights + 4 * len(list(build_model(config, device="meta").parameters()))
    assert peak["workspace"] == 0
    assert count_step(replace(SHAPE, model=config)).peak.parts["workspace"] == GPU_WORKSPACE_BYTES
    # Products forward and twice backward; the attention's five and a half of two.
    tokens = 2 * 64
    matrices = sum(
        p.numel()
        for name, p in build_model(config, device="meta").named_parameters()
        if p.dim() == 2 and "embedding" not in name
    )
    assert count.work.product_flops == pytest.approx(6 * matrices * tokens)
    pairs = 64 * 65 // 2
    assert count.work.attention_flops == pytest.approx(2 * 2 * 4 * pairs * 32 * (4 + 10))


def test_each_flag_moves_the_count_the_right_way() -> None:
    def peak(**changes: Any) -> int:
        return count_step(replace(SHAPE, length=256, **changes)).peak_bytes

    plain = peak()
    assert peak(flash=False) > plain
    assert peak(batch=4) > plain
    assert peak(dtype=torch.float32) > plain
    assert peak(fused_operators=True) < plain
    assert peak(model=model_config("llama3-tiny", n_layer=3)) > plain
    assert peak(model=model_config("llama3-tiny", n_layer=2, vocab_size=1000)) > plain
    # Gradients of earlier micro-batches are there while a later one computes; more of them change little.
    assert plain < peak(micro_batches=2) == pytest.approx(peak(micro_batches=8), rel=0.01)
    work = count_step(replace(SHAPE, micro_batches=4)).work
    assert work.product_flops == pytest.approx(4 * count_step(SHAPE).work.product_flops)


@pytest.mark.parametrize("changes", [{}, {"flash": False}, {"batch": 1, "length": 8}])
def test_many_layers_follow_from_two_counts_of_few(changes: dict[str, Any]) -> None:
    def of(layers: int) -> Any:
        return count_step(replace(SHAPE, model=model_config("llama3-tiny", n_layer=layers), **changes))

    many, reckoned = of(7), extrapolated(of(2), of(3), 5)
    assert reckoned.peak_bytes == pytest.approx(many.peak_bytes, rel=0.001)
    assert reckoned.work.product_flops == pytest.approx(many.work.product_flops)
    assert reckoned.work.moved_bytes == pytest.approx(many.work.moved_bytes, rel=0.001)
