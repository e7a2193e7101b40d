"""`tileflash bench model-memory`, `training`, `models` and `generation`: whole models."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from tileflash.cli.bench_console import BenchSession, progress_line, table_console
from tileflash.cli.bench_options import BudgetSeconds, Device, LargestSpread, Output, PauseMs, Rounds, TargetMs
from tileflash.cli.comma_separated import numbers, words
from tileflash.cli.errors import friendly_errors

if TYPE_CHECKING:
    from pathlib import Path

    from tileflash.bench.model_steps import Name, StepsCase, StepsSuite

_TRAINING = "llama2-7b:4x2048,llama2-7b:8x2048,llama2-7b:4x4096,llama2-7b:8x4096,llama2-7b:2x8192"
_MODELS = (
    "llama2-7b:4x2048,llama2-13b:4x2048,llama2-70b:4x2048,gpt2:4x1024,gpt-j-6b-shape:4x1024,gpt-neox-20b-shape:4x1024"
)
Cases = Annotated[str, typer.Option(help="MODEL:BATCHxLENGTH, comma-separated; models as for model-memory.")]
Repeats = Annotated[int, typer.Option(help="Processes of each; the schemes' order turns round at each.")]
Steps = Annotated[int, typer.Option(help="Steps of a process that count.")]
ModelDtype = Annotated[str, typer.Option(help="bfloat16 or float32.")]
Timeout = Annotated[float, typer.Option(help="A process that takes longer is ended.")]


@friendly_errors
def model_memory(
    model: Annotated[
        str, typer.Option(help="llama2-7b, llama2-13b, llama2-70b, gpt-j-6b-shape, gpt-neox-20b-shape or a preset.")
    ] = "llama2-7b",
    inference_lengths: Annotated[str, typer.Option(help="Contexts.")] = "2048,4096,8192,16384,32768",
    training_lengths: Annotated[str, typer.Option(help="Sequence lengths.")] = "2048,4096,8192",
    inference_batch: Annotated[int, typer.Option(help="Batch of inference.")] = 1,
    training_batch: Annotated[int, typer.Option(help="Batch of training.")] = 4,
    output: Output = None,
) -> None:
    """Memory of a whole model by context, counted from its shape (no GPU needed): inference and training, standard and flash.

    Example: tileflash bench model-memory --output benchmarks/results/model-memory.jsonl
    Another model: tileflash bench model-memory --model llama3-8b --inference-lengths 8192,131072
    """
    from tileflash.bench.model_memory import SUITE, ModelMemorySuite, model_memory_lines

    suite = ModelMemorySuite(
        model, numbers("--inference-lengths", inference_lengths), numbers("--training-lengths", training_lengths), inference_batch,
        training_batch,
    )  # fmt: skip
    session = BenchSession(SUITE, "cpu", output, 1.0)
    session.add(model_memory_lines(suite, session.sitting))
    console = table_console()
    session.show(console, SUITE)
    raise typer.Exit(session.end(console))


@friendly_errors
def training(
    cases: Cases = _TRAINING,
    repeats: Repeats = 1,
    steps: Steps = 5,
    dtype: ModelDtype = "bfloat16",
    device: Device = "cuda",
    timeout_seconds: Timeout = 300.0,
    budget_seconds: BudgetSeconds = None,
    output: Output = None,
    largest_spread: LargestSpread = 0.2,
) -> None:
    """Samples a second of a model's forward and backward by batch and length, with and without flash; out of memory is a result.

    Example: tileflash bench training --output benchmarks/results/training.jsonl
    On a CPU: tileflash bench training --device cpu --cases llama3-tiny:2x64,llama3-tiny:2x128 --dtype float32
    """
    raise typer.Exit(
        _steps(
            "training", cases, repeats, steps, dtype, device, timeout_seconds, budget_seconds, output, largest_spread
        )
    )


@friendly_errors
def models(
    cases: Cases = _MODELS,
    repeats: Repeats = 1,
    steps: Steps = 5,
    dtype: ModelDtype = "bfloat16",
    device: Device = "cuda",
    timeout_seconds: Timeout = 300.0,
    budget_seconds: BudgetSeconds = None,
    output: Output = None,
    largest_spread: LargestSpread = 0.2,
) -> None:
    """Whole models, forward and backward, with and without flash; what a GPU has no memory for is told as such.

    Example: tileflash bench models --output benchmarks/results/models.jsonl
    On a CPU: tileflash bench models --device cpu --cases gpt2-tiny:2x64,llama3-tiny:2x64 --dtype float32
    """
    raise typer.Exit(
        _steps("models", cases, repeats, steps, dtype, device, timeout_seconds, budget_seconds, output, largest_spread)
    )


@friendly_errors
def generation(
    model: Annotated[str, typer.Option(help="As for model-memory.")] = "llama3-1b",
    contexts: Annotated[str, typer.Option(help="Tokens before the new ones.")] = "512,1024,2048,4096,8192,16384",
    new_tokens: Annotated[int, typer.Option(help="Tokens that a measurement adds.")] = 4,
    dtype: ModelDtype = "bfloat16",
    device: Device = "cuda",
    rounds: Rounds = 3,
    target_ms: TargetMs = 200.0,
    pause_ms: PauseMs = 20.0,
    budget_seconds: BudgetSeconds = None,
    output: Output = None,
    largest_spread: LargestSpread = 0.2,
) -> None:
    """Tokens a second by context with today's decoding, which has no K/V cache: each token computes its context again.

    Example: tileflash bench generation --output benchmarks/results/generation.jsonl
    On a CPU: tileflash bench generation --device cpu --model llama3-tiny --contexts 64,128 --dtype float32
    """
    from tileflash.bench.generation import SUITE, GenerationSuite, run_generation
    from tileflash.bench.timing import TimingPlan

    plan = TimingPlan(rounds=rounds, target_ms=target_ms, pause_ms=pause_ms)
    suite = GenerationSuite(
        model, numbers("--contexts", contexts), new_tokens, dtype, device, budget_seconds=budget_seconds, timing=plan
    )
    session = BenchSession(SUITE, device, output, largest_spread)
    told: list[str] = []
    with session:
        for context, lines, reasons in run_generation(suite, session.sitting, session.clock):
            session.add(lines)
            told += reasons
            progress_line(f"generation: context {context}")
    console = table_console()
    session.show(console, SUITE)
    for reason in told:
        console.print(reason, markup=False)
    raise typer.Exit(session.end(console))


def _steps(
    name: Name, cases: str, repeats: int, steps: int, dtype: str, device: str, timeout_seconds: float, budget_seconds: float | None,
    output: Path | None, largest_spread: float,
) -> int:  # fmt: skip
    from tileflash.bench.model_steps import StepsSuite

    suite = StepsSuite(
        name,
        _cases(cases),
        repeats,
        steps,
        dtype=dtype,
        device=device,
        timeout_seconds=timeout_seconds,
        budget_seconds=budget_seconds,
    )
    return _measure_steps(suite, output, largest_spread)


def _measure_steps(suite: StepsSuite, output: Path | None, largest_spread: float) -> int:
    from tileflash.bench.model_steps import run_steps

    session = BenchSession(suite.name, suite.device, output, largest_spread)
    told: list[str] = []
    measured = 0
    with session:
        for case, lines, reasons in run_steps(suite, session.sitting):
            session.add(lines)
            told += reasons
            progress_line(f"{suite.name}: {case}")
            measured += 1
    if left_out := suite.cases[measured:]:
        progress_line(f"time is up: {', '.join(map(str, left_out))} left out")
    console = table_console()
    session.show(console, suite.name)
    for reason in told:
        console.print(reason, markup=False)
    return session.end(console)


def _cases(text: str) -> tuple[StepsCase, ...]:
    from tileflash.bench.model_steps import StepsCase

    cases = []
    for word in words(text):
        found = re.fullmatch(r"([\w.-]+):(\d+)x(\d+)", word)
        if found is None:
            raise ValueError(f"`--cases` held {word!r}; it must be MODEL:BATCHxLENGTH, such as llama2-7b:4x2048")
        cases.append(StepsCase(found.group(1), int(found.group(2)), int(found.group(3))))
    return tuple(cases)
