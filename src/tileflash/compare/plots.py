"""The plots of a report as SVG text; labels are English."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tileflash.compare import numbers
from tileflash.compare.canvas import GRID, INK, length_axis, new_figure, recolour, styled, svg_of, with_axes
from tileflash.compare.figures import Comparison, Measured
from tileflash.compare.plan import BASELINE, FLASH, SCHEMES, model_name
from tileflash.compare.results import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["COLOURS", "GRID", "INK", "losses", "peak_memory", "recolour", "speedup", "step_time"]

# Each colour is used for one thing alone, so that it can be found again in the SVG. Orange and blue stay apart for every
# kind of colour vision, and the markers differ too.
COLOURS = {BASELINE: "#c2570c", FLASH: "#1d5fd1"}
_MARKERS = {BASELINE: "o", FLASH: "s"}


def step_time(comparisons: list[Comparison]) -> str:
    """Average latency by sequence length for both schemes, log-log, with the spread over the repeats."""
    return _by_length(comparisons, "latency_ms", 1.0, "avg latency (ms)")


def peak_memory(comparisons: list[Comparison]) -> str:
    """Peak memory by sequence length for both schemes, log-log; out of memory is marked at the top."""
    return _by_length(comparisons, "peak_used_bytes", 1.0 / numbers.MEBIBYTE, "peak used (MB)")


def speedup(comparisons: list[Comparison]) -> str:
    """Speed-up by sequence length as bars with their spread; a dashed line at 1x, where both are equally fast."""
    with styled():
        figure, axes = with_axes()
        for index, comparison in enumerate(comparisons):
            _bar(axes, index, comparison)
        axes.axhline(1.0, color=INK, linewidth=1, linestyle="--")
        axes.set_xticks(range(len(comparisons)), [str(c.setting.sequence_length) for c in comparisons])
        axes.set_xlim(-0.6, len(comparisons) - 0.4)
        axes.set_ylim(0, max([1.0, *(c.speedup.high for c in comparisons if c.speedup)]) * 1.2)
        axes.set_xlabel("sequence length")
        axes.set_ylabel("speed-up (baseline / flash)")
        return svg_of(figure, f"speedup-{model_name(comparisons[0].setting.model)}")


def losses(comparison: Comparison) -> str:
    """Both loss curves (first repeat) on one plot, and below it their difference, marked where it is largest for its loss."""
    with styled():
        figure = new_figure(5.0)
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
        for scheme, width, dashes in ((BASELINE, 4.0, "-"), (FLASH, 1.5, "--")):
            figures = comparison.scheme(scheme)
            upper.plot(
                figures.steps,
                figures.train_loss,
                dashes,
                linewidth=width,
                color=COLOURS[scheme],
                alpha=0.55 if scheme == BASELINE else 1,
                label=scheme,
            )
        upper.set_ylabel("train loss")
        upper.legend()
        pairs = zip(comparison.baseline.train_loss, comparison.flash.train_loss, strict=True)
        lower.plot(comparison.baseline.steps, [abs(a - b) for a, b in pairs], color=INK, linewidth=1)
        gap = comparison.loss_gap
        if gap is not None and math.isfinite(gap.worst.size):
            size, step, expected = gap.worst.size, gap.worst.step, numbers.gap(gap.worst.tolerance)
            lower.plot([step], [size], marker="v", color=INK)
            # In the title, not beside the marker, where it would run out of the frame or over the curve.
            title = f"largest for its loss: {numbers.gap(size)} at step {step} (expected: {expected})"
            lower.set_title(title, fontsize=9, loc="right")
        lower.set_ylim(bottom=0)
        lower.set_ylabel("|difference|")
        lower.set_xlabel("step")
        lower.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=False)
        for axes in (upper, lower):
            axes.grid(True, linewidth=0.6)
        setting = comparison.setting
        return svg_of(figure, f"loss-{model_name(setting.model)}-{setting.sequence_length}")


def _by_length(comparisons: list[Comparison], attribute: str, factor: float, label: str) -> str:
    with styled():
        figure, axes = with_axes()
        for scheme in SCHEMES:
            points: list[tuple[int, Measured]] = [
                (c.setting.sequence_length, getattr(c.scheme(scheme), attribute))
                for c in comparisons
                if getattr(c.scheme(scheme), attribute) is not None
            ]
            if points:
                middle = [m.median * factor for _, m in points]
                below = [(m.median - m.low) * factor for _, m in points]
                above = [(m.high - m.median) * factor for _, m in points]
                axes.errorbar(
                    [length for length, _ in points],
                    middle,
                    yerr=[below, above],
                    color=COLOURS[scheme],
                    marker=_MARKERS[scheme],
                    markersize=5,
                    capsize=3,
                    linewidth=1.8,
                    label=scheme,
                )
        _value_axis(axes, comparisons, attribute, factor)
        _mark_out_of_memory(axes, comparisons)
        length_axis(axes, [c.setting.sequence_length for c in comparisons])
        axes.set_ylabel(label)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="upper left")
        return svg_of(figure, f"{attribute}-{model_name(comparisons[0].setting.model)}")


def _value_axis(axes: Axes, comparisons: list[Comparison], attribute: str, factor: float) -> None:
    """Logarithmic, with ticks at 1, 2 and 5 in plain figures, and room at the top for the marks of out of memory."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    measured = [getattr(c.scheme(s), attribute) for c in comparisons for s in SCHEMES]
    values = [bound * factor for m in measured if m is not None for bound in (m.low, m.high)] or [1.0]
    axes.set_yscale("log")
    axes.set_ylim(min(values) / 1.3, max(values) * (max(values) / min(values)) ** 0.15 * 1.3)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:,.6g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _mark_out_of_memory(axes: Axes, comparisons: list[Comparison]) -> None:
    """A cross at the top of the frame, one scheme a little below the other so that two in one place can be seen."""
    for row, scheme in enumerate(SCHEMES):
        lengths = [c.setting.sequence_length for c in comparisons if c.scheme(scheme).outcome is Outcome.OUT_OF_MEMORY]
        height = 0.985 - 0.07 * row
        for length in lengths:
            options: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "color": COLOURS[scheme]}
            axes.plot([length], [height], marker="x", markersize=7, clip_on=False, **options)
            place: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
            axes.annotate(
                "OOM", (length, height), (-6, 0), ha="right", va="center", fontsize=8, color=COLOURS[scheme], **place
            )


def _bar(axes: Axes, index: int, comparison: Comparison) -> None:
    measured = comparison.speedup
    if measured is None:
        oom = [s for s in SCHEMES if comparison.scheme(s).outcome is Outcome.OUT_OF_MEMORY]
        told = f"{' and '.join(oom)}\nOOM" if oom else "no\npair"
        axes.text(index, 0.05, told, ha="center", va="bottom", fontsize=8)
        return
    spread = [[measured.median - measured.low], [measured.high - measured.median]]
    axes.bar(index, measured.median, width=0.6, color=COLOURS[FLASH], alpha=0.85)
    axes.errorbar(index, measured.median, yerr=spread, color=INK, capsize=4, linewidth=1.2)
    axes.annotate(
        numbers.ratio(measured.median), (index, measured.high), (0, 4), textcoords="offset points", ha="center"
    )
