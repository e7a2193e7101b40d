"""`tileflash bench host`."""

from __future__ import annotations

from typing import Annotated

import typer

from tileflash.cli.bench_console import BenchSession, machine_line, table_console
from tileflash.cli.bench_options import Device, Dtype, Fa3Library, LargestSpread, Output
from tileflash.cli.comma_separated import words
from tileflash.cli.errors import friendly_errors


@friendly_errors
def host(
    variants: Annotated[
        str, typer.Option(help="As for `bench attention`; tileflash-auto is what a call without `backend` takes.")
    ] = "tileflash-auto,tileflash-triton,fa2,cudnn,math",
    batch: Annotated[int, typer.Option(help="Batch.")] = 1,
    seq: Annotated[int, typer.Option(help="Sequence length.")] = 128,
    heads: Annotated[int, typer.Option(help="Heads.")] = 4,
    head_dim: Annotated[int, typer.Option(help="Head dimension.")] = 64,
    mask: Annotated[str, typer.Option(help="full or causal.")] = "causal",
    dtype: Dtype = "bfloat16",
    device: Device = "cuda",
    calls: Annotated[int, typer.Option(help="Calls in a row that make one measurement.")] = 200,
    rounds: Annotated[int, typer.Option(help="Measurements of each, in random order.")] = 9,
    steps: Annotated[bool, typer.Option("--steps", help="Also say where backend triton's time goes.")] = False,
    output: Output = None,
    fa3_library: Fa3Library = None,
    largest_spread: LargestSpread = 0.2,
) -> None:
    """Microseconds that one attention call keeps the host (on a CPU: all of the call).

    Example: tileflash bench host --output benchmarks/results/host.jsonl
    Where it goes: tileflash bench host --steps
    On a CPU: tileflash bench host --device cpu --variants tileflash-auto,math --dtype float32 --calls 20

    Exit status 1 when the audit finds something, such as a spread above --largest-spread.
    """
    from rich.table import Table

    from tileflash.bench.host import MODES, HostSuite, host_lines, measure_host
    from tileflash.bench.host_steps import host_steps_lines, measure_host_steps, steps_of

    suite = HostSuite(
        words(variants), batch, seq, heads, head_dim, mask, dtype, device, calls, rounds, fa3_library=fa3_library
    )
    session = BenchSession("host", device, output, largest_spread)
    with session:
        cells = measure_host(suite)
        session.add(host_lines(suite, cells, session.sitting))
        parts = measure_host_steps(suite) if steps else {}
        session.add(host_steps_lines(suite, parts, session.sitting))
    console = table_console()
    console.print(machine_line(session.sitting))
    table = Table(
        title=f"host time of a call, us; B={batch} S={seq} H={heads} D={head_dim} {mask} {dtype}", title_justify="left"
    )
    for heading in ("variant", *MODES):
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    by_place = {(cell.variant, cell.mode): cell for cell in cells}
    for variant in suite.variants:
        row = []
        for mode in MODES:
            figure = by_place[variant, mode].time_us
            row.append("-" if figure is None else f"{figure.median:.1f} ({figure.low:.1f} - {figure.high:.1f})")
        table.add_row(variant, *row)
    console.print(table)
    if parts:
        where = Table(title="where the time of tileflash-triton goes, us", title_justify="left")
        where.add_column("step")
        where.add_column("us", justify="right")
        for step, time_us in steps_of({name: part.median for name, part in parts.items()}).items():
            where.add_row(step, f"{time_us:.1f}")
        console.print(where)
    reasons = dict.fromkeys(f"{cell.variant}: {cell.reason}" for cell in cells if cell.reason)
    raise typer.Exit(session.end(console, reasons))
