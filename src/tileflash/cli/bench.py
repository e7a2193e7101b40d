"""`tileflash bench`: measure, print a table, append to the ledger."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tileflash.cli.bench_console import machine_line, table_console
from tileflash.cli.bench_memory import print_memory
from tileflash.cli.comma_separated import numbers, words
from tileflash.cli.errors import friendly_errors

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tileflash.bench.attention import AttentionSuite, CaseResult

app = typer.Typer(no_args_is_help=True, help="Measure speed against peers and physical limits.")


@app.command()
@friendly_errors
def attention(
    head_dims: Annotated[str, typer.Option(help="Head dimensions, comma-separated.")] = "64,128,256",
    lengths: Annotated[str, typer.Option(help="Sequence lengths.")] = "512,1024,2048,4096,8192,16384",
    masks: Annotated[str, typer.Option(help="full, causal or both.")] = "full,causal",
    direction: Annotated[str, typer.Option(help="forward, backward or both.")] = "forward,backward",
    variants: Annotated[
        str,
        typer.Option(
            help="tileflash-BACKEND, reference; fa2, cudnn, efficient, math (PyTorch's, pinned); fa3, fa4, flash-attn "
            "(packages; TILEFLASH_FA3_LIBRARY may name FA3's compiled operators)."
        ),
    ] = "tileflash-triton,fa2,cudnn",
    baseline: Annotated[
        str | None, typer.Option(help="Ratios are to this one.", show_default="fa2, or the first")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Batch x length.")] = 16384,
    width: Annotated[int, typer.Option(help="Heads x head dimension.")] = 2048,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cuda, cuda:1, cpu.")] = "cuda",
    rounds: Annotated[int, typer.Option(help="How often each variant has its turn.")] = 3,
    target_ms: Annotated[float, typer.Option(help="Calls of this many ms a variant and round.")] = 200.0,
    pause_ms: Annotated[float, typer.Option(help="Pause before each turn.")] = 20.0,
    seed: Annotated[int, typer.Option(help="Of the inputs and of the order.")] = 0,
    budget_seconds: Annotated[float | None, typer.Option(help="Stop in time; says what was left out.")] = None,
    output: Annotated[Path | None, typer.Option(help="Ledger to append to (JSON lines).")] = None,
) -> None:
    """Forward and backward speed of attention, each variant checked against an fp32 reference first.

    Example: tileflash bench attention --head-dims 64,128 --lengths 1024,4096 --output benchmarks/results/attention.jsonl
    On a CPU: tileflash bench attention --device cpu --variants tileflash-sdpa,math --tokens 512 --width 128
    --lengths 64,512 --head-dims 64

    Exit status 1 when a result was wrong, or a figure cannot be true.
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
    )
    raise typer.Exit(_run_attention(suite, output))


@app.command()
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
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cuda, cuda:1, cpu.")] = "cuda",
    calls: Annotated[int, typer.Option(help="Calls in a row that make one measurement.")] = 200,
    rounds: Annotated[int, typer.Option(help="Measurements of each, in random order.")] = 9,
    output: Annotated[Path | None, typer.Option(help="Ledger to append to (JSON lines).")] = None,
) -> None:
    """Microseconds that one attention call keeps the host (on a CPU: all of the call).

    Example: tileflash bench host --output benchmarks/results/host.jsonl
    On a CPU: tileflash bench host --device cpu --variants tileflash-auto,math --dtype float32 --calls 20
    """
    from rich.table import Table

    from tileflash.bench.host import MODES, HostSuite, host_lines, measure_host
    from tileflash.bench.ledger import append, require_ledger
    from tileflash.bench.sitting import Sitting
    from tileflash.bench.timing import clock_for
    from tileflash.environment import environment

    suite = HostSuite(words(variants), batch, seq, heads, head_dim, mask, dtype, device, calls, rounds)
    clock_for(device)  # says what is wrong with the device
    if output is not None:
        require_ledger(output)
    sitting = Sitting.begin(environment(device))
    cells = measure_host(suite)
    console = table_console()
    console.print(machine_line(sitting))
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
    for reason in dict.fromkeys(f"{cell.variant}: {cell.reason}" for cell in cells if cell.reason):
        console.print(reason, markup=False)
    if output is not None:
        append(output, host_lines(suite, cells, sitting))
        console.print(f"appended to {output}", markup=False)


