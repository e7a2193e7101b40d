"""`tileflash doctor`: what this machine can run, what it cannot and why, and the command that mends it."""

from __future__ import annotations

import json as json_module
from typing import Annotated

import typer

from tileflash.cli.errors import friendly_errors

_HELP = """What this machine can run, what it cannot and why, and the command that mends it.

It checks versions and whether they fit each other, GPUs and driver, each attention backend (loads, serves, and
computes a small problem right, forward and backward), other attention libraries that are installed
(an `undefined symbol` is explained), and the cache of compiled kernels. Nothing is changed.

Examples:

\b
  tileflash doctor
  tileflash doctor --no-self-test
      look, but run no kernel
  tileflash doctor --json > doctor.json
      for programs, and for reports of faults; docs/doctor.md has the schema

Exit status: 0 all is well, 1 something must be mended (each problem has a line "fix: ..."), 2 bad usage.
"""


@friendly_errors
def doctor(
    self_test: Annotated[bool, typer.Option("--self-test/--no-self-test", help="Let each backend compute.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 for warnings, too.")] = False,
    timeout_seconds: Annotated[
        float, typer.Option(min=1, help="For each import and each backend's test, compiling included.")
    ] = 120.0,
) -> None:
    from rich.console import Console

    from tileflash.doctor.console import print_diagnosis
    from tileflash.doctor.diagnosis import diagnose

    errors = Console(stderr=True)
    if errors.is_terminal:
        with errors.status("looking") as status:
            found = diagnose(self_test=self_test, timeout_s=timeout_seconds, on_start=status.update)
    else:
        found = diagnose(self_test=self_test, timeout_s=timeout_seconds)
    if as_json:
        typer.echo(json_module.dumps(found.to_json(), indent=2, allow_nan=False))
    else:
        print_diagnosis(Console(highlight=False, soft_wrap=True), found)
    raise typer.Exit(found.exit_status(strict))


doctor.__doc__ = _HELP
