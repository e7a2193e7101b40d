"""The step by which losses are judged: the one furthest beyond what rounding explains there, wherever it is."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from tileflash.compare.checks import demo_complaints
from tileflash.compare.conclusions import conclusion
from tileflash.compare.figures import Comparison, compare_setting
from tileflash.compare.ledger import ledger_lines
from tileflash.compare.losses import LossGap, loss_tolerance
from tileflash.compare.plan import BASELINE, FLASH, CompareConfig, Setting
from tileflash.compare.report import Findings
from tileflash.compare.results import RunResult
from tileflash.compare.tables import losses_table
from tileflash.compare.texts import texts

MakeComparison = Callable[..., Comparison]


@pytest.fixture
def gap_of(make_setting: Callable[..., Setting], make_result: Callable[..., RunResult]) -> Callable[..., LossGap]:
    """The gap of repeats, each given as (losses of the baseline, losses of flash)."""

    def make(*repeats: tuple[Sequence[float], Sequence[float]], dtype: str = "bfloat16") -> LossGap:
        setting = make_setting(dtype=dtype)
        results = [
            make_result(setting, scheme, number, (100.0, *[10.0] * (len(losses) - 1)), losses)
            for number, pair in enumerate(repeats, start=1)
            for scheme, losses in zip((BASELINE, FLASH), pair, strict=True)
        ]
        gap = compare_setting(setting, {result.run: result for result in results}).loss_gap
        assert gap is not None
        return gap

    return make


def test_without_a_pair_there_is_no_gap(make_comparison: MakeComparison) -> None:
    assert make_comparison([1.0], []).loss_gap is None


def test_the_difference_its_step_and_its_repeat(gap_of: Callable[..., LossGap]) -> None:
    gap = gap_of(((5.0, 4.0, 3.0), (5.0, 4.0, 3.0)), ((5.0, 4.0, 3.0), (5.0, 4.25, 2.5)))
    assert (gap.worst.size, gap.worst.step, gap.worst.loss, gap.repeat) == (0.5, 3, 3.0, 2)
    assert gap_of(((5.0,) * 2, (5.0,) * 2)).within_scheme is None, "one repeat says nothing of what repeats differ by"


@pytest.mark.parametrize("flash_at_18", [18.0, 18.08])
def test_a_large_gap_at_a_large_loss_hides_no_smaller_one(gap_of: Callable[..., LossGap], flash_at_18: float) -> None:
    """0.08 at a loss of 18 is below the 0.09 expected there; 0.06 at a loss of 5 is above 0.05."""
    gap = gap_of(((18.0, 5.0, 4.0, 3.0), (flash_at_18, 5.06, 4.0, 3.0)))
    assert (gap.worst.step, gap.worst.loss) == (2, 5.0)
    assert gap.worst.tolerance == 0.05
    assert not gap.agrees


def test_the_tolerance_is_the_larger_of_both_and_the_limit_itself_agrees(gap_of: Callable[..., LossGap]) -> None:
    assert gap_of(((18.0, 4.0), (18.08, 4.0))).agrees
    assert not gap_of(((5.0, 4.0), (5.08, 4.0))).agrees
    assert not gap_of(((18.0, 4.0), (18.08, 4.0)), dtype="float32").agrees
    assert gap_of(((16.0, 4.0), (16.0625, 4.0))).agrees
    assert loss_tolerance(10.0, "bfloat16") == loss_tolerance(0.1, "bfloat16") == 0.05
    assert loss_tolerance(20.0, "bfloat16") == pytest.approx(0.1)
    assert loss_tolerance(20.0, "float32") == 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(20))
def test_losses_agree_when_every_step_of_every_pair_does(gap_of: Callable[..., LossGap], dtype: str, seed: int) -> None:
    """Against the definition, step by step; gaps are drawn around the tolerance."""
    draw = random.Random(seed)
    repeats = []
    for _ in range(2):
        losses = [draw.uniform(0.1, 30.0) for _ in range(6)]
        other = [loss + draw.uniform(-1.05, 1.05) * max(*_parts(loss, dtype)) for loss in losses]
        repeats.append((losses, other))
    fine = all(
        abs(a - b) <= max(*_parts(a, dtype)) for losses, other in repeats for a, b in zip(losses, other, strict=True)
    )
    assert gap_of(*repeats, dtype=dtype).agrees is fine


def _parts(loss: float, dtype: str) -> tuple[float, float]:
    return (1e-4, 0.0) if dtype == "float32" else (0.05, 0.005 * loss)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("sides", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_loss_that_is_not_finite_never_agrees(
    gap_of: Callable[..., LossGap], broken: float, sides: tuple[bool, bool], step: int
) -> None:
    """Whichever side and step it is on, and whatever finite difference stands beside it."""
    baseline, flash = [9.0, 5.0, 3.0], [9.0, 6.0, 3.0]
    for losses, is_broken in zip((baseline, flash), sides, strict=True):
        if is_broken:
            losses[step - 1] = broken
    gap = gap_of((baseline, flash), ((9.0, 5.0, 3.0), (9.0, 5.0, 3.0)))
    assert not gap.agrees
    assert math.isnan(gap.worst.size)
    assert gap.worst.step == step


def test_what_repeats_of_one_scheme_differ_by(gap_of: Callable[..., LossGap]) -> None:
    gap = gap_of(((5.0, 4.0), (5.0, 4.5)), ((5.0, 4.25), (5.0, 4.0)))
    assert gap.within_scheme is not None
    assert (gap.worst.size, gap.within_scheme.size, gap.within_scheme.step) == (0.5, 0.5, 2)
    assert gap.is_noise
    assert not gap.agrees


def test_noise_at_a_large_loss_excuses_no_difference_at_a_small_one(gap_of: Callable[..., LossGap]) -> None:
    """Repeats are 0.1 apart at a loss of 40 (half of what is expected there); the schemes 0.08 at a loss of 5."""
    gap = gap_of(((40.0, 5.0), (40.0, 5.08)), ((40.1, 5.0), (40.1, 5.08)))
    assert gap.worst.size == pytest.approx(0.08)
    assert not gap.is_noise
    louder = gap_of(((40.0, 5.0), (40.0, 5.08)), ((40.4, 5.0), (40.4, 5.08)))
    assert louder.is_noise


def test_what_repeats_differ_by_is_where_it_is_most_for_its_loss(gap_of: Callable[..., LossGap]) -> None:
    """0.1 at a loss of 40, where 0.2 is expected, is less than 0.08 at a loss of 5, where 0.05 is."""
    gap = gap_of(((40.0, 5.0), (40.0, 5.08)), ((40.1, 5.08), (40.1, 5.08)))
    assert gap.within_scheme is not None
    assert (gap.within_scheme.size, gap.within_scheme.step) == (pytest.approx(0.08), 2)
    assert gap.is_noise


def test_every_place_judges_by_the_same_step(make_comparison: MakeComparison) -> None:
    """Sentence, table, the demo's check and the ledger's flag."""
    comparison = make_comparison([2.0], [1.0], losses=((18.0, 5.0, 4.0, 3.0), (18.08, 5.06, 4.0, 3.0)))
    said = conclusion([comparison], {"gpt2": [comparison]}, texts("en"))
    assert (
        "The losses differ by 6.0e-02 (gpt2, sequence 64, step 2), more than the 5.0e-02 expected of bfloat16" in said
    )
    row = losses_table([comparison], texts("en")).rows[0]
    assert [cell.text for cell in row[4:7]] == ["6.0e-02", "5.0e-02", "2"]
    assert row[4].mark == "bad"
    assert "the losses differ by 6.0e-02 at step 2; must be at most 5.0e-02" in demo_complaints([comparison])[0]


@pytest.mark.parametrize(
    ("flash_losses", "flagged"),
    [
        ((18.08, 5.0, 4.0, 3.0), False),
        ((18.08, 5.06, 4.0, 3.0), True),
        ((18.08, 5.0, math.nan, 3.0), True),
    ],
)
def test_the_ledgers_flag(
    make_result: Callable[..., RunResult], flash_losses: tuple[float, ...], flagged: bool
) -> None:
    config = CompareConfig(models=("gpt2",), lengths=(64,), repeats=1, num_iteration=4, public_setting=False)
    (setting,) = config.length_settings("gpt2")
    losses = {BASELINE: (18.0, 5.0, 4.0, 3.0), FLASH: flash_losses}
    results = [make_result(setting, scheme, losses=losses[scheme]) for scheme in (BASELINE, FLASH)]
    lines = ledger_lines(Findings(config, {result.run: result for result in results}, 2))
    flags = {(line.variant, *line.flags) for line in lines}
    assert flags == {(BASELINE,), (FLASH, "losses_differ") if flagged else (FLASH,)}
    assert len(lines) == 6
