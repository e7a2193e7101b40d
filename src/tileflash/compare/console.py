"""What a comparison shows while it runs: a progress bar with the run in progress, one line a finished run, the end."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tileflash.compare import numbers
from tileflash.compare.figures import Comparison, Measured, latency_ms, tokens_per_s
from tileflash.compare.losses import LossGap
from tileflash.compare.plan import Run, model_name
from tileflash.compare.report import Findings, graph_words
from tileflash.compare.results import Outcome, RunResult
from tileflash.compare.tables import length_label
from tileflash.compare.texts import texts

_SHORT = {None: "not run", Outcome.OUT_OF_MEMORY: "OOM", Outcome.TIMED_OUT: "timed out", Outcome.FAILED: "failed"}


class Display:
    """Use as a context manager around the runs. Without a terminal there is no bar, only lines."""

    def __init__(self, console: Console, planned: int, done: int) -> None:
        self._console = console
        self._planned = planned
        self._progress = Progress(
            TextColumn("comparing"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            refresh_per_second=2,  # each redraw takes time from the run that is being measured
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=planned, completed=done)

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def running(self, run: Run, steps: int) -> None:
        """`run` is in progress and has logged `steps` steps."""
        self._progress.update(self._task, description=f"{_title(run)}, step {steps}/{run.setting.num_iteration}")

    def finished(self, result: RunResult, index: int) -> None:
        """`result` is the `index`-th of all runs."""
        figures = {
            Outcome.FINISHED: _figures,
            Outcome.OUT_OF_MEMORY: lambda result: f"OOM: {result.message}",
            Outcome.TIMED_OUT: lambda result: f"TIMED OUT: {result.message}",
            Outcome.FAILED: lambda result: f"FAILED: {result.message}",
        }[result.outcome](result)
        self.say(f"[{index}/{self._planned}] {_title(result.run)}: {figures}")
        if result.outcome is Outcome.FAILED and result.record.tail:
            self.say("\n".join(f"    {line}" for line in result.record.tail.splitlines()))
        self.advance()

    def advance(self) -> None:
        """One more run is done, or will not be made."""
        self._progress.advance(self._task)

    def say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


def show_end(console: Console, findings: Findings, paragraph: str, reports: list[Path]) -> None:
    """The figures by model and length, whether steps were CUDA graphs, the conclusion, and where the reports are."""
    say = texts(findings.config.language)
    for model in findings.config.models:
        comparisons = [c for c in findings.comparisons if c.setting.model == model]
        console.print(_table(model, comparisons))
    if words := graph_words(findings, say):
        console.print(Text(f"{say('row.cuda_graph')}: {words}"), soft_wrap=True)
    console.print(Text(paragraph), soft_wrap=True)
    for report in reports:
        console.print(Text(f"report: {report}"), soft_wrap=True)


def _table(model: str, comparisons: list[Comparison]) -> Table:
    """One row a setting: narrow enough for a terminal of 80 columns."""
    table = Table(
        title=model_name(model), title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for name in ("sequence", "baseline ms", "flash ms", "speed-up", "baseline MB", "flash MB", "saving", "loss gap"):
        table.add_column(name.replace(" ", "\n"), justify="right")
    for comparison in comparisons:
        speedup, saving, gap = comparison.speedup, comparison.memory_saving, comparison.loss_gap
        latencies, peaks = [], []
        for figures in (comparison.baseline, comparison.flash):
            latencies.append(_written(figures.latency_ms, numbers.milliseconds) or _SHORT[figures.outcome])
            peaks.append(_written(figures.peak_used_bytes, numbers.mebibytes))
        table.add_row(
            length_label(comparison, comparisons),
            *latencies,
            _written(speedup, numbers.ratio),
            *peaks,
            _written(saving, numbers.signed_percent),
            _gap(gap) if gap else "",
        )
    return table


def _gap(gap: LossGap) -> str:
    """With a mark where rounding does not explain it."""
    size = "not finite" if math.isnan(gap.worst.size) else numbers.gap(gap.worst.size)
    return size if gap.agrees else f"{size} !"


def _written(measured: Measured | None, write: Callable[[float], str]) -> str:
    return write(measured.median) if measured else ""


def _title(run: Run) -> str:
    setting = run.setting
    model = model_name(setting.model)
    return f"{model}, sequence {setting.sequence_length}, {setting.dtype}, {run.scheme}, repeat {run.repeat}"


def _figures(result: RunResult) -> str:
    speed = f"{numbers.milliseconds(latency_ms(result))} ms, {numbers.per_second(tokens_per_s(result))} tok/s"
    peak = f", {numbers.mebibytes(result.peak_used_bytes)} MB" if result.peak_used_bytes else ""
    return f"{speed}{peak}, loss {numbers.loss(result.train_loss[0])} -> {numbers.loss(result.train_loss[-1])}"
