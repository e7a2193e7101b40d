"""Small pieces of Markdown that the tables share."""

from __future__ import annotations

from collections.abc import Sequence

from tileflash.bench.ledger import Line
from tileflash.bench.table_words import Words


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """A Markdown table whose first `left` columns are aligned left and the others right."""
    rules = ["---" if column < left else "---:" for column in range(len(headings))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (headings, rules, *rows))


def provenance(lines: Sequence[Line], command: str, words: Words) -> str:
    """Where and when one run was measured, and the command that measures it again."""
    newest = max(lines, key=lambda line: line.date)
    return words.provenance.format(
        gpu=newest.gpu,
        versions=", ".join(f"{name} {version}" for name, version in newest.versions.items()),
        commit=newest.commit,
        date=newest.date[:10],
        command=command,
    )


def newest_runs(lines: Sequence[Line]) -> list[list[Line]]:
    """For each GPU, in the order of the ledger, the lines of its newest run."""
    by_gpu: dict[str, list[Line]] = {}
    for line in lines:
        by_gpu.setdefault(line.gpu, []).append(line)
    runs = []
    for of_gpu in by_gpu.values():
        # Runs of the same second: the one that stands further down was written later.
        newest = max(enumerate(of_gpu), key=lambda pair: (pair[1].date, pair[0]))[1].run
        runs.append([line for line in of_gpu if line.run == newest])
    return runs


def spread(median: str, low: str, high: str) -> str:
    """A figure with its spread, e.g. `1.21x (1.19x – 1.22x)`."""
    return f"{median} ({low} – {high})"
