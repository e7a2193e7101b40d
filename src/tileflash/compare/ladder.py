"""`tileflash compare --ladder`: a table that adds one measure at a time, with time and memory of each."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

from rich.console import Console

from tileflash.compare import numbers
from tileflash.compare.document import Block, Cell, Document, Heading, Paragraph, Table
from tileflash.compare.figures import Measured, latency_ms, tokens_per_s
from tileflash.compare.plan import RUNGS, CompareConfig, Run, Setting, compare_command, decided, model_name
from tileflash.compare.report_markdown import to_markdown
from tileflash.compare.results import Outcome, RunResult
from tileflash.compare.runner import TRAIN_COMMAND, execute
from tileflash.compare.session import (
    FAILED,
    INTERRUPTED,
    OK,
    earlier_results,
    held,
    make_runs,
    terminate_as_interrupt,
    write_whole,
)

_TITLES = {
    "ladder-baseline": "baseline: unfused attention, fp32 weights under autocast, eager",
    "ladder-flash": "+ tileflash.attention",
    "ladder-fused": "+ fused operators and optimizer",
    "ladder-split": "+ bf16 weights, masters split",
    "ladder-compile": "+ layers compiled",
    "ladder-graph": "+ CUDA graph",
    "ladder-graph-alone": "the same, layers not compiled",
}
_COLUMNS = ("rung", "ms / step", "tok/s", "speed-up", "peak MB", "of the baseline's", "largest difference of loss")
_SHORT = {Outcome.OUT_OF_MEMORY: "OOM", Outcome.TIMED_OUT: "timed out", Outcome.FAILED: "failed"}


def rungs_of(setting: Setting, *, graph: bool) -> list[str]:
    """The rungs that `setting` has, lowest first: split masters are for bfloat16, CUDA graphs for a GPU (`graph`)."""
    return [
        name
        for name, flags in RUNGS.items()
        if (graph or "--cuda-graph" not in flags) and (setting.dtype == "bfloat16" or name != "ladder-split")
    ]


def plan_ladder(config: CompareConfig) -> list[Run]:
    """Every run in the order it is made: all rungs of all settings once, then all again."""
    settings = [setting for model in config.models for setting in config.length_settings(model)]
    return [
        Run(setting, rung, repeat)
        for repeat in range(1, config.repeats + 1)
        for setting in settings
        for rung in rungs_of(setting, graph=bool(config.cuda_graph))
    ]


def climb(config: CompareConfig, *, command: Sequence[str] = TRAIN_COMMAND, console: Console | None = None) -> int:
    """Measure every rung, write OUTPUT/ladder.md and show it; return the exit status, as `session.compare` does.

    Raises what `session.compare` raises.
    """
    config, console = decided(config), console or Console()
    with held(config.output) as lock:
        runs = plan_ladder(config)
        results = earlier_results(config, runs, console)
        make_run: Callable[..., RunResult] = partial(execute, command=command, keep_open=[lock])
        with terminate_as_interrupt():
            stopped = make_runs(config, runs, results, make_run, console)
        text = to_markdown(ladder_report(config, results))
        write_whole(config.output / "ladder.md", text)
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    if stopped == "interrupted":
        return INTERRUPTED
    failed = any(result.outcome in (Outcome.FAILED, Outcome.TIMED_OUT) for result in results.values())
    return FAILED if failed else OK


def ladder_report(config: CompareConfig, results: dict[Run, RunResult]) -> Document:
    """A table for each model and length: medians over the repeats, with the lowest and the highest."""
    environment = next((result.environment for result in results.values() if result.environment), {}) or {}
    versions = ", ".join(f"{name} {environment[name]}" for name in ("torch", "triton") if environment.get(name))
    where = environment.get("gpu") or environment.get("cpu") or "unknown device"
    blocks: list[Block] = []
    for model in config.models:
        for setting in config.length_settings(model):
            title = f"{model_name(model)}, {setting.batch_size} x {setting.sequence_length}, {setting.dtype}"
            blocks += [Heading(2, title), ladder_table(setting, config, results)]
    blocks.append(
        Paragraph(
            "Each rung has the measures of those above it. Time: mean of steps 2..N, of each run; peak: PyTorch's allocator. Medians over "
            "the repeats, the lowest and the highest in brackets. Losses are compared step by step with the baseline of the same repeat."
        )
    )
    subtitle = f"{where}; {versions}; `{' '.join([*compare_command(config), '--ladder'])}`"
    return Document("The training step, one measure at a time", subtitle, "en", tuple(blocks))


def ladder_table(setting: Setting, config: CompareConfig, results: dict[Run, RunResult]) -> Table:
    """One row for each rung of `setting`; a rung that was not run, or ended otherwise, says so."""
    rungs = rungs_of(setting, graph=bool(config.cuda_graph))
    found = {rung: _finished(setting, rung, results) for rung in rungs}
    baseline = found["ladder-baseline"]
    rows = []
    for rung in rungs:
        runs = found[rung]
        if not runs:
            outcomes = {
                result.outcome for run, result in results.items() if (run.setting, run.scheme) == (setting, rung)
            }
            said = ", ".join(sorted(_SHORT[outcome] for outcome in outcomes)) or "not run"
            rows.append((Cell(_TITLES[rung]), Cell(said), *[Cell("")] * (len(_COLUMNS) - 2)))
            continue
        pairs = [(baseline[repeat], runs[repeat]) for repeat in sorted(baseline.keys() & runs.keys())]
        rows.append((Cell(_TITLES[rung]), *_figures(list(runs.values()), pairs)))
    return Table(_COLUMNS, tuple(rows), numeric=frozenset(range(1, len(_COLUMNS))))


def _finished(setting: Setting, rung: str, results: dict[Run, RunResult]) -> dict[int, RunResult]:
    return {
        run.repeat: result
        for run, result in results.items()
        if (run.setting, run.scheme) == (setting, rung) and result.outcome is Outcome.FINISHED
    }


def _figures(runs: list[RunResult], pairs: list[tuple[RunResult, RunResult]]) -> tuple[Cell, ...]:
    peaks = [run.peak_used_bytes for run in runs if run.peak_used_bytes is not None]
    of_baseline = [
        b.peak_used_bytes / a.peak_used_bytes for a, b in pairs if a.peak_used_bytes and b.peak_used_bytes is not None
    ]
    gaps = [max(abs(x - y) for x, y in zip(a.train_loss, b.train_loss, strict=False)) for a, b in pairs if a.train_loss]
    return (
        _cell([latency_ms(run) for run in runs], numbers.milliseconds),
        _cell([tokens_per_s(run) for run in runs], numbers.per_second),
        _cell([latency_ms(a) / latency_ms(b) for a, b in pairs], numbers.ratio),
        _cell(peaks, numbers.mebibytes),
        _cell(of_baseline, numbers.percent),
        Cell(numbers.gap(statistics.median(gaps)) if gaps else ""),
    )


def _cell(values: Sequence[float], written: Callable[[float], str]) -> Cell:
    measured = Measured.of(values)
    if measured is None:
        return Cell("")
    low, high = written(measured.low), written(measured.high)
    return Cell(written(measured.median), "" if low == high else f"{low}{numbers.SPREAD_DASH}{high}")
