"""The statistics against figures worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from tileflash.compare.figures import (
    Comparison,
    Measured,
    compare_setting,
    latency_ms,
    losses_fell,
    median_step_ms,
    tokens_per_s,
)
from tileflash.compare.plan import BASELINE, FLASH, Setting
from tileflash.compare.results import Outcome, RunResult

MakeComparison = Callable[..., Comparison]


def test_latency_is_the_mean_of_steps_2_to_n(
    make_setting: Callable[..., Setting], make_result: Callable[..., RunResult]
) -> None:
    result = make_result(make_setting(length=64), BASELINE, step_ms=(900.0, 10.0, 12.0, 20.0))
    assert latency_ms(result) == pytest.approx(14.0)
    assert median_step_ms(result) == pytest.approx(12.0)
    assert tokens_per_s(result) == pytest.approx(256 / 0.014)


def test_the_public_reports_own_figures_come_out(make_comparison: MakeComparison) -> None:
    """GPT-2 on the A100: 119.71 ms and 1914 MB against 63.58 ms and 3056 MB was printed as 1.88x and -59.67 %."""
    comparison = make_comparison([119.71], [63.58], peaks=(1914.0, 3056.0))
    assert comparison.speedup is not None
    assert comparison.memory_saving is not None
    assert comparison.baseline.tokens_per_s is not None
    assert round(comparison.speedup.median, 2) == 1.88
    assert round(comparison.memory_saving.median * 100, 2) == -59.67
    assert comparison.baseline.tokens_per_s.median == pytest.approx(2138.50, abs=0.01)  # 256 tokens / 119.71 ms


def test_ratios_are_taken_on_pairs_of_the_same_repeat(make_comparison: MakeComparison) -> None:
    # Pairs: 20/10 = 2, 40/10 = 4, 30/20 = 1.5. The ratio of the medians would be 30/10 = 3.
    comparison = make_comparison([20.0, 40.0, 30.0], [10.0, 10.0, 20.0])
    assert comparison.speedup == Measured(2.0, 1.5, 4.0, 3)
    assert comparison.throughput_gain == Measured(1.0, 0.5, 3.0, 3)
    assert comparison.baseline.latency_ms == Measured(30.0, 20.0, 40.0, 3)
    assert comparison.flash.latency_ms == Measured(10.0, 10.0, 20.0, 3)


def test_a_repeat_without_its_partner_counts_for_its_scheme_but_for_no_ratio(
    make_setting: Callable[..., Setting], make_result: Callable[..., RunResult]
) -> None:
    setting = make_setting()
    results = [
        make_result(setting, BASELINE, 1, (1.0, 20.0, 20.0, 20.0)),
        make_result(setting, BASELINE, 2, (1.0, 40.0, 40.0, 40.0)),
        make_result(setting, FLASH, 1, outcome=Outcome.FAILED, exit_status=1),
        make_result(setting, FLASH, 2, (1.0, 10.0, 10.0, 10.0)),
    ]
    comparison = compare_setting(setting, {result.run: result for result in results})
    assert comparison.speedup == Measured(4.0, 4.0, 4.0, 1)
    assert comparison.baseline.latency_ms == Measured(30.0, 20.0, 40.0, 2)
    assert comparison.flash.outcome is Outcome.FINISHED


def test_out_of_memory_in_one_repeat_is_the_settings_outcome(
    make_setting: Callable[..., Setting], make_result: Callable[..., RunResult]
) -> None:
    setting = make_setting()
    results = [
        make_result(setting, BASELINE, 1),
        make_result(setting, BASELINE, 2, outcome=Outcome.OUT_OF_MEMORY, exit_status=3),
        make_result(setting, FLASH, 1),
        make_result(setting, FLASH, 2),
    ]
    comparison = compare_setting(setting, {result.run: result for result in results})
    assert comparison.baseline.outcome is Outcome.OUT_OF_MEMORY
    assert comparison.baseline.latency_ms is None
    assert comparison.speedup is None
    assert comparison.memory_saving is None
    assert comparison.flash.latency_ms is not None


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [([], None), ([Outcome.FAILED], Outcome.FAILED), ([Outcome.FAILED, Outcome.TIMED_OUT], Outcome.TIMED_OUT)],
)
def test_the_outcome_without_a_finished_run(
    make_setting: Callable[..., Setting],
    make_result: Callable[..., RunResult],
    outcomes: list[Outcome],
    expected: Outcome | None,
) -> None:
    setting = make_setting()
    results = [make_result(setting, FLASH, i, outcome=o, exit_status=1) for i, o in enumerate(outcomes, start=1)]
    assert compare_setting(setting, {result.run: result for result in results}).flash.outcome is expected


def test_results_of_other_settings_do_not_mix_in(
    make_setting: Callable[..., Setting], make_result: Callable[..., RunResult]
) -> None:
    setting, other = make_setting(length=64), make_setting(length=128)
    results = [make_result(setting, BASELINE), make_result(other, FLASH)]
    comparison = compare_setting(setting, {result.run: result for result in results})
    assert comparison.flash.outcome is None
    assert comparison.speedup is None


def test_memory_saving_needs_both_peaks(make_comparison: MakeComparison) -> None:
    assert make_comparison([10.0], [10.0], peaks=(100.0, None)).memory_saving is None
    assert make_comparison([10.0], [10.0], peaks=(200.0, 50.0)).memory_saving == Measured(0.75, 0.75, 0.75, 1)


@pytest.mark.parametrize(
    ("losses", "fell"),
    [
        ((5.0, 4.9, 4.8, 4.4), True),
        ((5.0, 3.0, 2.0, 4.6), False),
        ((5.0, 5.0, 5.0, 5.0), False),
        ((5.0, 4.0, 3.0, math.nan), False),
    ],
)
def test_whether_losses_fell(make_comparison: MakeComparison, losses: tuple[float, ...], fell: bool) -> None:
    assert losses_fell(make_comparison([1.0], [1.0], losses=(losses, losses)).baseline, by_fraction=0.1) is fell
