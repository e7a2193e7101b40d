"""Suites of attention at a fixed batch: `lengths` (time by length, the tables' batch 8), `scaling` (time and memory a token, batch 1) and
`versions` (one length, every implementation).

All three time a case as `bench attention` does, judged first, and measure the memory as `bench memory` does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tileflash.bench.attention import AttentionSuite, CaseResult, run_suite
from tileflash.bench.flags import OUT_OF_MEMORY
from tileflash.bench.ledger import Line
from tileflash.bench.memory import MemoryCell, MemorySuite, Pass, measure_memory
from tileflash.bench.roofline import Direction
from tileflash.bench.sitting import Sitting
from tileflash.bench.statistic import Statistic
from tileflash.bench.timing import Clock, TimingPlan

Name = Literal["lengths", "scaling", "versions"]
_PASSES: dict[Direction, Pass] = {"forward": "forward", "backward": "forward and backward"}


@dataclass(frozen=True)
class LengthsSuite:
    """Every length in every direction at one batch and head count. The first variant is what the others are compared with. ValueError
    names what does not fit."""

    name: Name
    lengths: tuple[int, ...]
    variants: tuple[str, ...]
    batch: int = 8
    heads: int = 32
    head_dim: int = 64
    mask: str = "causal"
    directions: tuple[Direction, ...] = ("forward",)
    dtype: str = "bfloat16"
    device: str = "cuda"
    budget_seconds: float | None = None
    timing: TimingPlan = field(default_factory=TimingPlan)
    fa3_library: Path | None = None

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"`lengths` was {self.lengths}; each must be at least 1")
        for name in ("batch", "heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` was {getattr(self, name)}; it must be at least 1")
        if self.budget_seconds is not None and not self.budget_seconds > 0:
            raise ValueError(f"`budget_seconds` was {self.budget_seconds}; it must be above 0")
        self.attention(self.lengths[0])  # checks the rest

    def attention(self, length: int) -> AttentionSuite:
        """One length as the suite `attention` has it."""
        return AttentionSuite(
            head_dims=(self.head_dim,), lengths=(length,), masks=(self.mask,), directions=self.directions, variants=self.variants,
            tokens=self.batch * length, width=self.heads * self.head_dim, dtype=self.dtype, device=self.device,
            baseline=self.variants[0] if self.variants else "", timing=self.timing, fa3_library=self.fa3_library,
        )  # fmt: skip

    def memory(self, length: int) -> MemorySuite:
        """One length as the suite `memory` has it."""
        return MemorySuite(
            (length,), self.variants, self.batch, self.heads, self.head_dim, self.mask == "causal", self.dtype, self.device,
            self.fa3_library,
        )  # fmt: skip


def run_lengths(
    suite: LengthsSuite, sitting: Sitting, clock: Clock, now: Callable[[], float] = time.monotonic
) -> Iterator[tuple[list[Line], list[str]]]:
    """Length by length: ledger lines (`time_ms`, `speed_ratio_to_...`, `peak_bytes`), and the reasons of what has none.

    With `budget_seconds` it stops before a length that would not end in time, taken to need four times the last one's.
    """
    begin, last = now(), 0.0
    for length in suite.lengths:
        started = now()
        if suite.budget_seconds is not None and started + 4 * last - begin >= suite.budget_seconds:
            return
        results = list(run_suite(suite.attention(length), gpu_name=sitting.gpu, clock=clock))
        memory = {(cell.variant, cell.which): cell for cell in measure_memory(suite.memory(length))}
        lines, reasons = [], []
        for result in results:
            lines += list(result.lines(sitting, suite.variants[0], suite.name))
            lines += list(_peaks(suite, result, memory, sitting))
            reasons += [f"{cell.variant}: {cell.reason} [{result.case}]" for cell in result.cells if cell.reason]
        yield lines, reasons
        last = now() - started


def _peaks(
    suite: LengthsSuite, result: CaseResult, memory: dict[tuple[str, Pass], MemoryCell], sitting: Sitting
) -> Iterator[Line]:
    """A peak for each variant that served; where the GPU's memory did not suffice, a line that says so."""
    served = {cell.variant for cell in result.cells if cell.timing is not None}
    for variant in suite.variants:
        cell = memory[variant, _PASSES[result.case.direction]]
        if cell.peak_bytes is not None and variant in served:
            peak = float(cell.peak_bytes)
            limit = float(cell.counted.least(variant, cell.which))
            figure = Statistic(peak, peak, peak, 1)
            yield sitting.line(suite.name, result.case.record(), variant, "peak_bytes", figure, limit=limit)
        elif cell.flag == OUT_OF_MEMORY:
            yield sitting.line(suite.name, result.case.record(), variant, "peak_bytes", None, flags=(OUT_OF_MEMORY,))