@app.command()
@friendly_errors
def memory(
    lengths: Annotated[str, typer.Option(help="Sequence lengths.")] = "512,2048,8192,32768",
    variants: Annotated[str, typer.Option(help="As for `bench attention`.")] = "math,tileflash-auto,fa2,cudnn",
    batch: Annotated[int, typer.Option(help="Batch.")] = 8,
    heads: Annotated[int, typer.Option(help="Heads.")] = 32,
    head_dim: Annotated[int, typer.Option(help="Head dimension.")] = 64,
    mask: Annotated[str, typer.Option(help="full or causal.")] = "causal",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cuda, cuda:1, cpu (which counts and measures nothing).")] = "cuda",
    output: Annotated[Path | None, typer.Option(help="Ledger to append to (JSON lines).")] = None,
) -> None:
    """Memory of attention by length: the attention matrix and the K/V cache counted, and the peak measured beside them.

    Example: tileflash bench memory --output benchmarks/results/memory.jsonl
    On a CPU: tileflash bench memory --device cpu --lengths 64,256 --batch 1 --heads 2 --variants math,tileflash-auto

    Exit status 1 when a peak is below what must be there.
    """
    from tileflash.bench.ledger import require_ledger
    from tileflash.bench.memory import MemorySuite
    from tileflash.bench.timing import clock_for

    if mask not in ("full", "causal"):
        raise ValueError(f"`--mask` was {mask!r}; it must be full or causal")
    suite = MemorySuite(
        numbers("--lengths", lengths), words(variants), batch, heads, head_dim, mask == "causal", dtype, device
    )
    clock_for(device)  # says what is wrong with the device
    if output is not None:
        require_ledger(output)
    raise typer.Exit(print_memory(suite, output))


def _run_attention(suite: AttentionSuite, output: Path | None) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from tileflash.bench.attention import run_suite
    from tileflash.bench.ledger import append, require_ledger
    from tileflash.bench.sitting import Sitting
    from tileflash.bench.timing import clock_for
    from tileflash.environment import environment

    if output is not None:
        require_ledger(output)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    clock, cases = clock_for(suite.device), suite.cases()
    sitting = Sitting.begin(environment(suite.device))
    started = time.monotonic()
    results: list[CaseResult] = []
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("attention", total=len(cases))
        for result in run_suite(suite, gpu_name=sitting.gpu, clock=clock):
            results.append(result)
            if output is not None:
                append(output, result.lines(sitting, suite.baseline))  # at once: an interruption loses one case
            progress.advance(task)
            if not errors.is_terminal:
                errors.print(f"{len(results)}/{len(cases)} {result.case} ({time.monotonic() - started:.0f} s)")
    if left_out := cases[len(results) :]:
        errors.print(f"time is up: {len(left_out)} of {len(cases)} cases left out, from {left_out[0]} on")
    console = table_console()
    console.print(f"{machine_line(sitting)}; {clock.description}")
    console.print(
        f"{suite.dtype}, {suite.tokens} tokens, heads x head dimension = {suite.width}; TFLOP/s count 4 B H S S D forward, "
        f"x 2.5 backward, halved when causal; in brackets the speed relative to {suite.baseline}"
    )
    return _print_attention(console, errors, suite, results, output)


def _print_attention(
    console: Console, errors: Console, suite: AttentionSuite, results: list[CaseResult], output: Path | None
) -> int:
    from tileflash.bench.attention_summary import contradictions, geometric_means
    from tileflash.bench.flags import FASTER_THAN_LIMIT, WRONG_RESULT

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
    if output is not None:
        console.print(f"appended to {output}", markup=False)
    broken = contradictions(results)
    for contradiction in broken:
        errors.print(f"error: {contradiction}", markup=False)
    wrong = {WRONG_RESULT, FASTER_THAN_LIMIT} & {f for result in results for cell in result.cells for f in cell.flags}
    return 1 if broken or wrong else 0


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
