"""What a whole attention suite says: mean speed ratios, and figures that cannot all be true."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tileflash.bench.attention import DIRECTIONS, AttentionCase, CaseResult
from tileflash.bench.statistic import geometric_mean
from tileflash.bench.timing import Timing

_TOO_FAST = 0.7  # a longer case may not take less than this share of a shorter one's time


@dataclass(frozen=True)
class Mean:
    """Geometric mean of a variant's speed ratios to the baseline over `points` of `cases` cases."""

    direction: str
    variant: str
    ratio: float
    points: int
    cases: int


def geometric_means(results: Sequence[CaseResult], baseline: str) -> list[Mean]:
    """For each direction and each variant but the baseline, over the cases where both were measured without a flag."""
    means = []
    for direction in DIRECTIONS:
        chosen = [result for result in results if result.case.direction == direction]
        for variant in dict.fromkeys(cell.variant for result in chosen for cell in result.cells):
            sound = [
                cell.timing for result in chosen for cell in result.cells if cell.variant == variant and not cell.flags
            ]
            ratios = [
                timing.speed_ratio.median for timing in sound if timing is not None and timing.speed_ratio is not None
            ]
            if variant != baseline and ratios:
                means.append(Mean(direction, variant, geometric_mean(ratios), len(ratios), len(chosen)))
    return means


def contradictions(results: Sequence[CaseResult]) -> list[str]:
    """Cells that cannot all be true: the same number of tokens at a greater length is more work, so it cannot take much
    less time. Such a pair means that one of them measured something else."""
    found = []
    by_variant: dict[tuple[str, ...], list[tuple[AttentionCase, Timing]]] = {}
    for result in results:
        for cell in result.cells:
            if cell.timing is not None:
                key = (cell.variant, result.case.direction, result.case.mask, str(result.case.head_dim))
                by_variant.setdefault(key, []).append((result.case, cell.timing))
    for (variant, *_), timings in by_variant.items():
        ordered = sorted(timings, key=lambda pair: pair[0].seq)
        for (shorter, quick), (longer, slow) in pairwise(ordered):
            if slow.time_ms.high < _TOO_FAST * quick.time_ms.low:
                found.append(
                    f"{variant}: {longer} took {slow.time_ms.high:.4g} ms, less than {shorter} with "
                    f"{quick.time_ms.low:.4g} ms, although it is more work"
                )
    return found
