"""Every direction that the figures can point, and what is then said."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from tileflash.compare.conclusions import Verdict, conclusion, memory_verdict, speed_verdict
from tileflash.compare.figures import Comparison, Measured
from tileflash.compare.texts import texts

MakeComparison = Callable[..., Comparison]
EQUAL = (5.0, 4.0, 3.0, 2.0)
EN = texts("en")


@pytest.mark.parametrize(
    ("speedup", "verdict"),
    [
        (Measured(1.5, 1.4, 1.6, 3), Verdict.BETTER),
        (Measured(0.7, 0.65, 0.75, 3), Verdict.WORSE),
        (Measured(1.0, 1.0, 1.0, 3), Verdict.SAME),
        (Measured(1.05, 0.98, 1.12, 3), Verdict.SAME),
        (Measured(1.05, 1.0, 1.06, 3), Verdict.SAME),  # 5 % with a spread of 6 %
        (Measured(0.95, 0.94, 1.0, 3), Verdict.SAME),
        (Measured(1.004, 1.004, 1.004, 3), Verdict.SAME),  # below the floor of 0.5 %
        (Measured(1.006, 1.006, 1.006, 3), Verdict.BETTER),
        (Measured(1.04, 1.04, 1.04, 1), Verdict.SAME),  # one repeat: 5 % is assumed
        (Measured(1.06, 1.06, 1.06, 1), Verdict.BETTER),
        (Measured(0.94, 0.94, 0.94, 1), Verdict.WORSE),
    ],
)
def test_a_difference_counts_when_it_is_larger_than_the_spread(speedup: Measured, verdict: Verdict) -> None:
    assert speed_verdict(speedup) is verdict
    saving = Measured(speedup.median - 1, speedup.low - 1, speedup.high - 1, speedup.repeats)
    assert memory_verdict(saving) is verdict


def _one(comparison: Comparison, language: str = "en") -> str:
    return conclusion([comparison], {"gpt2": [comparison]}, texts(language))


def test_faster_and_less_memory(make_comparison: MakeComparison) -> None:
    said = _one(make_comparison([20.0, 20.2], [10.0, 10.0], peaks=(100.0, 60.0)))
    assert said.startswith(
        "gpt2, batch 4, sequence 64: --flash is 2.01x as fast as the baseline (2.00x to 2.02x over 2 repeats); "
        "--flash needs 40.0 % less peak memory."
    )


def test_slower_and_more_memory(make_comparison: MakeComparison) -> None:
    said = _one(make_comparison([10.0, 10.0], [20.0, 20.0], peaks=(1914.0, 3056.0)))
    assert "--flash is slower than the baseline, at 0.50x its speed" in said
    assert "--flash needs 59.7 % more peak memory" in said
    assert "faster" not in said
    assert "less peak memory" not in said


def test_no_measurable_difference(make_comparison: MakeComparison) -> None:
    said = _one(make_comparison([10.0, 11.0], [10.2, 10.3]))
    assert "there is no measurable difference in speed" in said
    assert "there is no measurable difference in peak memory" in said


def test_one_repeat_is_said_to_be_one(make_comparison: MakeComparison) -> None:
    assert "2.00x as fast as the baseline (one repeat, so its spread is unknown)" in _one(make_comparison([2.0], [1.0]))


def test_memory_that_was_not_measured(make_comparison: MakeComparison) -> None:
    assert "peak memory was not measured" in _one(make_comparison([2.0], [1.0], peaks=(None, None)))


@pytest.mark.parametrize(
    ("baseline", "flash", "told", "not_told"),
    [
        ("oom", [12.5], "the baseline runs out of memory, --flash takes 12.50 ms a step", "fast"),
        ([12.5], "oom", "--flash runs out of memory, the baseline takes 12.50 ms a step", "fast"),
        ("oom", "oom", "both run out of memory", "only"),
        ("oom", [], "baseline runs out of memory, the other was not measured", "fast"),
    ],
)
def test_out_of_memory(
    make_comparison: MakeComparison, baseline: object, flash: object, told: str, not_told: str
) -> None:
    said = _one(make_comparison(baseline, flash))
    assert told in said
    assert not_told not in said


def test_nothing_measured(make_comparison: MakeComparison) -> None:
    assert _one(make_comparison([], [])) == EN("nothing")
    assert _one(make_comparison([1.0], [])) == EN("nothing")


def _lengths(make: MakeComparison, *rows: tuple[int, object, object, tuple[float, float]]) -> str:
    comparisons = [make(baseline, flash, length=length, peaks=peaks) for length, baseline, flash, peaks in rows]
    return conclusion(comparisons[:1], {"gpt2": comparisons}, EN)


def test_how_ratios_move_with_the_length(make_comparison: MakeComparison) -> None:
    said = _lengths(
        make_comparison,
        (64, [10.0], [10.0], (100.0, 100.0)),
        (1024, [50.0], [10.0], (100.0, 50.0)),
        (4096, [30.0], [10.0], (100.0, 25.0)),
        (8192, "oom", [10.0], (100.0, 25.0)),
        (16384, "oom", "oom", (100.0, 25.0)),
    )
    assert (
        "From sequence 64 to 4096 its speed-up goes from 1.00x (within the spread) to 3.00x and its memory saving from 0.0 % to 75.0 %."
        in said
    )
    assert "The best is 5.00x at 1024." in said
    assert "At sequence 8192 only the baseline runs out of memory." in said
    assert "At sequence 16384 both run out of memory." in said
    assert "slower" not in said
    assert "more peak memory" not in said


def test_where_flash_loses_is_said(make_comparison: MakeComparison) -> None:
    said = _lengths(
        make_comparison,
        (64, [5.0], [10.0], (100.0, 120.0)),
        (256, [8.0], [10.0], (100.0, 110.0)),
        (1024, [20.0], [10.0], (100.0, 90.0)),
        (4096, [20.0], "oom", (100.0, 90.0)),
    )
    assert "--flash is slower at sequence 64, 256." in said
    assert "--flash needs more peak memory at sequence 64, 256." in said
    assert "memory saving from -20.0 % to 10.0 %" in said
    assert "The best is" not in said, "the best is at the longest length, which was just named"
    assert "At sequence 4096 only --flash runs out of memory." in said


@pytest.mark.parametrize(
    ("dtype", "flash_losses", "key"),
    [
        (
            "float32",
            (5.0, 4.0, 3.00009, 2.0),
            "furthest apart for their size (gpt2, sequence 64, step 3) they differ by 9.0e-05, within the 1.0e-04",
        ),
        (
            "float32",
            (5.0, 4.0, 3.00011, 2.0),
            "The losses differ by 1.1e-04 (gpt2, sequence 64, step 3), more than the 1.0e-04",
        ),
        ("bfloat16", (5.0, 4.0, 3.01, 2.0), "The losses agree"),
        ("bfloat16", (5.0, 4.0, 3.1, 2.0), "look into it"),
        ("bfloat16", (5.0, math.nan, 3.1, 2.0), "A loss is not finite (gpt2, sequence 64, step 2)"),
        ("float32", EQUAL, "they differ by 0, within the 1.0e-04"),
    ],
)
def test_what_is_said_of_the_losses(
    make_comparison: MakeComparison, dtype: str, flash_losses: tuple[float, ...], key: str
) -> None:
    assert key in _one(make_comparison([2.0], [1.0], dtype=dtype, losses=(EQUAL, flash_losses)))


def test_the_worst_of_all_settings_is_named(make_comparison: MakeComparison) -> None:
    good = make_comparison([2.0], [1.0], length=64, losses=(EQUAL, EQUAL))
    bad = make_comparison([2.0], [1.0], length=256, losses=(EQUAL, (5.0, 4.0, 3.0, 4.0)))
    said = conclusion([good], {"gpt2": [good, bad]}, EN)
    assert "The losses differ by 2.0e+00 (gpt2, sequence 256, step 4)" in said


def test_the_worst_setting_is_the_one_furthest_beyond_what_is_expected_there(make_comparison: MakeComparison) -> None:
    """0.08 at a loss of 18 is rounding (0.09 is expected), 0.06 at a loss of 5 is not."""
    high = make_comparison([2.0], [1.0], length=64, losses=((18.0, 4.0, 3.0, 2.0), (18.08, 4.0, 3.0, 2.0)))
    low = make_comparison([2.0], [1.0], length=256, losses=(EQUAL, (5.06, 4.0, 3.0, 2.0)))
    for order in ([high, low], [low, high]):
        said = conclusion(order[:1], {"gpt2": order}, EN)
        assert "The losses differ by 6.0e-02 (gpt2, sequence 256, step 1), more than the 5.0e-02" in said


def test_each_compute_dtype_has_its_own_worst_setting(make_comparison: MakeComparison) -> None:
    half = make_comparison([2.0], [1.0], losses=(EQUAL, (5.01, 4.0, 3.0, 2.0)))
    single = make_comparison([2.0], [1.0], dtype="float32", losses=(EQUAL, (5.01, 4.0, 3.0, 2.0)))
    said = conclusion([half], {"gpt2": [half, single]}, EN)
    assert "they differ by 1.0e-02, within the 5.0e-02 expected of bfloat16" in said
    assert "The losses differ by 1.0e-02 (gpt2, sequence 64, step 1), more than the 1.0e-04 expected of float32" in said


def test_chinese_says_the_same(make_comparison: MakeComparison) -> None:
    said = _one(make_comparison([20.0, 20.0], [10.0, 10.0], peaks=(100.0, 120.0)), "zh")
    assert "启用 --flash 后速度为 baseline 的 2.00x" in said
    assert "峰值占用增加 20.0 %" in said
    assert "两者损失一致" in said
