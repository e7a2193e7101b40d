"""`tileflash plan`: what a run of `tileflash train` takes, before anything runs."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tileflash.cli.errors import friendly_errors
from tileflash.cli.train import read_config, with_settings

_HELP = """What a run of `tileflash train` with these flags takes, counted before anything runs: memory by what it is for, the peak, a
predicted time of a step. No GPU is needed.

The trainer's own step is followed on tensors without memory; with --world, that of each layout of so many ranks.

Examples:

\b
  tileflash plan llama3-1b --flash --batch-size 4 --sequence-length 4096 --gpu h200
  tileflash plan llama3-8b --flash --sequence-length 4096 --batch-size 1 --data-parallel 8 --zero-stage 3
      one layout
  tileflash plan llama3-8b --flash --sequence-length 4096 --batch-size 1 --world 8 --gpu h100
      every layout of 8 ranks, each with the same step: --total-batch-size tokens, or --batch-size samples a rank
  tileflash plan llama3-8b --flash --sequence-length 4096 --batch-size 1 --world 8,64,1024 --best 2
      the fastest ones of several numbers of ranks

Exit status: 0; 1 where nothing fits into the GPU's memory; 2 bad input.
"""
_BEST = 3  # of each of several numbers of ranks


def plan(
    context: typer.Context,
    model: str,
    *,
    gpu: Annotated[str, typer.Option(help="h200, h100, a100, b200, l4, ...", rich_help_panel="Machine")] = "h200",
    world: Annotated[
        str | None,
        typer.Option(
            help="Ranks: every layout of so many, unless flags name one. Several numbers, comma-separated, are compared.",
            rich_help_panel="Machine",
        ),
    ] = None,
    gpus_per_host: Annotated[
        int, typer.Option(help="GPUs that are linked to each other.", rich_help_panel="Machine")
    ] = 8,
    network_gb_per_s: Annotated[
        float, typer.Option(help="Between hosts, a GPU and direction.", rich_help_panel="Machine")
    ] = 50.0,
    memory_gib: Annotated[
        float | None, typer.Option(help="Of a GPU.", show_default="the GPU's", rich_help_panel="Machine")
    ] = None,
    best: Annotated[
        int | None,
        typer.Option(help="Layouts to show of each number of ranks.", show_default="all; of several 3", min=1),
    ] = None,
    unfit: Annotated[bool, typer.Option("--all", help="With --world: also what does not fit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    write: Annotated[
        Path | None,
        typer.Option(help="A Markdown file: fill its block <!-- tileflash:plan --> ... <!-- tileflash:end -->."),
    ] = None,
    **flags: Any,
) -> None:
    """Replaced below by _HELP."""
    with friendly_errors():
        config = read_config(context, model, flags)
        from tileflash.cli.comma_separated import numbers
        from tileflash.plan.layouts import plan_layouts
        from tileflash.plan.machine import machine
        from tileflash.plan.settings import request_of
        from tileflash.plan.show import many_layouts, one_layout, record

        on = machine(gpu, memory_gib, gpus_per_host, network_gb_per_s)
        worlds = [None] if world is None else numbers("--world", world)
        requests = [request_of(config, ranks, gpus_per_host) for ranks in worlds]
        found = [plan_layouts(request.layouts, on, by_few_layers=not request.named) for request in requests]
        for plans in found:
            plans.sort(
                key=lambda each: (not each.fits, each.time.total_ms if each.time else 0.0, each.count.peak_bytes)
            )
        if as_json:
            typer.echo(json.dumps(record([each for plans in found for each in plans], on), indent=1))
        else:
            alone = len(found) == 1 and len(found[0]) == 1
            most = best if best is not None or len(found) == 1 else _BEST
            told = (
                one_layout(config.model, found[0][0], on)
                if alone
                else many_layouts(config.model, found, on, most, unfit=unfit)
            )
            _tell(told, write)
        raise typer.Exit(0 if any(each.fits for plans in found for each in plans) else 1)


def _tell(markdown: str, write: Path | None) -> None:
    from tileflash.cli.bench_console import print_markdown, table_console
    from tileflash.files import written_aside
    from tileflash.plan.show import filled

    if write is None:
        print_markdown(table_console(), markdown)
        return
    arguments = shlex.join(sys.argv[1:])
    text = filled(
        write.read_text(encoding="utf-8"), f"{markdown}\n\n*Make it again: `tileflash {arguments}`*", str(write)
    )
    with written_aside(write) as (aside,):
        aside.write_text(text, encoding="utf-8")
    typer.echo(f"{write}: filled")


with_settings(plan, _HELP)
