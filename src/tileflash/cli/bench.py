"""`tileflash bench`: measure, print a table, append to the ledger; one file a suite."""

from __future__ import annotations

import typer

from tileflash.cli.bench_attention import attention
from tileflash.cli.bench_host import host
from tileflash.cli.bench_memory import memory

app = typer.Typer(no_args_is_help=True, help="Measure speed against peers and physical limits.")

app.command()(attention)
app.command()(host)
app.command()(memory)
