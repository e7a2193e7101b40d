"""A ValueError or OSError becomes one line and exit status 2; a fault of the program stays a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tileflash.cli.errors import friendly_errors


def _application(how: str) -> typer.Typer:
    app = typer.Typer()

    def body(kind: str) -> None:
        if kind == "value":
            raise ValueError("`batch_size` was 0; it must be at least 1")
        if kind == "os":
            Path("/nowhere/at/all.bin").read_bytes()
        if kind == "exit":
            raise typer.Exit(3)
        if kind == "bug":
            raise KeyError("a fault of the program")
        typer.echo("done")

    if how == "context":

        @app.command()
        def command(kind: str) -> None:
            with friendly_errors():
                body(kind)
    elif how == "bare":
        app.command()(friendly_errors(body))
    else:
        app.command()(friendly_errors()(body))
    return app


@pytest.mark.parametrize("how", ["context", "bare", "called"])
def test_friendly_errors(how: str) -> None:
    runner, app = CliRunner(), _application(how)
    result = runner.invoke(app, ["value"])
    assert (result.exit_code, result.stderr) == (2, "error: `batch_size` was 0; it must be at least 1\n")
    result = runner.invoke(app, ["os"])
    assert (result.exit_code, result.stderr) == (2, "error: /nowhere/at/all.bin: No such file or directory\n")
    assert runner.invoke(app, ["exit"]).exit_code == 3
    result = runner.invoke(app, ["fine"])
    assert (result.exit_code, result.stdout) == (0, "done\n")
    # Called twice: a guard is made anew for each call.
    assert runner.invoke(app, ["value"]).exit_code == 2
    assert isinstance(runner.invoke(app, ["bug"]).exception, KeyError)


def test_the_version_is_told() -> None:
    from typer.testing import CliRunner

    from tileflash import __version__
    from tileflash.cli import app

    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == f"tileflash {__version__}"
