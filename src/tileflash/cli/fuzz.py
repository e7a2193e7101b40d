"""`tileflash fuzz`: random attention problems of every kind against fp64, and what fails made small."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tileflash.cli.errors import friendly_errors

if TYPE_CHECKING:
    from tileflash.fuzz.session import FuzzPlan

_HELP = """Random attention problems against fp64: every option of `attention` and `attention_varlen`, forward and backward.

Each problem is a function of the seed and its number. What fails is made as small as it can be and printed as Python
and as JSON for --replay. A worker that crashes or hangs costs its own problems only. docs/fuzz.md says what is judged and how.

Examples:

\b
  tileflash fuzz --seconds 60
      every backend of ours, on the GPU where there is one
  tileflash fuzz --backend triton --problems 200000 --seconds 280 --workers 14 --ledger benchmarks/results/fuzz.jsonl
  tileflash fuzz --device cpu --backend tiled --problems 500
  tileflash fuzz --backend triton --replay '{"options": ["sinks"], "sq": 3, "sk": 5, "causal": true}'

Exit status: 0 nothing is wrong, 1 something is, 2 bad usage.
"""


@friendly_errors
def fuzz(
    seconds: Annotated[
        float | None, typer.Option(min=1, help="Time limit, compiling included.", show_default="60 without --problems")
    ] = None,
    problems: Annotated[int | None, typer.Option(min=1, help="How many.", show_default="as many as fit")] = None,
    seed: Annotated[int, typer.Option(help="Of all problems.")] = 0,
    backend: Annotated[
        list[str] | None, typer.Option(help="By name; may be given again.", show_default="all of ours that serve")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda, cuda:1, cpu.", show_default="cuda, else cpu")] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=0, help="Processes side by side; 0: this one.", show_default="2 fewer than cores, 1 to 14"),
    ] = None,
    variants: Annotated[
        int | None, typer.Option(min=1, help="How many are compiled; the problems share them.", show_default="by time")
    ] = None,
    ledger: Annotated[Path | None, typer.Option(help="Ledger to append to (JSON lines).")] = None,
    replay: Annotated[str | None, typer.Option(help="JSON of one problem, alone.")] = None,
    shrink_seconds: Annotated[float, typer.Option(min=0, help="For making failures small; 0: leave them.")] = 60.0,
    timeout_seconds: Annotated[float, typer.Option(min=1, help="Without an answer a worker hangs.")] = 180.0,
) -> None:
    import os

    import torch

    from tileflash.fuzz.report import default_backends, default_variants
    from tileflash.fuzz.session import FuzzPlan

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu, cuda or cuda:N, got {device!r}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: there is no GPU (tileflash doctor says why)")
    backends = default_backends(device, backend)
    if replay is not None:
        raise typer.Exit(_replay(replay, backends, device))
    if seconds is None and problems is None:
        seconds = 60.0
    if workers is None:
        workers = max(1, min(14, (os.cpu_count() or 1) - 2))
    plan = FuzzPlan(
        backends=backends, device=device, seed=seed, seconds=seconds, problems=problems, workers=workers,
        variants=variants or default_variants(device, max(1, workers), seconds), timeout_s=timeout_seconds, shrink_s=shrink_seconds,
    )  # fmt: skip
    raise typer.Exit(_run(plan, ledger))


fuzz.__doc__ = _HELP


def _replay(text: str, backends: tuple[str, ...], device: str) -> int:
    from tileflash.fuzz.problems import from_json
    from tileflash.fuzz.worker import what_is_wrong

    problem = from_json(text)
    wrong = [words for backend in backends for words in what_is_wrong(problem, backend, device)]
    for words in wrong:
        typer.echo(words)
    if not wrong:
        typer.echo(f"nothing is wrong: {problem} on {', '.join(backends)}")
    return 1 if wrong else 0


def _run(plan: FuzzPlan, ledger: Path | None) -> int:
    from rich.console import Console

    from tileflash.bench.ledger import require_ledger
    from tileflash.fuzz.report import Progress, failure_text, ledger_line, summary
    from tileflash.fuzz.session import first_of_each, run_session, shrink_failures

    if ledger is not None:
        require_ledger(ledger)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    with Progress(errors, plan) as progress:
        outcome = run_session(plan, progress.tell)
    if outcome.failures and plan.shrink_s:
        shrink_failures(plan, outcome.failures, lambda words: errors.print(words, markup=False))
    for failure in first_of_each(outcome.failures, plan.variants):
        typer.echo(failure_text(failure, plan))
    typer.echo(summary(outcome, plan))
    if ledger is not None and outcome.count:
        from tileflash.bench.ledger import append
        from tileflash.bench.sitting import Sitting
        from tileflash.environment import environment

        append(ledger, [ledger_line(outcome, plan, Sitting.begin(environment(plan.device)))])
        typer.echo(f"appended to {ledger}")
    if not outcome.count and not outcome.failures:
        typer.echo("error: no problem was judged", err=True)
        return 1
    return 1 if outcome.failures or outcome.complaints else 0
