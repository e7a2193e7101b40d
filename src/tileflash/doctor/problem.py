"""A problem as the doctor tells it, and the commands that remedies are made of."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: `id` is stable (docs/doctor.md lists all), `subject` what it is about, `fix` the remedy.

    An "error" keeps tileflash from what it should do on this machine; a "warning" does not. `said` is the loader's or the
    driver's own words, where there are any.
    """

    id: str
    subject: str
    severity: Severity
    what: str
    fix: str
    said: str = ""


def pip_install(*arguments: str) -> str:
    """The command that installs into the environment of this very Python."""
    if importlib.util.find_spec("pip") is None:  # environments made by uv have none
        return shlex.join(["uv", "pip", "install", "--python", sys.executable, *arguments])
    return shlex.join([sys.executable, "-m", "pip", "install", *arguments])


def version_tuple(version: str | None) -> tuple[int, ...]:
    """The leading numbers of a version: "2.11.0+cu130" -> (2, 11, 0); () for None and for what has none."""
    numbers: list[int] = []
    for part in (version or "").split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:  # "0rc1"
            break
    return tuple(numbers)


def dotted(version: tuple[int, ...]) -> str:
    """(2, 11) -> "2.11"."""
    return ".".join(map(str, version))
