"""Figures from results: medians over repeats with their spread, ratios on pairs of the same repeat."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tileflash.compare.losses import LossGap, loss_gap
from tileflash.compare.plan import BASELINE, FLASH, SCHEMES, Run, Setting
from tileflash.compare.results import Outcome, RunResult


@dataclass(frozen=True)
class Measured:
    """The median over the repeats, the lowest and the highest of them, and how many there were."""

    median: float
    low: float
    high: float
    repeats: int

    @staticmethod
    def of(values: Sequence[float]) -> Measured | None:
        """None where nothing was measured."""
        if not values:
            return None
        return Measured(statistics.median(values), min(values), max(values), len(values))


@dataclass(frozen=True)
class SchemeFigures:
    """One scheme in one setting. `outcome` is None when it was not run; a figure is None when no repeat gave it."""

    outcome: Outcome | None
    latency_ms: Measured | None = None
    median_step_ms: Measured | None = None
    tokens_per_s: Measured | None = None
    peak_used_bytes: Measured | None = None
    steps: tuple[int, ...] = ()
    train_loss: tuple[float, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Both schemes in one setting. Ratios are taken on pairs of the same repeat, then their median and spread.

    `speedup` = latency_baseline / latency_flash; `throughput_gain` = tokens_per_s_flash / tokens_per_s_baseline - 1;
    `memory_saving` = (peak_baseline - peak_flash) / peak_baseline. Gain and saving are fractions, not per cent.
    """

    setting: Setting
    baseline: SchemeFigures
    flash: SchemeFigures
    speedup: Measured | None
    throughput_gain: Measured | None
    memory_saving: Measured | None
    loss_gap: LossGap | None

    def scheme(self, name: str) -> SchemeFigures:
        return {BASELINE: self.baseline, FLASH: self.flash}[name]


def latency_ms(result: RunResult) -> float:
    """Mean of steps 2..N in milliseconds, as the public report has it: the first step also compiles and allocates."""
    return statistics.fmean(result.step_ms[1:])


def median_step_ms(result: RunResult) -> float:
    """Median of steps 2..N in milliseconds."""
    return statistics.median(result.step_ms[1:])


def tokens_per_s(result: RunResult) -> float:
    """Tokens of a step / latency."""
    return result.run.setting.tokens_per_step / latency_ms(result) * 1000.0


def compare_setting(setting: Setting, results: dict[Run, RunResult]) -> Comparison:
    """Put together all the runs of `setting` in `results`."""
    own = [result for run, result in results.items() if run.setting == setting]
    finished = {
        scheme: {r.run.repeat: r for r in own if r.run.scheme == scheme and r.outcome is Outcome.FINISHED}
        for scheme in SCHEMES
    }
    baseline, flash = (_figures([r for r in own if r.run.scheme == scheme]) for scheme in SCHEMES)
    both_finished = baseline.outcome is flash.outcome is Outcome.FINISHED
    repeats = sorted(finished[BASELINE].keys() & finished[FLASH].keys()) if both_finished else []
    pairs = [(finished[BASELINE][repeat], finished[FLASH][repeat]) for repeat in repeats]
    with_peaks = [
        (a.peak_used_bytes, b.peak_used_bytes)
        for a, b in pairs
        if a.peak_used_bytes is not None and b.peak_used_bytes is not None
    ]
    return Comparison(
        setting=setting,
        baseline=baseline,
        flash=flash,
        speedup=Measured.of([latency_ms(a) / latency_ms(b) for a, b in pairs]),
        throughput_gain=Measured.of([tokens_per_s(b) / tokens_per_s(a) - 1.0 for a, b in pairs]),
        memory_saving=Measured.of([(a - b) / a for a, b in with_peaks]),
        loss_gap=loss_gap(pairs),
    )


def _figures(results: list[RunResult]) -> SchemeFigures:
    """Out of memory in any repeat is the setting's outcome: such a run cannot be relied on."""
    outcomes = {result.outcome for result in results}
    if not outcomes:
        return SchemeFigures(None)
    if Outcome.OUT_OF_MEMORY in outcomes:
        return SchemeFigures(Outcome.OUT_OF_MEMORY)
    finished = sorted((r for r in results if r.outcome is Outcome.FINISHED), key=lambda result: result.run.repeat)
    if not finished:
        return SchemeFigures(Outcome.TIMED_OUT if Outcome.TIMED_OUT in outcomes else Outcome.FAILED)

    def over_repeats(figure: Callable[[RunResult], float]) -> Measured | None:
        return Measured.of([figure(result) for result in finished])

    return SchemeFigures(
        outcome=Outcome.FINISHED,
        latency_ms=over_repeats(latency_ms),
        median_step_ms=over_repeats(median_step_ms),
        tokens_per_s=over_repeats(tokens_per_s),
        peak_used_bytes=Measured.of([r.peak_used_bytes for r in finished if r.peak_used_bytes is not None]),
        steps=finished[0].steps,
        train_loss=finished[0].train_loss,
    )


def losses_fell(figures: SchemeFigures, by_fraction: float) -> bool:
    """Whether the mean loss of the last tenth of the steps is lower than the first loss by `by_fraction` of it."""
    losses = figures.train_loss
    last = losses[-max(1, len(losses) // 10) :]
    return bool(losses) and statistics.fmean(last) < losses[0] * (1.0 - by_fraction)
