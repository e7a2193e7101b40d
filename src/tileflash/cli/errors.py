"""Bad input is told in one line: what was wrong and what it must be, never a traceback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, overload

import typer

BAD_INPUT = 2  # the exit status of bad input, the same that typer gives for a bad flag


@contextmanager
def _guard() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise  # `tileflash ... | head`: click ends quietly by itself
    except (ValueError, OSError) as error:
        # typer.Exit is not a ValueError, so a command's own exit status passes through.
        typer.echo(f"error: {_message(error)}", err=True)
        raise typer.Exit(BAD_INPUT) from error


def _message(error: ValueError | OSError) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


@overload
def friendly_errors(function: Callable[..., Any]) -> Callable[..., Any]: ...
@overload
def friendly_errors(function: None = None) -> Any: ...
def friendly_errors(function: Callable[..., Any] | None = None) -> Any:
    """Turn a ValueError or OSError into one line on stderr and exit status 2.

    Used as `@friendly_errors`, `@friendly_errors()` or `with friendly_errors():`; put it below `@app.command()`, next
    to the function, whose signature it keeps. Every other exception passes through with its traceback: it is a fault
    of the program, not of its input.
    """
    return _guard() if function is None else _guard()(function)
