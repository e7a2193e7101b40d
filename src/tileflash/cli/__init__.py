"""The `tileflash` command: one file a subcommand; what only some commands need is imported inside them."""

import sys
from typing import Annotated

import typer

from tileflash.cli.bench import app as bench_app
from tileflash.cli.compare import compare
from tileflash.cli.data import app as data_app
from tileflash.cli.doctor import doctor
from tileflash.cli.explain import explain
from tileflash.cli.fuzz import fuzz
from tileflash.cli.plan import plan
from tileflash.cli.report import report
from tileflash.cli.train import train as train_command
from tileflash.cli.tune import tune
from tileflash.cli.warmup import warmup
from tileflash.cli.weights import weights_app

app = typer.Typer(
    name="tileflash",
    help="Exact, fast attention for PyTorch, and a trainer for GPT-2 and LLaMA-3 that shows what it gains.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# commands
app.command("train")(train_command)
app.command("plan")(plan)
app.command("compare")(compare)
app.add_typer(data_app, name="data")
app.add_typer(bench_app, name="bench")
app.command("report")(report)
app.command("explain")(explain)
app.command("doctor")(doctor)
app.command("warmup")(warmup)
app.command("tune")(tune)
app.command("fuzz")(fuzz)
app.add_typer(weights_app, name="weights")


def _show_version(wanted: bool) -> None:
    if wanted:
        from tileflash import __version__

        typer.echo(f"tileflash {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the `tileflash` console script."""
    try:
        app()
    except ImportError:
        print("tileflash doctor says why a package cannot be loaded, and what mends it", file=sys.stderr)
        raise
    except KeyboardInterrupt:  # before a command has taken the signal into its own hands
        sys.exit(130)
