"""The learning rate against its formula, written another way, and at the points that matter."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from tileflash.train.schedule import learning_rate


def rate(step: int, warmup: int = 10, last: int = 110, fraction: float = 0.1) -> float:
    return learning_rate(step, highest=1e-3, warmup_steps=warmup, last_step=last, final_fraction=fraction)


def test_warm_up_is_linear_and_ends_at_the_highest() -> None:
    assert [rate(step) for step in (1, 5, 10)] == pytest.approx([1e-4, 5e-4, 1e-3], rel=1e-15)


def test_cosine_ends_at_the_fraction_and_stays_there() -> None:
    assert rate(60) == pytest.approx(1e-3 * (0.1 + 0.9 * 0.5), rel=1e-12)  # halfway
    assert rate(35) == pytest.approx(1e-3 * (0.1 + 0.9 * (0.5 + math.sqrt(2) / 4)), rel=1e-12)  # at a quarter
    assert rate(110) == pytest.approx(1e-4, rel=1e-12)
    assert rate(1000) == rate(110)


def test_it_falls_strictly_after_the_warm_up() -> None:
    rates = [rate(step) for step in range(10, 111)]
    assert all(later < earlier for earlier, later in pairwise(rates))


def test_edges() -> None:
    assert rate(1, warmup=0) == 1e-3  # no warm-up: the first step has the highest
    assert rate(1, warmup=0, last=1) == 1e-3  # one step
    assert rate(7, warmup=0, fraction=1.0) == 1e-3  # a constant
    assert rate(5, warmup=10, last=5) == pytest.approx(5e-4)  # a run shorter than its warm-up
    assert rate(110, fraction=0.0) == 0.0
