"""The `tileflash` command: one file a subcommand; heavy imports stay inside the functions so that `--help` is instant."""

import typer

from tileflash.cli.compare import compare

app = typer.Typer(
    name="tileflash",
    help="Exact, fast attention for PyTorch, and a trainer for GPT-2 and LLaMA-3 that shows what it gains.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# commands
app.command("compare")(compare)


def main() -> None:
    """Entry point of the `tileflash` console script."""
    app()
