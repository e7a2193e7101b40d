"""`tileflash bench`: measure, print a table, append to the ledger."""

from __future__ import annotations

import typer

from tileflash.cli.bench_all import all_suites
from tileflash.cli.bench_attention import attention
from tileflash.cli.bench_host import host
from tileflash.cli.bench_lengths import lengths, scaling, versions
from tileflash.cli.bench_memory import memory
from tileflash.cli.bench_models import generation, model_memory, models, training
from tileflash.cli.bench_parallel import parallel

app = typer.Typer(no_args_is_help=True, help="Measure speed and memory against peers and physical limits.")

app.command("attention")(attention)
app.command("lengths")(lengths)
app.command("scaling")(scaling)
app.command("versions")(versions)
app.command("memory")(memory)
app.command("model-memory")(model_memory)
app.command("training")(training)
app.command("models")(models)
app.command("generation")(generation)
app.command("host")(host)
app.command("parallel")(parallel)
app.command("all")(all_suites)
