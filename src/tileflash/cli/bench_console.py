"""What the benchmarks' commands do alike: one sitting with its ledger and its audit, tables that keep their width."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from tileflash.bench.audit import Audit
    from tileflash.bench.ledger import Line
    from tileflash.bench.sitting import Sitting

_WIDE = 1000


class BenchSession:
    """One sitting of a suite's command.

    Within `with` the GPU's ceilings are measured and its sensors watched. Lines that are added go to the ledger at once, so that an
    interruption loses nothing. ValueError where the device is not there or `output` is no ledger: before anything is measured.
    """

    def __init__(self, suite: str, device: str, output: Path | None, largest_spread: float) -> None:
        from tileflash.bench.gpu_watch import GpuWatch
        from tileflash.bench.ledger import require_ledger
        from tileflash.bench.sitting import Sitting
        from tileflash.bench.timing import clock_for
        from tileflash.environment import environment

        self.clock = clock_for(device)  # says what is wrong with the device
        if output is not None:
            require_ledger(output)
        if not largest_spread > 0:
            raise ValueError(f"`--largest-spread` was {largest_spread}; it must be above 0")
        self.sitting: Sitting = Sitting.begin(environment(device))
        self._suite, self._output, self._largest_spread = suite, output, largest_spread
        self._device, self._on_gpu = device, device.startswith("cuda")
        self._watch = GpuWatch.of(device)
        self._lines: list[Line] = []

    def __enter__(self) -> BenchSession:
        from tileflash.bench.ceilings import ceiling_lines

        self._watch.__enter__()
        if self._on_gpu:
            self.add(ceiling_lines(self._device, self.clock, self.sitting, self._suite))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.__exit__(kind, error, trace)
        self.add(self._watch.lines(self.sitting, self._suite))

    def add(self, lines: Iterable[Line]) -> None:
        """Keep lines for the audit, and append them to the ledger."""
        from tileflash.bench.ledger import append

        added = list(lines)
        self._lines += added
        if self._output is not None:
            append(self._output, added)

    def audit(self) -> Audit:
        """All lines so far, judged."""
        from tileflash.bench.audit import audit

        return audit(self._lines, self._largest_spread)

    def show(self, console: Console, block: str) -> None:
        """Print one of the report's tables (`bench.tables`), made of this sitting's lines."""
        from tileflash.bench.tables import render

        console.print(machine_line(self.sitting))
        print_markdown(console, render(block, self._lines, "en", self._largest_spread))

    def end(self, console: Console) -> int:
        """Say what the audit found; the exit status: 1 where it found anything."""
        from rich.console import Console

        if self._output is not None:
            console.print(f"appended to {self._output}", markup=False)
        errors = Console(stderr=True, highlight=False, soft_wrap=True)
        complaints = self.audit().complaints()
        for complaint in complaints:
            errors.print(f"error: {complaint}", markup=False)
        return int(bool(complaints))


def table_console() -> Console:
    """Standard output; a file or a pipe has no width that cells must be cut to."""
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.width = _WIDE
    return console


def print_markdown(console: Console, markdown: str) -> None:
    """Tables as tables, the rest as it stands."""
    from rich.table import Table

    for part in markdown.split("\n\n"):
        if not part.startswith("|"):
            console.print(part.replace("**", "").strip("*"), markup=False)
            continue
        head, rule, *rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in part.splitlines()]
        table = Table()
        for heading, alignment in zip(head, rule, strict=True):
            table.add_column(heading, justify="right" if alignment.endswith(":") else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)


def progress_line(text: str) -> None:
    """One line on stderr."""
    from rich.console import Console

    Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False)


def machine_line(sitting: Sitting) -> str:
    """GPU and versions."""
    return f"{sitting.gpu}, {', '.join(f'{name} {version}' for name, version in sitting.versions.items())}"
