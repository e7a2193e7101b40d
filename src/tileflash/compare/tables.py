"""The tables of a report: one pair of rows, baseline and flash, for each comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tileflash.compare import numbers
from tileflash.compare.conclusions import Verdict, memory_verdict, speed_verdict
from tileflash.compare.document import Cell, Table
from tileflash.compare.figures import Comparison, Measured
from tileflash.compare.losses import LossDifference
from tileflash.compare.plan import BASELINE, FLASH, SCHEMES, model_name
from tileflash.compare.results import Outcome
from tileflash.compare.texts import Texts

_MARKS = {Verdict.BETTER: "good", Verdict.WORSE: "bad", Verdict.SAME: ""}
_OUTCOME_CELLS = {
    None: Cell("cell.not_run", mark="missing"),
    Outcome.OUT_OF_MEMORY: Cell("cell.oom", mark="oom"),
    Outcome.TIMED_OUT: Cell("cell.timed_out", mark="bad"),
    Outcome.FAILED: Cell("cell.failed", mark="bad"),
}


def models_table(comparisons: Sequence[Comparison], say: Texts, on_gpu: bool) -> Table:
    """One setting, one pair of rows a model: the public report's table with spread."""
    return _table(comparisons, say("column.model"), lambda c: model_name(c.setting.model), say, on_gpu)


def lengths_table(comparisons: Sequence[Comparison], say: Texts, on_gpu: bool) -> Table:
    """One model, one pair of rows a sequence length."""
    return _table(comparisons, say("column.length"), lambda c: str(c.setting.sequence_length), say, on_gpu)


def _table(
    comparisons: Sequence[Comparison], first: str, key: Callable[[Comparison], str], say: Texts, on_gpu: bool
) -> Table:
    peak = "column.peak" if on_gpu else "column.peak_cpu"
    names = ("scheme", "latency", "median", "throughput", "peak", "speedup", "gain", "saving")
    columns = (first, *(say(peak if name == "peak" else f"column.{name}") for name in names))
    rows = [
        (Cell(key(comparison)), Cell(scheme), *_figures(comparison, scheme, say), *_ratios(comparison, scheme, say))
        for comparison in comparisons
        for scheme in SCHEMES
    ]
    return Table(columns, tuple(rows), frozenset(range(2, len(columns))), frozenset(range(0, len(rows), 2)))


def _figures(comparison: Comparison, scheme: str, say: Texts) -> tuple[Cell, ...]:
    figures = comparison.scheme(scheme)
    if figures.outcome is not Outcome.FINISHED:
        cell = _OUTCOME_CELLS[figures.outcome]
        return (Cell(say(cell.text), mark=cell.mark), *[_nothing(say)] * 3)
    return (
        _measured(figures.latency_ms, numbers.milliseconds, say),
        _measured(figures.median_step_ms, numbers.milliseconds, say),
        _measured(figures.tokens_per_s, numbers.per_second, say),
        _measured(figures.peak_used_bytes, numbers.mebibytes, say),
    )


def _ratios(comparison: Comparison, scheme: str, say: Texts) -> tuple[Cell, ...]:
    """Ratios stand in flash's row; where there is none because a scheme ran out of memory, it is said in its place."""
    if scheme == BASELINE:
        return (Cell(""),) * 3
    if comparison.speedup is None:
        oom = [s for s in (BASELINE, FLASH) if comparison.scheme(s).outcome is Outcome.OUT_OF_MEMORY]
        if len(oom) == 1:
            return (Cell(say(f"cell.{oom[0]}_oom"), mark="oom"), _nothing(say), _nothing(say))
        return (_nothing(say),) * 3
    speed = _MARKS[speed_verdict(comparison.speedup)]
    saving = comparison.memory_saving
    return (
        _measured(comparison.speedup, numbers.ratio, say, speed),
        _measured(comparison.throughput_gain, numbers.signed_percent, say, speed),
        _measured(saving, numbers.signed_percent, say, _MARKS[memory_verdict(saving)] if saving else ""),
    )


