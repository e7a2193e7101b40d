"""What a sitting records of its GPU: clocks and why they are lower, temperature, power, and what the GPU reaches."""

from __future__ import annotations

import time
from typing import Any

import pytest

from support.clocks import SteadyClock
from support.lines import H200, attention_lines
from tileflash.bench import Line
from tileflash.bench.audit import audit
from tileflash.bench.ceilings import ceiling_lines
from tileflash.bench.gpu_watch import GpuWatch, Reading
from tileflash.bench.table_words import words_for
from tileflash.bench.tables import render


class Hot:
    def __init__(self, *reasons: str) -> None:
        self.reasons = frozenset(reasons)

    def read(self) -> Reading:
        return Reading(1500.0, 88.0, 690.0, self.reasons)


def _sitting_on(sensors: Any) -> list[Line]:
    with GpuWatch(sensors, interval_s=0.001) as watch:
        time.sleep(0.01)
    return [*attention_lines(), *watch.lines(H200, "attention")]


def test_a_gpu_that_throttles_is_recorded_and_flags_the_sitting() -> None:
    lines = _sitting_on(Hot("hardware thermal slowdown", "software power cap"))
    device = [line for line in lines if line.suite == "device"]
    assert {line.metric: line.median for line in device} == {
        "sm_clock_mhz": 1500.0,
        "temperature_c": 88.0,
        "power_w": 690.0,
    }
    assert device[0].repeats >= 3
    assert str(device[0].case["reasons"]).startswith("hardware thermal slowdown in ")
    result = audit(lines)
    assert all("throttled" in line.flags for line in result.lines)
    assert "throttled: the GPU lowered its clocks: hardware thermal slowdown in" in result.complaints()[0]
    assert words_for("en").flags["throttled"].meaning in render("attention-forward", lines, "en")


def test_a_power_cap_is_recorded_and_is_no_fault() -> None:
    lines = _sitting_on(Hot("software power cap"))
    assert "software power cap in" in str(lines[-1].case["reasons"])
    assert audit(lines).complaints() == []


def test_sensors_that_stop_answering_end_nothing() -> None:
    class Gone:
        def read(self) -> Reading:
            raise RuntimeError("GPU is lost")

    assert _sitting_on(Gone()) == _sitting_on(None) == attention_lines()


def test_ceilings_are_measured_and_are_no_findings() -> None:
    product, copy = ceiling_lines("cpu", SteadyClock(), H200, "attention", size=16, copy_bytes=1000)
    assert product.median == 2 * 16**3 / 1e9  # of a clock that says a millisecond
    assert copy.median == pytest.approx(2e-3)
    assert (product.metric, copy.metric) == ("matmul_tflops", "copy_gb_per_s")
    assert audit([product, copy]).complaints() == []
