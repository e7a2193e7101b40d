"""The block `attention-summary`: the two long attention tables in a few rows of geometric means."""

from __future__ import annotations

from collections.abc import Sequence

from tileflash.bench.attention import SUITE
from tileflash.bench.audit import RATIO
from tileflash.bench.flags import DOUBTFUL
from tileflash.bench.ledger import Line
from tileflash.bench.markdown import newest_runs, table
from tileflash.bench.statistic import geometric_mean
from tileflash.bench.table_words import Words


def attention_summary_block(lines: Sequence[Line], words: Words) -> str:
    """For each GPU and direction, the geometric mean over all lengths and masks of each variant's speed relative to
    the baseline, by head dimension and over all. Empty without lines."""
    chosen = [line for line in lines if line.suite == SUITE and line.metric.startswith(RATIO)]
    return "\n\n".join(_run(run, words) for run in newest_runs(chosen))


def _run(lines: list[Line], words: Words) -> str:
    baseline = lines[0].metric.removeprefix(RATIO)
    variants = [variant for variant in dict.fromkeys(line.variant for line in lines) if variant != baseline]
    rows = []
    for direction in dict.fromkeys(str(line.case["direction"]) for line in lines):
        own = [line for line in lines if line.case["direction"] == direction]
        for head_dim in dict.fromkeys(str(line.case["head_dim"]) for line in own):
            rows.append([words.directions[direction], head_dim, *_means(own, variants, head_dim)])
        rows.append([words.directions[direction], words.all_points, *_means(own, variants, None)])
    note = words.summary_note.format(gpu=lines[0].gpu)
    if flagged := sum(bool(set(line.flags) - DOUBTFUL) for line in lines):
        note += words.summary_flagged.format(count=flagged)
    headings = ["", "d", *(words.ratio.format(variant=variant, baseline=baseline) for variant in variants)]
    return "\n\n".join([table(headings, rows, left=2), note])


def _means(lines: list[Line], variants: list[str], head_dim: str | None) -> list[str]:
    cells = []
    for variant in variants:
        values = [
            line.median
            for line in lines
            if line.variant == variant
            and line.median is not None
            and not set(line.flags) - DOUBTFUL
            and head_dim in (None, str(line.case["head_dim"]))
        ]
        cells.append(f"{geometric_mean(values):.2f}x" if values else "–")
    return cells
