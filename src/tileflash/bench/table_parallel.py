"""The block of the suite `parallel`: several ranks beside one."""

from __future__ import annotations

from collections.abc import Sequence

from tileflash.bench.footnotes import Footnotes, without_figure
from tileflash.bench.ledger import Line
from tileflash.bench.markdown import newest_runs, provenance, spread, table
from tileflash.bench.parallel import ONE, SEVERAL, SUITE
from tileflash.bench.parallel_cases import SIZES, parallel_case
from tileflash.bench.table_grid import MIB, NONE, case_values, command, number
from tileflash.bench.table_words import Words

_KEYS = ("model", "micro_batches", "batch", "seq", "layout", "ranks", "scaling", "dtype", "steps")
_NOTE = (
    "Efficiency = tokens/s of N ranks / (N × tokens/s of one). Weak: each rank has the batch that the one rank has. Strong: N ranks "
    "share the one rank's batch. Steps of `tileflash train --flash`, the first ones not counted; each run in processes of its own, median "
    "(lowest – highest) of the repeats. tok/s and peak are of a rank, the peak of the rank with the highest. Wanted: of two H200. "
    "Losses: where one rank and several are furthest apart for what rounding explains (allowed in bf16: 0.05 or 0.5 % of the loss, "
    "whichever is more; in fp32: 0.0001)."
)


def parallel_block(lines: Sequence[Line], words: Words) -> str:
    """Efficiency, times and memory of each layout. Empty without lines."""
    return "\n\n".join(_block(run, words) for run in newest_runs([line for line in lines if line.suite == SUITE]))


def _block(run: list[Line], words: Words) -> str:
    notes = Footnotes(words)
    found = {(_row(line), line.variant, line.metric): line for line in run}
    reasons = {(_row(line), line.variant): line for line in run if line.median is None}
    headings = [
        "layout", "ranks", "scaling", "model", "pass × passes × S", "ms a step, one rank", "ms a step, ranks", "tok/s, one rank",
        "tok/s, ranks", "efficiency", "wanted", "peak MB, one rank", "peak MB, ranks", "losses apart",
    ]  # fmt: skip
    rows = []
    for row in dict.fromkeys(map(_row, run)):
        case = next(line.case for line in run if _row(line) == row)

        def cell(variant: str, metric: str, unit: float = 1.0, row: tuple[object, ...] = row) -> str:
            line = found.get((row, variant, metric))
            if line is None or line.median is None:
                reason = reasons.get((row, variant)) if line is None else line
                return NONE if reason is None else without_figure(reason, words)
            return notes.marked(number(line.median / unit), line)

        efficiency = found.get((row, SEVERAL, "efficiency"))
        wanted = parallel_case(str(case["layout"]), SIZES[0], 2).wanted
        rows.append(
            [
                str(case["layout"]), str(case["ranks"]), str(case["scaling"]), _model(case),
                f"{case['batch']} × {case['micro_batches']} × {int(case['seq']):,}",
                cell(ONE, "step_ms"), cell(SEVERAL, "step_ms"), cell(ONE, "tokens_per_s_per_rank"),
                cell(SEVERAL, "tokens_per_s_per_rank"),
                NONE if efficiency is None else notes.marked(
                    spread(f"{efficiency.median:.3f}", f"{efficiency.low:.3f}", f"{efficiency.high:.3f}"), efficiency
                ),
                NONE if wanted is None or not efficiency or case["ranks"] != 2 or "H200" not in efficiency.gpu else f"≥ {wanted:.2f}",
                cell(ONE, "peak_bytes", MIB), cell(SEVERAL, "peak_bytes", MIB),
                cell(SEVERAL, "loss_difference"),
            ]
        )  # fmt: skip
    case = run[0].case
    options = {
        "cases": case_values(run, "layout"), "ranks": str(case["ranks"]), "dtype": str(case["dtype"]), "steps": str(case["steps"]),
        "size": "" if case["model"] != "llama3-tiny" else "tiny",
    }  # fmt: skip
    parts = [table(headings, rows, left=5), notes.legend(), _NOTE, _why_smaller(run)]
    return "\n\n".join([*filter(None, parts), provenance(run, command("parallel", run, options), words)])


def _row(line: Line) -> tuple[object, ...]:
    return tuple(line.case[key] for key in _KEYS)


def _overrides(case: object) -> list[str]:
    assert isinstance(case, dict)
    return [f"{name}={value}" for name, value in case.items() if name in ("n_layer", "vocab_size")]


def _model(case: object) -> str:
    assert isinstance(case, dict)
    changed = _overrides(case)
    return f"{case['model']}, {', '.join(changed)}" if changed else str(case["model"])


def _why_smaller(run: list[Line]) -> str:
    """Why a model has fewer layers than its name says."""
    told: dict[str, None] = {}
    for line in run:
        if _overrides(line.case):
            work = parallel_case(str(line.case["layout"]), SIZES[0], 2).work
            told[f"{_model(line.case)}: {work.reason}."] = None
    return " ".join(told)
