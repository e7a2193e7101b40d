"""`tileflash tune`: measure configurations of the attention kernels against the shipped ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tileflash.cli.errors import friendly_errors

_HELP = """Measure tiles and other choices of the attention kernels against what is shipped, on this GPU.

For each row of the table (kernel, head dimension, mask) configurations that differ in one or two choices are compiled
and verified by processes side by side (one that takes its process down is out, and says so), then timed in one
process, in random order, with pauses. Nothing is changed: the tables are
tileflash/kernels/hopper/configurations.py and tileflash/kernels/triton/configurations.py.

Examples:

\b
  tileflash tune --backend hopper --kernels forward --head-dims 128 --masks causal
  tileflash tune --backend triton --kernels forward,dkdv,dq --options softcap --output tuning.jsonl

Exit status: 0; 1 when a shipped configuration failed; 2 bad usage.
"""


@friendly_errors
def tune(
    backend: Annotated[str, typer.Option(help="hopper or triton.")] = "hopper",
    kernels: Annotated[
        str | None,
        typer.Option(help="hopper: forward, backward; triton: forward, dkdv, dk, dv, dq.", show_default="all"),
    ] = None,
    head_dims: Annotated[str, typer.Option(help="Of 64, 128 and 256.")] = "64,128,256",
    masks: Annotated[str, typer.Option(help="full, causal or both.")] = "full,causal",
    options: Annotated[str, typer.Option(help="triton: softcap, alibi, bias, dropout or mask.")] = "",
    lengths: Annotated[str, typer.Option(help="Sequence lengths.")] = "512,2048,8192",
    tokens: Annotated[int, typer.Option(min=1, help="Batch x length.")] = 16384,
    width: Annotated[int, typer.Option(min=64, help="Heads x head dimension.")] = 2048,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cuda or cuda:N.")] = "cuda",
    jobs: Annotated[int, typer.Option(min=1, help="Processes that compile.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="How often each configuration has its turn.")] = 5,
    best: Annotated[int, typer.Option(min=1, help="Rows printed for each table row.")] = 6,
    output: Annotated[Path | None, typer.Option(help="Ledger to append to (JSON lines).")] = None,
) -> None:
    from rich.console import Console
    from rich.table import Table

    from tileflash.bench.ledger import append, require_ledger
    from tileflash.bench.sitting import Sitting
    from tileflash.cli.comma_separated import numbers, words
    from tileflash.environment import environment
    from tileflash.train.setup import find_gpu_device
    from tileflash.tune import session
    from tileflash.tune.candidates import KERNELS, targets_of
    from tileflash.tune.candidates import words as in_words

    if backend not in KERNELS:
        raise ValueError(f"`--backend` was {backend!r}; it must be {' or '.join(KERNELS)}")
    asked = list(words(kernels)) if kernels else list(KERNELS[backend])
    rows = targets_of(backend, asked, list(numbers("--head-dims", head_dims)), list(words(masks)), options)
    if dtype not in ("bfloat16", "float16"):
        raise ValueError(f"`--dtype` was {dtype!r}; it must be bfloat16 or float16")
    settings = session.Settings(
        lengths=numbers("--lengths", lengths), tokens=tokens, width=width, dtype=dtype, device=device, jobs=jobs, rounds=rounds
    )  # fmt: skip
    settings = replace(settings, device=find_gpu_device(device))
    if output is not None:
        require_ledger(output)
    out, errors = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)
    sitting, broken = Sitting.begin(environment(device)), False
    for target, outcomes in session.tune(rows, settings, errors.print):
        table = Table(title=str(target), title_justify="left")
        for heading in ("configuration", "mean", *(f"S={length}: ms (x shipped)" for length in settings.lengths)):
            table.add_column(heading)
        timed = [outcome for outcome in outcomes if outcome.counts]
        for outcome in dict.fromkeys([*timed[:best], *(o for o in timed if o.shipped)]):
            cells = [
                f"{outcome.time_ms[n].median:.4g} ({outcome.speed_ratio[n].median:.3f}, "
                f"{outcome.speed_ratio[n].low:.3f}-{outcome.speed_ratio[n].high:.3f})"
                if n in outcome.time_ms
                else ""
                for n in settings.lengths
            ]
            name = in_words(outcome.configuration) + (" (shipped)" if outcome.shipped else "")
            table.add_row(name, f"{outcome.mean_ratio:.3f}", *cells)
        out.print(table)
        for outcome in outcomes:
            if outcome.failure:
                broken = broken or outcome.shipped
                out.print(f"out: {in_words(outcome.configuration)}: {outcome.failure}")
        if output is not None:
            append(output, session.ledger_lines(target, outcomes, settings, sitting))
    raise typer.Exit(int(broken))


tune.__doc__ = _HELP
