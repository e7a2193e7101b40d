"""`tileflash bench memory`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tileflash.cli.bench_console import BenchSession, machine_line, table_console
from tileflash.cli.bench_options import Dtype, Fa3Library, LargestSpread, Output, Variants
from tileflash.cli.comma_separated import numbers, words
from tileflash.cli.errors import friendly_errors

if TYPE_CHECKING:
    from pathlib import Path

    from tileflash.bench.memory import MemoryCell, MemorySuite


@friendly_errors
def memory(
    lengths: Annotated[str, typer.Option(help="Sequence lengths.")] = "512,2048,8192,32768",
    variants: Variants = "math,tileflash-auto,fa2,cudnn",
    batch: Annotated[int, typer.Option(help="Batch.")] = 8,
    heads: Annotated[int, typer.Option(help="Heads.")] = 32,
    head_dim: Annotated[int, typer.Option(help="Head dimension.")] = 64,
    mask: Annotated[str, typer.Option(help="full or causal.")] = "causal",
    dtype: Dtype = "bfloat16",
    device: Annotated[str, typer.Option(help="cuda, cuda:1, cpu (which counts and measures nothing).")] = "cuda",
    output: Output = None,
    fa3_library: Fa3Library = None,
    largest_spread: LargestSpread = 0.2,
) -> None:
    """Memory of attention by length: the attention matrix and the K/V cache counted, and the peak measured beside them.

    Example: tileflash bench memory --output benchmarks/results/memory.jsonl
    On a CPU: tileflash bench memory --device cpu --lengths 64,256 --batch 1 --heads 2 --variants math,tileflash-auto

    Exit status 1 when a peak is below what must be there, or falls with the length.
    """
    from tileflash.bench.memory import MemorySuite

    if mask not in ("full", "causal"):
        raise ValueError(f"`--mask` was {mask!r}; it must be full or causal")
    suite = MemorySuite(
        numbers("--lengths", lengths),
        words(variants),
        batch,
        heads,
        head_dim,
        mask == "causal",
        dtype,
        device,
        fa3_library,
    )
    raise typer.Exit(_run(suite, output, largest_spread))


def _run(suite: MemorySuite, output: Path | None, largest_spread: float) -> int:
    """Measure, print a table for each pass, append to the ledger; the exit status."""
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from tileflash.bench.memory import PASSES, count_bytes, measure_memory, memory_lines

    errors, console = Console(stderr=True, highlight=False, soft_wrap=True), table_console()
    session = BenchSession("memory", suite.device, output, largest_spread)
    cells: list[MemoryCell] = []
    with session, Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        bar = progress.add_task("memory", total=len(suite.lengths) * len(suite.variants) * len(PASSES))
        for cell in measure_memory(suite):
            cells.append(cell)
            session.add(memory_lines(suite, [cell], session.sitting))
            progress.advance(bar)
    console.print(machine_line(session.sitting))
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
    return session.end(console)


def _cell(cell: MemoryCell, baseline_bytes: int | None) -> str:
    if cell.peak_bytes is None:
        return (cell.flag or "not measured").replace("_", " ")
    ratio = f" ({baseline_bytes / cell.peak_bytes:.1f}x)" if baseline_bytes and cell.peak_bytes else ""
    return _mib(cell.peak_bytes) + ratio


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f}"