def losses_table(comparisons: Sequence[Comparison], say: Texts) -> Table:
    """First and last loss of each scheme (first repeat), and how far they are apart where that is most for their size."""
    names = ("model", "length", "loss_baseline", "loss_flash", "gap", "tolerance", "gap_step", "within")
    rows: list[tuple[Cell, ...]] = []
    starts = set()
    for comparison in comparisons:
        model = model_name(comparison.setting.model)
        if not rows or rows[-1][0].text != model:
            starts.add(len(rows))
        length = length_label(comparison, comparisons)
        rows.append(_loss_row(model, length, comparison, say))
    columns = tuple(say(f"column.{name}") for name in names)
    return Table(columns, tuple(rows), frozenset(range(1, len(columns))), frozenset(starts))


def length_label(comparison: Comparison, among: Sequence[Comparison]) -> str:
    """The sequence length; with what else tells the setting apart where those in `among` differ in more than it."""
    setting = comparison.setting
    if len({(c.setting.batch_size, c.setting.dtype, c.setting.num_iteration) for c in among}) == 1:
        return str(setting.sequence_length)
    return f"{setting.sequence_length} (batch {setting.batch_size}, {setting.dtype}, {setting.num_iteration} steps)"


def _loss_row(model: str, length: str, comparison: Comparison, say: Texts) -> tuple[Cell, ...]:
    ends = [
        Cell(f"{numbers.loss(losses[0])} → {numbers.loss(losses[-1])}") if losses else _nothing(say)
        for losses in (comparison.baseline.train_loss, comparison.flash.train_loss)
    ]
    gap = comparison.loss_gap
    if gap is None:
        tail = [_nothing(say)] * 4
    else:
        mark = "good" if gap.agrees else "bad"
        within = _nothing(say) if gap.within_scheme is None else _gap_cell(gap.within_scheme, say)
        tail = [
            _gap_cell(gap.worst, say, mark),
            Cell(numbers.gap(gap.worst.tolerance)),
            Cell(str(gap.worst.step)),
            within,
        ]
    return (Cell(model), Cell(length), *ends, *tail)


def _gap_cell(difference: LossDifference, say: Texts, mark: str = "") -> Cell:
    if math.isnan(difference.size):
        return Cell(say("cell.not_finite"), mark="bad")
    return Cell(numbers.gap(difference.size), mark=mark)


def _measured(measured: Measured | None, write: Callable[[float], str], say: Texts, mark: str = "") -> Cell:
    if measured is None:
        return _nothing(say)
    low, high = write(measured.low), write(measured.high)
    spread = f"{low} {numbers.SPREAD_DASH} {high}" if low != high else ""
    return Cell(write(measured.median), spread, mark)


def _nothing(say: Texts) -> Cell:
    return Cell(say("cell.none"), mark="missing")


# What the public report printed: (model, scheme, avg latency ms, tok/s, peak used MB, speed-up, memory saving).
PUBLIC_FIGURES = (
    ("GPT-2 124M", BASELINE, "119.71", "2153.67", "1914", "", ""),
    ("GPT-2 124M", FLASH, "63.58", "4057.67", "3056", "1.88x", "-59.67 %"),
    ("LLaMA-3.2 1B", BASELINE, "768.33", "333.78", "24561", "", ""),
    ("LLaMA-3.2 1B", FLASH, "336.90", "765.33", "26552", "2.28x", "-8.11 %"),
)


def public_table(say: Texts) -> Table:
    """The public report's figures on an A100, as printed there."""
    names = ("model", "scheme", "latency", "throughput", "peak", "speedup", "saving")
    rows: list[tuple[Cell, ...]] = []
    for model, scheme, *figures in PUBLIC_FIGURES:
        label = say("public.baseline") if scheme == BASELINE else scheme
        rows.append((Cell(model), Cell(label), *(Cell(figure) for figure in figures)))
    columns = tuple(say(f"column.{name}") for name in names)
    return Table(columns, tuple(rows), frozenset(range(2, len(columns))), frozenset((0, 2)))
