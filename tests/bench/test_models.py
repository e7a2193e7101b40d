"""Suites of whole models: counted memory, steps in processes of their own, generation; their tables and commands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tileflash
from support.clocks import SteadyClock
from support.lines import H200
from tileflash.bench import Line, Sitting, generation, model_worker, read
from tileflash.bench.audit import audit
from tileflash.bench.generation import GenerationSuite, run_generation
from tileflash.bench.model_memory import (
    FLASH,
    STANDARD,
    ModelMemorySuite,
    inference_bytes,
    model_memory_lines,
    training_bytes,
)
from tileflash.bench.model_shapes import SHAPES
from tileflash.bench.model_steps import StepsCase, StepsSuite, in_a_process, run_steps
from tileflash.bench.model_worker import Answer, Request, measure, read_answer, scheme_attention
from tileflash.bench.tables import render
from tileflash.bench.timing import TimingPlan
from tileflash.cli import app
from tileflash.models import build_model, parameter_count, unfused_attention

SITTING = Sitting.begin({"gpu": None, "cpu": "test", "commit": "abc"})


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that wait for one another take most of the time of operations this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


LLAMA2 = SHAPES["llama2-7b"]


def test_published_sizes() -> None:
    published = {"llama2-7b": 6_738_415_616, "llama2-13b": 13_015_864_320, "llama2-70b": 68_976_648_192}
    assert {name: parameter_count(SHAPES[name]) for name in published} == published
    assert parameter_count(SHAPES["gpt-j-6b-shape"]) == pytest.approx(6.05e9, rel=0.01)
    assert parameter_count(SHAPES["gpt-neox-20b-shape"]) == pytest.approx(20.55e9, rel=0.01)


def test_llama_2_by_hand() -> None:
    flash, standard = (inference_bytes(LLAMA2, 1, 4096, attention) for attention in (FLASH, STANDARD))
    assert flash.weights == 2 * 6_738_415_616
    assert (
        flash.states == 2 * 32 * 4096 * 4096 * 2 == 2 * 2**30
    )  # K and V, 32 layers, 4096 positions of 4096 numbers of 2 bytes
    assert flash.attention_matrices == 0
    assert standard.attention_matrices == 2 * 32 * 4096**2 * 2
    assert standard.total - flash.total == standard.attention_matrices
    training = training_bytes(LLAMA2, 4, 2048, STANDARD)
    assert training.weights + training.states == 16 * 6_738_415_616
    assert training.attention_matrices == 32 * 4 * 32 * 2048**2 * 2
    grouped = inference_bytes(SHAPES["llama2-70b"], 1, 4096, FLASH)
    assert grouped.states == 2 * 80 * 8 * 128 * 4096 * 2  # 8 K/V heads


@pytest.mark.parametrize("name", ["llama3-tiny", "gpt2-tiny"])
@pytest.mark.parametrize("attention", [STANDARD, FLASH])
def test_counted_is_the_least_of_what_a_model_keeps(name: str, attention: str) -> None:
    """What PyTorch saves for the backward pass of a true model, in bfloat16, each storage once."""
    config, batch, length = SHAPES[name], 2, 64
    schemes = {STANDARD: unfused_attention, FLASH: partial(tileflash.attention, backend="sdpa")}
    model = build_model(config, schemes[attention], seed=0).bfloat16()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.randint(config.vocab_size, (batch, length))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
    assert loss.requires_grad
    counted = training_bytes(config, batch, length, attention)
    least = counted.activations + counted.attention_matrices
    assert 0.4 * sum(kept.values()) <= least <= 1.05 * sum(kept.values())


def test_model_memory_lines_and_table() -> None:
    lines = list(model_memory_lines(ModelMemorySuite(), SITTING))
    assert len(lines) == (5 + 3) * 2 * 5
    assert audit(lines).findings == ()
    rows = render("model-memory", lines, "en").splitlines()
    assert (
        rows[0]
        == "| llama2-7b, inference, batch 1: context | standard, GiB | flash, GiB | fits 24 GiB, standard / flash |"
    )
    assert [row.split(" | ")[-1] for row in rows[2:7]] == [
        "yes / yes |",
        "yes / yes |",
        "no / yes |",
        "no / yes |",
        "no / no |",
    ]
    assert rows[9].startswith("| llama2-7b, training, batch 4: context |") or rows[8].startswith(
        "| llama2-7b, training"
    )
    result = CliRunner().invoke(app, render("model-memory", lines, "en").splitlines()[-1].split("`")[1].split()[1:])
    assert result.exit_code == 0, result.output
    assert "llama2-7b, training, batch 4: context" in result.stdout
    assert "model` was 'llama9'" in CliRunner().invoke(app, ["bench", "model-memory", "--model", "llama9"]).stderr


SUITE = StepsSuite(
    "training", (StepsCase("llama3-tiny", 2, 16), StepsCase("llama3-tiny", 2, 32)), device="cpu", dtype="float32"
)


def _fake(request: Request, limit_s: float) -> Answer:
    if request.scheme == "baseline" and request.seq == 32:
        return Answer(out_of_memory=True, reason="CUDA out of memory")
    ms = request.seq * (2.0 if request.scheme == "baseline" else 1.0)
    return Answer((ms * 0.99, ms, ms * 1.01), 10**6 * request.seq)


def _steps(suite: StepsSuite = SUITE, execute: Any = _fake) -> tuple[list[Line], list[str]]:
    lines: list[Line] = []
    told: list[str] = []
    for _, more, reasons in run_steps(suite, SITTING, execute):
        lines += more
        told += reasons
    return lines, told


def test_steps_lines_and_tables() -> None:
    lines, told = _steps()
    assert told == ["llama3-tiny 2 x 32, baseline: CUDA out of memory"]
    assert audit(lines).complaints() == []
    rows = render("training", lines, "en").splitlines()
    assert rows[2] == "| llama3-tiny | 2 × 16 | 62.5 | 125.0 | 32 | 16 | 15.3 | 15.3 | 2.00x (1.96 – 2.04) |"
    assert rows[3] == "| llama3-tiny | 2 × 32 | out of memory | 62.5 | out of memory | 32 | out of memory | 30.5 | – |"
    command = rows[-1].split("`")[1].split()
    assert command[3:5] == ["--cases", "llama3-tiny:2x16,llama3-tiny:2x32"]
    result = CliRunner().invoke(app, [*command[1:], "--device", "meta"])
    assert "`device` was meta" in result.stderr
    models = [replace(line, suite="models") for line in lines]
    assert "tok/s, baseline" in render("models", models, "en")


def test_energy_a_token_where_the_gpu_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lines, _ = _steps(execute=lambda request, limit_s: Answer((100.0, 100.0), None, energy_j=6.4))
    energies = [line.median for line in lines if line.metric == "millijoule_per_token"]
    assert energies == [pytest.approx(100.0)] * 2 + [pytest.approx(50.0)] * 2  # 3.2 J a step of 32 and of 64 tokens
    assert "| mJ a token, baseline | mJ a token, flash |" in render("training", lines, "en")
    counter = iter([10.0, 13.0])
    monkeypatch.setattr(model_worker, "energy_counter", lambda device: lambda: next(counter))
    request = Request("gpt2-tiny", 1, 4, "baseline", "float32", "cpu", 1, 1)
    monkeypatch.setattr(model_worker, "_LONG_ENOUGH_MS", 0.0)
    assert measure(request).energy_j == 3.0
    counter = iter([10.0])
    monkeypatch.setattr(model_worker, "_LONG_ENOUGH_MS", 1e9)
    assert measure(request).energy_j is None


def test_repeats_turn_the_order_round_and_out_of_memory_is_not_repeated() -> None:
    made: list[tuple[str, int]] = []

    def execute(request: Request, limit_s: float) -> Answer:
        made.append((request.scheme, request.seq))
        return _fake(request, limit_s)

    _steps(replace(SUITE, repeats=2), execute)
    assert made == [
        ("baseline", 16), ("flash", 16), ("flash", 16), ("baseline", 16), ("baseline", 32), ("flash", 32), ("flash", 32),
    ]  # fmt: skip


def test_the_budget_ends_steps_in_time() -> None:
    times = iter(range(0, 1000, 10))
    found = list(run_steps(replace(SUITE, budget_seconds=30.0), SITTING, _fake, now=lambda: float(next(times))))
    assert len(found) == 1


def test_a_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """A true process: a model's steps, or how it ended."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    good = in_a_process(Request("gpt2-tiny", 1, 8, "flash", "float32", "cpu", 1, 2), 120.0)
    assert (len(good.step_ms), good.peak_bytes, good.reason) == (2, None, "")
    bad = in_a_process(Request("gpt2-tiny", 1, 8, "flash", "float32", "nowhere", 1, 2), 120.0)
    assert bad.step_ms == ()
    assert bad.reason.startswith("exit status 1: RuntimeError")
    assert "without an answer" in in_a_process(Request("gpt2-tiny", 1, 8, "flash"), 0.01).reason
    lines, told = _steps(execute=lambda request, limit_s: bad)
    assert {line.flags for line in lines} == {("failed",)}
    assert len(told) == 4
    with pytest.raises(ValueError, match="no answer"):
        read_answer("Traceback")


