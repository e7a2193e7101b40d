"""Tables whose rows are cases and whose columns are a metric of each variant, as most published tables have it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tileflash.bench.audit import RATIO
from tileflash.bench.footnotes import Footnotes, without_figure
from tileflash.bench.ledger import Line
from tileflash.bench.markdown import spread, table
from tileflash.bench.table_words import Words

NONE = "–"
GIB, MIB = 2**30, 2**20


@dataclass(frozen=True)
class Key:
    """A column that says which case a row is."""

    heading: str
    of: Callable[[Line], str]


@dataclass(frozen=True)
class Column:
    """A column for each variant: `heading` holds `{variant}`, `show` writes the figure of a line that has one."""

    heading: str
    metric: str
    show: Callable[[Line], str]


@dataclass(frozen=True)
class Quotient:
    """A column for each variant but the first: how many times less of `metric` it takes than the first, with its spread."""

    heading: str
    metric: str


class Grid:
    """The cells of some lines by row, variant and metric; rows and variants in the order of the lines."""

    def __init__(self, lines: Sequence[Line], keys: Sequence[Key], words: Words) -> None:
        self.keys, self.words, self.footnotes = keys, words, Footnotes(words)
        self.variants = list(dict.fromkeys(line.variant for line in lines))
        self.rows = list(dict.fromkeys(self._row(line) for line in lines))
        self._lines = {(self._row(line), line.variant, line.metric): line for line in lines}
        # Where a case has no figure one line says why, whatever its metric.
        self._reasons = {(self._row(line), line.variant): line for line in lines if line.median is None}

    def _row(self, line: Line) -> tuple[str, ...]:
        return tuple(key.of(line) for key in self.keys)

    def find(self, row: tuple[str, ...], variant: str, metric: str) -> Line | None:
        """The line of a cell, with a figure or with the reason why there is none."""
        return self._lines.get((row, variant, metric)) or self._reasons.get((row, variant))

    def cell(self, row: tuple[str, ...], variant: str, column: Column) -> str:
        """A cell's text with its marks."""
        line = self.find(row, variant, column.metric)
        if line is None:
            return NONE
        if line.median is None:
            return without_figure(line, self.words)
        text = column.show(line)
        return text if text == NONE else self.footnotes.marked(text, line)

    def quotient(self, row: tuple[str, ...], variant: str, metric: str) -> str:
        """The first variant's figure over another's: measured within rounds where that was done, else from both figures."""
        if variant == self.variants[0]:
            return NONE
        base, own = self.find(row, self.variants[0], metric), self.find(row, variant, metric)
        ratio = self._lines.get((row, variant, f"{RATIO}{self.variants[0]}")) if metric == "time_ms" else None
        if ratio is not None and ratio.median is not None:
            return self.footnotes.marked(spread(f"{ratio.median:.2f}x", f"{ratio.low:.2f}", f"{ratio.high:.2f}"), ratio)
        if base is None or own is None or base.median is None or not own.median or not own.low or not own.high:
            return NONE
        text = f"{base.median / own.median:.2f}x"
        if max(base.repeats, own.repeats) > 1:
            text = spread(text, f"{(base.low or 0.0) / own.high:.2f}", f"{(base.high or 0.0) / own.low:.2f}")
        return self.footnotes.marked(text, base, own)

    def render(self, columns: Sequence[Column | Quotient]) -> str:
        """The Markdown table and its legend."""
        headings = [key.heading for key in self.keys]
        for column in columns:
            variants = self.variants if isinstance(column, Column) else self.variants[1:]
            headings += [column.heading.format(variant=variant) for variant in variants]
        rows = []
        for row in self.rows:
            cells = list(row)
            for column in columns:
                if isinstance(column, Column):
                    cells += [self.cell(row, variant, column) for variant in self.variants]
                else:
                    cells += [self.quotient(row, variant, column.metric) for variant in self.variants[1:]]
            rows.append(cells)
        return self.finish(table(headings, rows, left=len(self.keys)))

    def finish(self, text: str) -> str:
        """A table with the legend of its marks."""
        legend = self.footnotes.legend()
        return f"{text}\n\n{legend}" if legend else text


def number(value: float) -> str:
    """Three figures, and all of what stands before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"


def case_values(lines: Sequence[Line], name: str) -> str:
    """The values of a case's part in the order of the lines, as a command takes them."""
    return ",".join(dict.fromkeys(str(line.case[name]) for line in lines))


def command(name: str, lines: Sequence[Line], options: dict[str, str]) -> str:
    """The `tileflash bench` command that measures these lines again; without lines: of what needs no device."""
    words = [f"tileflash bench {name}", *(f"--{option} {value}" for option, value in options.items() if value)]
    if lines and lines[0].gpu.startswith("CPU"):
        words.append("--device cpu")
    return " ".join(words)
