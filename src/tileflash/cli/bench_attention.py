"""`tileflash bench attention`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from tileflash.cli.bench_console import BenchSession, machine_line, table_console
from tileflash.cli.bench_options import (
    BudgetSeconds,
    Device,
    Dtype,
    Fa3Library,
    LargestSpread,
    Output,
    PauseMs,
    Rounds,
    TargetMs,
)
from tileflash.cli.comma_separated import numbers, words
from tileflash.cli.errors import friendly_errors

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console
    from rich.table import Table

    from tileflash.bench.attention import AttentionSuite, CaseResult


@friendly_errors
def attention(
    head_dims: Annotated[str, typer.Option(help="Head dimensions, comma-separated.")] = "64,128,256",
    lengths: Annotated[str, typer.Option(help="Sequence lengths.")] = "512,1024,2048,4096,8192,16384",
    masks: Annotated[str, typer.Option(help="full, causal or both.")] = "full,causal",
    direction: Annotated[str, typer.Option(help="forward, backward or both.")] = "forward,backward",
    variants: Annotated[
        str,
        typer.Option(
            help="tileflash-BACKEND, reference; fa2, cudnn, efficient, math (PyTorch's, pinned); flex; tutorial-fa1; fa3, fa4, flash-attn "
            "(packages)."
        ),
    ] = "tileflash-triton,fa2,cudnn",
    baseline: Annotated[
        str | None, typer.Option(help="Ratios are to this one.", show_default="fa2, or the first")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Batch x length.")] = 16384,
    width: Annotated[int, typer.Option(help="Heads x head dimension.")] = 2048,
    dtype: Dtype = "bfloat16",
    device: Device = "cuda",
    rounds: Rounds = 3,
    target_ms: TargetMs = 200.0,
    pause_ms: PauseMs = 20.0,
    seed: Annotated[int, typer.Option(help="Of the inputs and of the order.")] = 0,
    budget_seconds: BudgetSeconds = None,
    output: Output = None,
    fa3_library: Fa3Library = None,
    largest_spread: LargestSpread = 0.2,
) -> None:
    """Forward and backward speed of attention, each variant checked against an fp32 reference first.

    Example: tileflash bench attention --head-dims 64,128 --lengths 1024,4096 --output benchmarks/results/attention.jsonl
    On a CPU: tileflash bench attention --device cpu --variants tileflash-sdpa,math --tokens 512 --width 128
    --lengths 64,512 --head-dims 64

    Exit status 1 when the audit finds a figure that cannot be true, contradicts another, or spreads too far.
    """
    from tileflash.bench.attention import AttentionSuite
    from tileflash.bench.timing import TimingPlan

    names = words(variants)
    suite = AttentionSuite(
        head_dims=numbers("--head-dims", head_dims),
        lengths=numbers("--lengths", lengths),
        masks=words(masks),
        directions=words(direction),  # type: ignore[arg-type]  # the suite checks the words
        variants=names,
        tokens=tokens,
        width=width,
        dtype=dtype,
        device=device,
        baseline=baseline or ("fa2" if "fa2" in names else names[0]),
        seed=seed,
        budget_seconds=budget_seconds,
        timing=TimingPlan(rounds=rounds, target_ms=target_ms, pause_ms=pause_ms, seed=seed),
        fa3_library=fa3_library,
    )
    raise typer.Exit(_run(suite, output, largest_spread))


def _run(suite: AttentionSuite, output: Path | None, largest_spread: float) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from tileflash.bench.attention import run_suite, with_flags

    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    session, cases = BenchSession("attention", suite.device, output, largest_spread), suite.cases()
    started = time.monotonic()
    results: list[CaseResult] = []
    with session, Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("attention", total=len(cases))
        for result in run_suite(suite, gpu_name=session.sitting.gpu, clock=session.clock):
            results.append(result)
            session.add(result.lines(session.sitting, suite.baseline))
            progress.advance(task)
            if not errors.is_terminal:
                errors.print(f"{len(results)}/{len(cases)} {result.case} ({time.monotonic() - started:.0f} s)")
    if left_out := cases[len(results) :]:
        errors.print(f"time is up: {len(left_out)} of {len(cases)} cases left out, from {left_out[0]} on")
    console = table_console()
    console.print(f"{machine_line(session.sitting)}; {session.clock.description}")
    console.print(
        f"{suite.dtype}, {suite.tokens} tokens, heads x head dimension = {suite.width}; TFLOP/s count 4 B H S S D forward, "
        f"x 2.5 backward, halved when causal; in brackets the speed relative to {suite.baseline}"
    )
    _print(console, suite, with_flags(results, session.audit()))
    return session.end(console)


def _print(console: Console, suite: AttentionSuite, results: list[CaseResult]) -> None:
    from tileflash.bench.attention_summary import geometric_means

    for direction in suite.directions:
        if chosen := [result for result in results if result.case.direction == direction]:
            console.print(_table(direction, suite, chosen))
    for reason, where in _reasons(results).items():
        more = f" and {len(where) - 1} more" if len(where) > 1 else ""
        console.print(f"{reason} [{where[0]}{more}]", markup=False)
    for mean in geometric_means(results, suite.baseline):
        console.print(
            f"{mean.direction}: {mean.variant} is {mean.ratio:.3f}x as fast as {suite.baseline} "
            f"(geometric mean of {mean.points} points of {mean.cases} cases)"
        )


def _reasons(results: list[CaseResult]) -> dict[str, list[str]]:
    """Why cells hold no figure, or one that cannot be true -> the cases where that is so."""
    found: dict[str, list[str]] = {}
    for result in results:
        for cell in result.cells:
            if cell.reason:
                found.setdefault(f"{cell.variant}: {', '.join(cell.flags)}: {cell.reason}", []).append(str(result.case))
    return found


def _table(direction: str, suite: AttentionSuite, results: list[CaseResult]) -> Table:
    from rich.table import Table

    table = Table(title=f"{direction}, TFLOP/s")
    for heading in ("d", "mask", "S", *suite.variants, "limit"):
        table.add_column(heading, justify="left" if heading == "mask" else "right")
    for result in results:
        case, work = result.case, result.case.work()
        row = [str(case.head_dim), case.mask, str(case.seq)]
        for cell in result.cells:
            if cell.timing is None:
                row.append(", ".join(cell.flags))
                continue
            ratio = cell.timing.speed_ratio
            text = _significant(work.tflops(cell.timing.time_ms.median))
            text += f" ({ratio.median:.2f}x {ratio.low:.2f}-{ratio.high:.2f})" if ratio else ""
            row.append(f"{text} {' '.join(cell.flags)}".rstrip())
        row.append("-" if result.limit_ms is None else _significant(work.tflops(result.limit_ms)))
        table.add_row(*row)
    return table


def _significant(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"