def test_the_worker_tells_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")

    monkeypatch.setattr("tileflash.models.empty_model", no_memory)
    answer = measure(Request("gpt2-tiny", 1, 8, "flash", "float32", "cpu"))
    assert (answer.out_of_memory, answer.reason) == (True, "CUDA out of memory. Tried to allocate")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cases": ()}, "`cases` was"), ({"cases": (StepsCase("gpt2-tiny", 0, 8),)}, "`cases` held gpt2-tiny 0 x 8"),
        ({"cases": (StepsCase("gpt2", 1, 4096),)}, "the length 1 to 1024"), ({"repeats": 0}, "`repeats` was 0"),
        ({"dtype": "int8"}, "`dtype` was 'int8'"), ({"timeout_seconds": 0.0}, "`timeout_seconds` was 0.0"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SUITE, **changed)
    assert "`--cases` held 'gpt2'" in CliRunner().invoke(app, ["bench", "models", "--cases", "gpt2"]).stderr


@pytest.fixture
def fast_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the tests `auto` is Triton's interpreter, which is slow."""
    from tileflash.attention.api import attention

    def schemes(scheme: str) -> Any:
        return scheme_attention("baseline") if scheme == "baseline" else partial(attention, backend="sdpa")

    monkeypatch.setattr(generation, "scheme_attention", schemes)


