"""The table of `tileflash bench memory`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tileflash.cli.bench_console import machine_line, table_console

if TYPE_CHECKING:
    from tileflash.bench.memory import MemoryCell, MemorySuite


def print_memory(suite: MemorySuite, output: Path | None) -> int:
    """Measure, print a table for each pass, append to the ledger; the exit status."""
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from tileflash.bench.ledger import append
    from tileflash.bench.memory import PASSES, count_bytes, measure_memory, memory_lines
    from tileflash.bench.sitting import Sitting
    from tileflash.environment import environment

    errors, console = Console(stderr=True, highlight=False, soft_wrap=True), table_console()
    sitting = Sitting.begin(environment(suite.device))
    cells: list[MemoryCell] = []
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        bar = progress.add_task("memory", total=len(suite.lengths) * len(suite.variants) * len(PASSES))
        for cell in measure_memory(suite):
            cells.append(cell)
            progress.advance(bar)
    console.print(machine_line(sitting))
    baseline = suite.variants[0]
    for which in PASSES:
        table = Table(
            title=f"{which}: peak above q, k, v and d_out, MiB; in brackets {baseline}'s over it", title_justify="left"
        )
        for heading in ("S", "one S x S matrix (counted)", "K/V cache (counted)", *suite.variants):
            table.add_column(heading, justify="right")
        for length in suite.lengths:
            row = {cell.variant: cell for cell in cells if cell.which == which and cell.length == length}
            counted = count_bytes(suite, length)
            first = row[baseline].peak_bytes
            table.add_row(
                f"{length:,}", _mib(counted.matrix), _mib(counted.key_value_cache),
                *(_cell(row[variant], first if variant != baseline else None) for variant in suite.variants),
            )  # fmt: skip
        console.print(table)
    for reason in dict.fromkeys(f"{cell.variant}: {cell.reason}" for cell in cells if cell.reason):
        console.print(reason, markup=False)
    if output is not None:
        append(output, memory_lines(suite, cells, sitting))
        console.print(f"appended to {output}", markup=False)
    broken = [cell for cell in cells if not cell.is_possible]
    for cell in broken:
        least = cell.counted.least(cell.variant, cell.which)
        errors.print(
            f"error: {cell.variant}, {cell.which}, S={cell.length}: {cell.peak_bytes:,} bytes, less than {least:,}"
        )
    return int(bool(broken))


def _cell(cell: MemoryCell, baseline_bytes: int | None) -> str:
    if cell.peak_bytes is None:
        return (cell.flag or "not measured").replace("_", " ")
    ratio = f" ({baseline_bytes / cell.peak_bytes:.1f}x)" if baseline_bytes and cell.peak_bytes else ""
    return _mib(cell.peak_bytes) + ratio


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f}"
