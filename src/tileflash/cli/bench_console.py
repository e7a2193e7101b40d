"""What the benchmarks' commands print alike: tables that keep their width, and the machine they are of."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from tileflash.bench.sitting import Sitting

_WIDE = 1000


def table_console() -> Console:
    """Standard output; a file or a pipe has no width that cells must be cut to."""
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.width = _WIDE
    return console


def machine_line(sitting: Sitting) -> str:
    """GPU and versions."""
    return f"{sitting.gpu}, {', '.join(f'{name} {version}' for name, version in sitting.versions.items())}"