SMALL_GENERATION = GenerationSuite(
    "llama3-tiny", (8, 16), 2, "float32", "cpu", timing=TimingPlan(rounds=1, target_ms=0, warmup_ms=0, pause_ms=0)
)


@pytest.mark.usefixtures("fast_flash")
def test_generation_lines_and_table() -> None:
    lines = [
        line
        for _, more, reasons in run_generation(SMALL_GENERATION, SITTING, SteadyClock())
        for line in more
        if not reasons
    ]
    assert len(lines) == 2 * 2 * 2
    assert {(line.metric, line.median) for line in lines} == {("token_ms", 0.5), ("tokens_per_s", 2000.0)}
    assert audit(lines).complaints() == []
    rows = render("generation", lines, "en").splitlines()
    assert rows[2] == "| 8 | 2,000 | 2,000 | 0.5 | 0.5 | – | – | 1.00x |"
    command = rows[-1].split("`")[1].split()
    assert "`device` was meta" in CliRunner().invoke(app, [*command[1:], "--device", "meta"]).stderr


def test_an_attention_that_gives_other_logits_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def schemes(scheme: str) -> Any:
        right = scheme_attention("baseline")
        return (
            right
            if scheme == "baseline"
            else lambda q, k, v, *, causal, scale: right(q, k, v, causal=causal, scale=1.0)
        )

    monkeypatch.setattr(generation, "scheme_attention", schemes)
    suite = replace(SMALL_GENERATION, contexts=(16,))
    ((_, lines, reasons),) = run_generation(suite, SITTING, SteadyClock())
    assert [line.flags for line in lines if line.variant == "flash"] == [("wrong_result",)]
    assert "of the largest from the baseline's" in reasons[0]


@pytest.mark.usefixtures("fast_flash")
def test_generation_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tileflash.bench.timing.clock_for", lambda device: SteadyClock())
    ledger = tmp_path / "generation.jsonl"
    result = CliRunner().invoke(
        app,
        [*("bench", "generation", "--device", "cpu", "--model", "gpt2-tiny", "--contexts", "8", "--dtype", "float32"),
         *("--new-tokens", "1", "--rounds", "1", "--target-ms", "0", "--pause-ms", "0", "--output", str(ledger))],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "tok/s, baseline" in result.stdout
    assert len(read(ledger)) == 4
    assert (
        "`contexts` was (9999999,)" in CliRunner().invoke(app, ["bench", "generation", "--contexts", "9999999"]).stderr
    )


def test_limits_of_a_known_gpu() -> None:
    lines = [line for _, more, _ in run_steps(replace(SUITE, dtype="bfloat16"), H200, _fake) for line in more]
    limits = [line.limit for line in lines if line.metric == "step_ms" and line.median]
    assert all(limit is not None and 0 < limit < 1 for limit in limits)
