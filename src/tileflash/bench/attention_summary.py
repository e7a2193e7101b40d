"""What a whole attention suite says: mean speed ratios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tileflash.bench.attention import DIRECTIONS, CaseResult
from tileflash.bench.flags import DOUBTFUL
from tileflash.bench.statistic import geometric_mean


@dataclass(frozen=True)
class Mean:
    """Geometric mean of a variant's speed ratios to the baseline over `points` of `cases` cases."""

    direction: str
    variant: str
    ratio: float
    points: int
    cases: int


def geometric_means(results: Sequence[CaseResult], baseline: str) -> list[Mean]:
    """For each direction and each variant but the baseline, over the cases where both were measured without a flag that makes the
    figure false."""
    means = []
    for direction in DIRECTIONS:
        chosen = [result for result in results if result.case.direction == direction]
        for variant in dict.fromkeys(cell.variant for result in chosen for cell in result.cells):
            sound = [
                cell.timing
                for result in chosen
                for cell in result.cells
                if cell.variant == variant and not set(cell.flags) - DOUBTFUL
            ]
            ratios = [
                timing.speed_ratio.median for timing in sound if timing is not None and timing.speed_ratio is not None
            ]
            if variant != baseline and ratios:
                means.append(Mean(direction, variant, geometric_mean(ratios), len(ratios), len(chosen)))
    return means
