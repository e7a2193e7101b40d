"""The guard's limits against statistics computed otherwise, its counting, and its end."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from tileflash.train.errors import TrainingStoppedError
from tileflash.train.guard import SpikeGuard


def guard(loss_z: float = 3.0, gradient_z: float = 4.0, window: int = 8, most: int = 3) -> SpikeGuard:
    return SpikeGuard(loss_z=loss_z, gradient_z=gradient_z, window=window, max_skips_in_a_row=most)


def test_limits_are_the_windows_mean_plus_z_deviations() -> None:
    values = np.random.default_rng(0).normal(5, 1, 20)
    watched = guard()
    for step, value in enumerate(values):
        watched.record(step, float(value), float(2 * value), skipped=False)
    last = values[-8:]
    limits = watched.limits()
    assert limits.loss == pytest.approx(last.mean() + 3 * last.std(), rel=1e-12)
    assert limits.gradient_norm == pytest.approx(2 * last.mean() + 4 * 2 * last.std(), rel=1e-12)


def test_no_limit_before_the_window_is_full_or_where_it_is_off_or_constant() -> None:
    watched = guard(gradient_z=0.0)
    for step in range(7):
        watched.record(step, float(step), float(step), skipped=False)
    assert watched.limits().loss > 1e38
    watched.record(7, 7.0, 7.0, skipped=False)
    assert watched.limits().loss < 20
    assert watched.limits().gradient_norm > 1e38
    constant = guard()
    for step in range(8):
        constant.record(step, 1.0, 1.0, skipped=False)
    assert constant.limits().loss > 1e38


def test_no_limit_lets_inf_or_nan_pass() -> None:
    limits = guard().limits()
    assert math.isfinite(limits.loss)
    assert math.isfinite(limits.gradient_norm)


def test_skipped_steps_are_counted_named_and_kept_out_of_the_window() -> None:
    watched = guard(window=2)
    watched.record(1, 1.0, 1.0, skipped=False)
    watched.record(2, 2.0, 2.0, skipped=False)
    before = watched.limits()
    assert "the loss was nan" in (watched.record(3, math.nan, 1.0, skipped=True) or "")
    assert "the loss was 90 (limit 3)" in (watched.record(4, 90.0, 1.0, skipped=True) or "")
    assert watched.limits() == before
    assert watched.record(5, 1.5, 1.0, skipped=False) is None
    assert "norm of the gradient was inf" in (watched.record(6, 1.0, math.inf, skipped=True) or "")
    assert watched.skipped == 3


def test_too_many_in_a_row_stop_the_run_but_not_scattered_ones() -> None:
    watched = guard(most=3)
    for step in range(0, 12, 3):
        watched.record(step, math.nan, 1.0, skipped=True)
        watched.record(step + 1, math.nan, 1.0, skipped=True)
        watched.record(step + 2, 1.0, 1.0, skipped=False)
    watched.record(20, math.nan, 1.0, skipped=True)
    watched.record(21, math.nan, 1.0, skipped=True)
    with pytest.raises(TrainingStoppedError, match=r"stopped at step 22: 3 steps in a row .* the loss was nan"):
        watched.record(22, math.nan, 1.0, skipped=True)


def test_state_goes_through_json_bit_for_bit() -> None:
    watched = guard()
    for step, value in enumerate(np.random.default_rng(1).normal(3, 1, 11)):
        watched.record(step, float(value), float(value) / 3, skipped=step == 5)
    other = guard()
    other.load_state_dict(json.loads(json.dumps(watched.state_dict())))
    assert other.limits() == watched.limits()
    assert other.state_dict() == watched.state_dict()
