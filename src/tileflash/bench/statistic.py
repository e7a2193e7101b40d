"""A measured figure is never one number: median, low and high of independent repeats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Statistic:
    """Median, smallest and largest of `repeats` independent measurements of one thing."""

    median: float
    low: float
    high: float
    repeats: int


def summarize(values: Sequence[float]) -> Statistic:
    """The statistic of at least one value; ValueError for none, or for one that is not finite."""
    if not values:
        raise ValueError("`values` was empty; a figure needs at least one measurement")
    if not all(math.isfinite(value) for value in values):
        raise ValueError(f"`values` was {list(values)}; every measurement must be finite")
    return Statistic(float(median(values)), float(min(values)), float(max(values)), len(values))


def geometric_mean(ratios: Iterable[float]) -> float:
    """The mean for ratios: of 2 and 1/2 it is 1. ValueError for no ratio, or for one that is not above 0."""
    logs = []
    for ratio in ratios:
        if not (ratio > 0 and math.isfinite(ratio)):
            raise ValueError(f"`ratios` held {ratio}; every ratio must be a finite number above 0")
        logs.append(math.log(ratio))
    if not logs:
        raise ValueError("`ratios` was empty; a mean needs at least one")
    return math.exp(math.fsum(logs) / len(logs))
