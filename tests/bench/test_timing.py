"""Timing is interleaved, fair and reproducible; ratios are formed within a round; impossible figures are seen."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from tileflash.bench.statistic import Statistic, geometric_mean, summarize
from tileflash.bench.timing import CpuClock, TimingPlan, clock_for, compare, impossible


class FakeClock:
    """Calls take what `times` says, drifting upwards by `drift` with every measurement of the clock."""

    is_asynchronous = True

    def __init__(self, times: dict[str, float], drift: float = 0.0) -> None:
        self.times, self.drift = times, drift
        self.log: list[tuple[str, int]] = []
        self.host_ms: list[float] = []
        self.slow = 1.0

    def measure(self, call: Callable[[], object], calls: int) -> list[float]:
        name = str(call())
        self.log.append((name, calls))
        self.slow += self.drift
        return [self.times[name] * self.slow] * calls

    def prepare(self, host_ms: float) -> None:
        self.host_ms.append(host_ms)

    def issue_ms(self, call: Callable[[], object]) -> float:
        return self.times[str(call())] / 10

    def wall_ms(self, call: Callable[[], object], calls: int) -> float:
        return self.times[str(call())] * 1.1


def _compare(
    times: dict[str, float], drift: float = 0.0, baseline: str | None = "a", **plan: Any
) -> tuple[Any, FakeClock]:
    clock = FakeClock(times, drift)
    calls = {name: (lambda name=name: name) for name in times}
    settings = {"rounds": 5, "target_ms": 100.0, "warmup_ms": 10.0, "pause_ms": 0.0} | plan
    return compare(calls, clock, baseline=baseline, plan=TimingPlan(**settings)), clock


def test_times_ratios_and_numbers_of_calls() -> None:
    timings, clock = _compare({"a": 2.0, "b": 1.0, "c": 400.0})
    assert timings["a"].time_ms == Statistic(2.0, 2.0, 2.0, 5)
    assert timings["a"].speed_ratio == Statistic(1.0, 1.0, 1.0, 5)
    assert timings["b"].speed_ratio.median == 2.0  # twice as fast as the baseline
    assert timings["c"].speed_ratio.median == 0.005
    assert [timings[name].calls for name in "abc"] == [50, 100, 3]  # 100 ms of each, at least 3 calls
    assert clock.host_ms == [40.0]  # the slowest to issue decides for all


def test_every_round_has_every_variant_in_an_order_drawn_anew() -> None:
    _, clock = _compare({"a": 1.0, "b": 1.0, "c": 1.0}, rounds=20)
    timed = [name for name, calls in clock.log if calls == 100]
    rounds = [tuple(timed[i : i + 3]) for i in range(0, 60, 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert len(set(rounds)) > 3
    _, again = _compare({"a": 1.0, "b": 1.0, "c": 1.0}, rounds=20)
    assert again.log == clock.log
    _, other = _compare({"a": 1.0, "b": 1.0, "c": 1.0}, rounds=20, seed=1)
    assert other.log != clock.log


def test_a_drifting_machine_does_not_move_the_ratio() -> None:
    """Every measurement is 1 % slower than the one before: the times spread, the ratios hardly."""
    timings, _ = _compare({"a": 2.0, "b": 1.0}, drift=0.01, rounds=9)
    assert timings["a"].time_ms.high / timings["a"].time_ms.low > 1.2
    ratio = timings["b"].speed_ratio
    assert 1.94 < ratio.low <= ratio.median <= ratio.high < 2.06


def test_pauses_are_equal() -> None:
    pauses: list[float] = []
    _compare({"a": 1.0, "b": 3.0}, rounds=4, pause_ms=25.0, sleep=pauses.append)
    assert pauses == [0.025] * 8


def test_without_a_baseline_there_are_no_ratios() -> None:
    timings, _ = _compare({"a": 1.0, "b": 2.0}, baseline="not measured")
    assert timings["a"].speed_ratio is timings["b"].speed_ratio is None
    with pytest.raises(ValueError, match="`variants` was empty"):
        _compare({})


@pytest.mark.parametrize("name", ["rounds", "target_ms", "warmup_ms", "pause_ms"])
def test_bad_plans(name: str) -> None:
    for value in (-1, float("nan")):
        with pytest.raises(ValueError, match=f"`{name}` was"):
            TimingPlan(**{name: value})


def test_a_broken_timer_is_seen() -> None:
    assert impossible(0.09, 0.1)
    assert impossible(0.0, 0.1)
    assert impossible(float("nan"), 0.1)
    assert not impossible(0.1, 0.1)
    assert not impossible(1e-9, None)


def test_cpu_clock_measures_time() -> None:
    clock = clock_for("cpu")
    assert isinstance(clock, CpuClock)
    times = clock.measure(lambda: time.sleep(0.005), 3)
    assert len(times) == 3
    assert all(5.0 <= t < 500.0 for t in times)
    counts = Counter[str]()
    clock.issue_ms(lambda: counts.update(["call"]))
    assert counts["call"] == 1
    with pytest.raises(ValueError, match="`device` was meta"):
        clock_for("meta")


def test_statistics() -> None:
    assert summarize([3.0, 1.0, 2.0, 10.0]) == Statistic(2.5, 1.0, 10.0, 4)
    assert geometric_mean([2.0, 0.5, 8.0]) == pytest.approx(2.0)
    for bad in ([], [1.0, float("nan")]):
        with pytest.raises(ValueError, match="`values` was"):
            summarize(bad)
    for bad in ([], [0.0], [-1.0], [float("inf")]):
        with pytest.raises(ValueError, match="`ratios`"):
            geometric_mean(bad)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: CUDA events")
def test_cuda_clock_hides_the_launch_and_grows_with_the_work() -> None:
    clock = clock_for("cuda")
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    plan = TimingPlan(rounds=3, target_ms=20, warmup_ms=20, pause_ms=1)

    def products(count: int) -> Callable[[], object]:
        def call() -> None:
            time.sleep(0.0003)  # a slow host: it must not show
            for _ in range(count):
                a @ a

        return call

    variants = {f"{n}": products(n) for n in (1, 2, 4)}
    timings = compare(variants, clock, baseline="1", plan=plan)
    medians = [timings[name].time_ms.median for name in ("1", "2", "4")]
    assert all(longer > 1.7 * shorter for shorter, longer in pairwise(medians))
    assert medians[0] > 2 * 4096**3 / 2300e12 * 1e3  # no GPU of the table is faster
    tiny = torch.zeros(1, device="cuda")

    def slow_launch() -> None:
        time.sleep(0.0003)
        tiny.add_(1)

    alone = compare({"tiny": slow_launch}, clock_for("cuda"), baseline=None, plan=plan)
    assert alone["tiny"].time_ms.median < 0.1
