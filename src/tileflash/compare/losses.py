"""How far the losses of two runs are apart, measured in what rounding explains: the step to judge by is found here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tileflash.compare.results import RunResult

# How far the losses of both schemes may differ at any step: (absolute, as a fraction of the loss), whichever is more.
# bfloat16 rounds to 0.4 %; a run whose loss leaps to 18 in its first steps shows it in full.
LOSS_TOLERANCE = {"float32": (1e-4, 0.0), "bfloat16": (5e-2, 5e-3)}


@dataclass(frozen=True)
class LossDifference:
    """Two losses of one step: how far apart they are, the loss itself, and the difference that rounding explains there.

    A loss that is not finite makes `size` NaN.
    """

    size: float
    step: int
    loss: float
    tolerance: float

    @staticmethod
    def between(one: float, other: float, step: int, dtype: str) -> LossDifference:
        """`one` is the loss that the tolerance is taken of."""
        # Inf - 5 is as far apart as Inf allows: by its own tolerance of Inf it would agree.
        size = abs(one - other) if math.isfinite(one) and math.isfinite(other) else math.nan
        return LossDifference(size, step, one, loss_tolerance(one, dtype))

    @property
    def in_tolerances(self) -> float:
        """`size` / `tolerance`, above 1 where rounding does not explain it; Inf where a loss is not finite."""
        # NaN compares false with everything: it must never hide behind a finite difference.
        return math.inf if math.isnan(self.size) else self.size / self.tolerance

    @property
    def agrees(self) -> bool:
        """Whether rounding explains the difference; false when a loss is not finite."""
        return self.size <= self.tolerance


@dataclass(frozen=True)
class LossGap:
    """Where |loss_baseline - loss_flash| is largest in tolerances, over all pairs and steps.

    Not where it is largest: at a large loss more is expected, and a smaller one elsewhere could pass unseen. `repeat` is
    the pair's. `within_scheme` is the same of any two repeats of one scheme: what the machine itself does not
    reproduce; None with a single repeat.
    """

    worst: LossDifference
    repeat: int
    within_scheme: LossDifference | None

    @property
    def agrees(self) -> bool:
        """Whether rounding explains the difference at every step; false when a loss is not finite."""
        return self.worst.agrees

    @property
    def is_noise(self) -> bool:
        """Whether two repeats of one scheme are as far apart, each difference measured in its own tolerance."""
        return self.within_scheme is not None and self.worst.in_tolerances <= self.within_scheme.in_tolerances


def loss_tolerance(loss: float, dtype: str) -> float:
    """The difference from `loss` that rounding explains, for a computation in "float32" or "bfloat16"."""
    absolute, fraction = LOSS_TOLERANCE[dtype]
    return max(absolute, fraction * abs(loss))


def loss_gap(pairs: Sequence[tuple[RunResult, RunResult]]) -> LossGap | None:
    """The gap over `pairs` of one setting, (baseline, flash) of each repeat; None without pairs."""
    if not pairs:
        return None
    dtype = pairs[0][0].run.setting.dtype
    differences = [
        (LossDifference.between(a, b, step, dtype), baseline.run.repeat)
        for baseline, flash in pairs
        for step, a, b in zip(baseline.steps, baseline.train_loss, flash.train_loss, strict=True)
    ]
    worst, repeat = max(differences, key=lambda difference: difference[0].in_tolerances)
    return LossGap(worst, repeat, _within_scheme(pairs, dtype))


def _within_scheme(pairs: Sequence[tuple[RunResult, RunResult]], dtype: str) -> LossDifference | None:
    if len(pairs) < 2:
        return None
    return max(
        (
            LossDifference.between(*_furthest(losses), step, dtype)
            for results in zip(*pairs, strict=True)
            for step, losses in zip(results[0].steps, zip(*(r.train_loss for r in results), strict=True), strict=True)
        ),
        key=lambda difference: difference.in_tolerances,
    )


def _furthest(losses: Iterable[float]) -> tuple[float, float]:
    """The lowest and the highest; the one that is not finite, twice, where there is one."""
    losses = list(losses)
    broken = [loss for loss in losses if not math.isfinite(loss)]
    return (broken[0], broken[0]) if broken else (min(losses), max(losses))
