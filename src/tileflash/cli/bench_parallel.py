"""`tileflash bench parallel`: several ranks beside one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from tileflash.cli.bench_console import BenchSession, progress_line, table_console
from tileflash.cli.bench_options import BudgetSeconds, LargestSpread
from tileflash.cli.comma_separated import words
from tileflash.cli.errors import friendly_errors


@friendly_errors
def parallel(
    cases: Annotated[
        str, typer.Option(help="Of dp, zero1, zero2, zero3, tp, tp-sp, pp, pp-zb, cp-ring, cp-ulysses.")
    ] = "dp,zero1,zero3,tp,pp,cp-ring",
    ranks: Annotated[int, typer.Option(help="Processes, each with a GPU of its own.")] = 2,
    size: Annotated[
        str | None,
        typer.Option(
            help="full: LLaMA-3.2 1B, layers of LLaMA-3 8B, 128k tokens; or tiny.", show_default="full; on a CPU tiny"
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Processes of each; the order turns round at each.")] = 2,
    steps: Annotated[int, typer.Option(help="Steps of a process that count.")] = 4,
    warmup: Annotated[int, typer.Option(help="Steps before them.")] = 2,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16 or float32.", show_default="bfloat16; on a CPU float32")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    attention_backend: Annotated[str, typer.Option(help="As of `tileflash train`.")] = "auto",
    timeout_seconds: Annotated[float, typer.Option(help="A run that takes longer is ended.")] = 300.0,
    budget_seconds: BudgetSeconds = None,
    output: Annotated[
        Path | None, typer.Option("--output", "--ledger", help="Ledger to append to (JSON lines).")
    ] = None,
    largest_spread: LargestSpread = 0.2,
) -> None:
    """Training steps of several ranks beside those of one: time, scaling efficiency, memory, and whether the losses agree.

    Example: tileflash bench parallel --budget-seconds 540 --output benchmarks/results/parallel.jsonl
    On a CPU: tileflash bench parallel --device cpu --cases dp,tp --repeats 1 --largest-spread 10
    """
    from tileflash.bench.parallel import SUITE, ParallelSuite, run_parallel
    from tileflash.bench.parallel_cases import parallel_case
    from tileflash.bench.parallel_process import link_and_library

    on_cpu = device == "cpu"
    size, dtype = size or ("tiny" if on_cpu else "full"), dtype or ("float32" if on_cpu else "bfloat16")
    suite = ParallelSuite(
        tuple(parallel_case(name, size, ranks) for name in words(cases)), ranks, repeats, steps, warmup, dtype, device,
        attention_backend, timeout_seconds, budget_seconds,
    )  # fmt: skip
    session = BenchSession(SUITE, device, output, largest_spread)
    _require_gpus(device, ranks)
    session.sitting = dataclasses.replace(
        session.sitting, versions={**session.sitting.versions, **link_and_library(device)}
    )
    told: dict[str, None] = {}
    done: set[str] = set()
    with session:
        for word, lines, reasons in run_parallel(suite, session.sitting):
            session.add(lines)
            told |= dict.fromkeys(reasons)
            done |= {str(line.case["layout"]) for line in lines}
            progress_line(f"parallel: {word}")
    if left_out := [case.name for case in suite.cases if case.name not in done]:
        progress_line(f"time is up: {', '.join(left_out)} left out")
    console = table_console()
    session.show(console, SUITE)
    raise typer.Exit(session.end(console, told))


def _require_gpus(device: str, ranks: int) -> None:
    import torch

    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise ValueError(f"`--ranks` was {ranks}; there are {torch.cuda.device_count()} GPUs here")
