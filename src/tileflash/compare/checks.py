"""What the demo must show: losses fall, and both schemes' losses agree."""

from __future__ import annotations

from tileflash.compare import numbers
from tileflash.compare.figures import Comparison, losses_fell
from tileflash.compare.plan import SCHEMES, model_name

# The last steps' mean loss must be this fraction below the first loss: far more than one batch differs from another.
DEMO_FALL_FRACTION = 0.1


def demo_complaints(comparisons: list[Comparison]) -> list[str]:
    """One line for everything that is not as it must be; empty when the demo shows what it is for."""
    return [line for comparison in comparisons for line in _of(comparison)]


def _of(comparison: Comparison) -> list[str]:
    setting = comparison.setting
    name = f"{model_name(setting.model)} at sequence {setting.sequence_length}"
    gap = comparison.loss_gap
    if gap is None:
        return [f"{name}: no pair of finished runs to compare"]
    lines = []
    if not gap.agrees:
        size, tolerance = numbers.gap(gap.worst.size), numbers.gap(gap.worst.tolerance)
        lines.append(f"{name}: the losses differ by {size} at step {gap.worst.step}; must be at most {tolerance}")
    for scheme in SCHEMES:
        figures = comparison.scheme(scheme)
        if not losses_fell(figures, DEMO_FALL_FRACTION):
            first, last = figures.train_loss[0], figures.train_loss[-1]
            lines.append(f"{name}: the loss of {scheme} did not fall ({first:.4f} at first, {last:.4f} at last)")
    return lines
