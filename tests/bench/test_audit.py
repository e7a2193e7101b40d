"""Figures that cannot be true are found: a timer that does not wait, a peer that computes something else, inputs without content, cells
that contradict each other, spreads, a GPU that throttles."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from support.lines import H200, attention_lines, train_lines
from tileflash.bench import Line, Statistic, attention, read
from tileflash.bench.attention import AttentionSuite, run_suite
from tileflash.bench.attention_variants import attention_variant
from tileflash.bench.audit import audit
from tileflash.bench.tables import render
from tileflash.bench.timing import Timing, TimingPlan, compare
from tileflash.cli import app

SMALL = AttentionSuite(
    head_dims=(16,), lengths=(16, 32), masks=("causal",), variants=("math", "reference"), tokens=32, width=32, dtype="float32",
    device="cpu", baseline="math", timing=TimingPlan(rounds=1, target_ms=0.0, warmup_ms=0.0, pause_ms=0.0),
)  # fmt: skip
COMMAND = [
    *(
        "bench",
        "attention",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--tokens",
        "32",
        "--width",
        "32",
        "--lengths",
        "16,32",
    ),
    *("--head-dims", "16", "--rounds", "1", "--target-ms", "0", "--pause-ms", "0", "--largest-spread", "99"),
]


class Device:
    """Takes calls at once and works on them later, as a GPU does."""

    def __init__(self) -> None:
        self._queue: queue.Queue[float] = queue.Queue()
        threading.Thread(target=self._work, daemon=True).start()

    def launch(self, seconds: float) -> None:
        self._queue.put(seconds)

    def synchronize(self) -> None:
        self._queue.join()

    def _work(self) -> None:
        while True:
            time.sleep(self._queue.get())
            self._queue.task_done()


class DeviceClock:
    """Times calls of a `Device`; `waits` False is the classic fault: the clock stops when the call is queued."""

    is_asynchronous = True

    def __init__(self, device: Device, waits: bool) -> None:
        self._device, self._waits = device, waits

    def measure(self, call: Callable[[], object], calls: int) -> list[float]:
        times = []
        for _ in range(calls):
            self._device.synchronize()
            start = time.perf_counter()
            call()
            if self._waits:
                self._device.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        return times

    def prepare(self, host_ms: float) -> None:
        pass

    def issue_ms(self, call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3

    def wall_ms(self, call: Callable[[], object], calls: int) -> float:
        self._device.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        self._device.synchronize()
        return (time.perf_counter() - start) * 1e3 / calls


@pytest.mark.parametrize("waits", [True, False])
def test_a_timer_that_does_not_wait_for_the_device_is_caught(waits: bool) -> None:
    device = Device()
    plan = TimingPlan(rounds=2, target_ms=0.0, warmup_ms=0.0, pause_ms=0.0)
    calls = {"kernel": lambda: device.launch(0.02)}
    timing = compare(calls, DeviceClock(device, waits), baseline=None, plan=plan)["kernel"]
    assert timing.wall_ms is not None
    assert timing.disagrees is not waits


def test_a_small_call_that_keeps_the_host_longer_than_the_device_is_not_blamed() -> None:
    device = Device()

    def call() -> None:
        time.sleep(0.01)
        device.launch(0.0)

    clock = DeviceClock(device, waits=False)
    plan = TimingPlan(rounds=1, target_ms=0.0, warmup_ms=0.0, pause_ms=0.0)
    assert not compare({"kernel": call}, clock, baseline=None, plan=plan)["kernel"].disagrees


def test_a_timer_that_does_not_wait_is_flagged_in_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Timing(Statistic(0.01, 0.01, 0.01, 1), None, 3, wall_ms=20.0)
    monkeypatch.setattr(attention, "compare", lambda calls, *_, **__: dict.fromkeys(calls, broken))
    cell = next(run_suite(SMALL)).cells[0]
    assert cell.flags == ("timer_disagrees",)
    assert cell.reason == "0.01 ms, but 20 ms a call by the host's clock"
    result = CliRunner().invoke(app, [*COMMAND, "--variants", "math"])
    assert result.exit_code == 1
    assert "timer_disagrees" in result.stdout
    assert "error: attention, math, forward batch=2" in result.stderr


def test_a_peer_that_computes_the_wrong_thing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention_variant("math")

    def forgets_the_mask(q: Any, k: Any, v: Any, causal: bool) -> Any:
        return right(q, k, v, False)

    monkeypatch.setattr(attention, "attention_variant", lambda name, *_: right if name == "math" else forgets_the_mask)
    result = CliRunner().invoke(app, [*COMMAND, "--masks", "causal", "--variants", "math,reference"])
    assert result.exit_code == 1
    assert result.stdout.count("wrong_result") == 4 + 4  # each of its cells, and each reason
    assert "error: attention, reference, forward batch=2" in result.stderr
    assert "error: attention, math" not in result.stderr


@pytest.mark.parametrize("make", [torch.zeros, torch.ones, lambda *a, **k: torch.full(*a, torch.nan, **k)])
def test_inputs_without_content_are_caught(monkeypatch: pytest.MonkeyPatch, make: Callable[..., torch.Tensor]) -> None:
    monkeypatch.setattr(torch, "randn", lambda shape, generator, device, dtype: make(shape, device=device, dtype=dtype))
    for result in run_suite(SMALL):
        for cell in result.cells:
            assert (cell.timing, cell.flags) == (None, ("trivial_input",))
            assert cell.reason.startswith("q has a standard deviation of")
    assert CliRunner().invoke(app, [*COMMAND, "--variants", "math"]).exit_code == 1


def _found(lines: list[Line], **options: Any) -> list[str]:
    return [finding.flag for finding in audit(lines, **options).findings]


def _changed(lines: list[Line], metric: str, factor: float, **case: Any) -> list[Line]:
    """The lines with a figure of `metric` (in cases that hold `case`) multiplied."""

    def change(line: Line) -> Line:
        if (
            line.metric != metric
            or line.median is None
            or any(line.case[name] != value for name, value in case.items())
        ):
            return line
        return replace(line, median=line.median * factor, low=line.low * factor, high=line.high * factor)  # type: ignore[operator]

    return [change(line) for line in lines]


def test_sound_lines_are_left_as_they_are() -> None:
    lines = [*attention_lines(), *train_lines(), *train_lines(seq=64, oom=True)]
    result = audit(lines)
    assert (result.lines, result.findings, result.complaints()) == (tuple(lines), (), [])


def test_a_speed_up_that_the_two_times_do_not_allow() -> None:
    lines = attention_lines()
    assert _found(_changed(lines, "speed_ratio_to_fa2", 1.1)) == []  # still within what the times' spreads allow
    result = audit(_changed(lines, "speed_ratio_to_fa2", 1.5, seq=512))
    (finding,) = result.findings
    assert finding.flag == "contradiction"
    assert finding.message.endswith("speed_ratio_to_fa2: 2.7 to 3.3, but the two times allow 1.64 to 2.44")
    assert [line.flags for line in result.lines] == [("contradiction",)] * 3 + [
        ("unsupported",),
        (),
        (),
        (),
        ("unsupported",),
    ]
    block = render("attention-forward", list(result.lines), "en")
    assert "| 128 | causal | 512 | 68.7 ¹ | 34.4 ¹ | unsupported | 3.00x (2.70 – 3.30) ¹ | 343.6 |" in block


def test_tokens_a_second_that_the_step_does_not_allow() -> None:
    assert _found(_changed(train_lines(), "tokens_per_s", 1.05)) == []
    assert _found(_changed(train_lines(), "tokens_per_s", 1.5)) == ["contradiction"] * 2
    assert _found(_changed(train_lines(), "step_ms", 0.5)) == ["contradiction"] * 2


def test_more_work_in_less_time_or_less_memory() -> None:
    lines = [*train_lines(seq=64), *train_lines(seq=128)]
    assert _found(lines) == []
    assert _found(_changed(lines, "peak_bytes", 0.5, seq=128)) == ["contradiction"] * 2
    faster = [line for line in _changed(lines, "step_ms", 0.4, seq=128) if line.metric == "step_ms"]
    assert _found(faster) == ["contradiction"] * 2
    other_sitting = [replace(line, run="another") if line.case["seq"] == 128 else line for line in faster]
    assert _found(other_sitting) == []


def test_beyond_the_limit() -> None:
    assert _found(_changed(attention_lines(), "time_ms", 0.1, seq=512)).count("faster_than_limit") == 2
    case = {"batch": 1, "seq": 16}
    peak = H200.line("memory", case, "math", "peak_bytes", Statistic(99, 99, 99, 1), limit=100)
    rate = H200.line("generation", case, "flash", "tokens_per_s", Statistic(9, 9, 11, 3), limit=10)
    result = audit([peak, rate], largest_spread=1.0)
    assert [line.flags for line in result.lines] == [("less_than_needed",), ("faster_than_limit",)]


def test_a_wide_spread_is_marked_and_counts_in_means() -> None:
    lines = attention_lines()
    assert _found(lines, largest_spread=0.1).count("wide_spread") == 6
    with pytest.raises(ValueError, match="`largest_spread` was nan"):
        audit(lines, largest_spread=float("nan"))
    wide = [replace(line, low=0.1) if line.metric.startswith("speed") and line.low else line for line in lines]
    block = render(
        "attention-forward", [line for line in wide if line.metric.startswith("speed") or line.variant == "fa2"], "en"
    )
    assert "2.00x (0.10 – 2.20) ¹" in block
    assert "wide spread (`wide_spread`)" in block
    assert "**2.00x** over 2 points" in block


def test_host_time_may_spread_further() -> None:
    for metric, found in (("host_us", []), ("time_ms", ["wide_spread"])):
        line = H200.line("host", {"mode": "forward"}, "math", metric, Statistic(10.0, 9.0, 13.0, 9))
        assert _found([line]) == found


def test_of_a_comparison_taken_up_again_the_last_figure_holds() -> None:
    old = _changed(train_lines(), "step_ms", 0.1)
    assert _found([*old, *train_lines()]) == []


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "ledger.jsonl"
    yield path
    assert read(path)


def test_what_ours_cannot_do_is_a_complaint_and_what_a_peer_cannot_is_a_row() -> None:
    case = {"batch": 1, "seq": 16}
    for variant, flag, told in (
        ("tileflash-triton", "failed", 1), ("fa4", "failed", 0), ("fa4", "unsupported", 0), ("fa4", "wrong_result", 1),
        ("baseline", "out_of_memory", 0), ("flash", "failed", 1), ("flash-attn", "unsupported", 0),
    ):  # fmt: skip
        line = H200.line("attention", case, variant, "time_ms", None, flags=(flag,))
        assert len(audit([line]).complaints()) == told


def test_the_command_audits_what_it_has_measured(monkeypatch: pytest.MonkeyPatch, ledger: Path) -> None:
    """A spread that is wide in every cell, by a clock that stutters."""
    from tileflash.bench.timing import CpuClock

    class Stutters(CpuClock):
        turns = 0

        def measure(self, call: Callable[[], object], calls: int) -> list[float]:
            self.turns += 1
            call()
            return [float(self.turns)] * calls

    monkeypatch.setattr("tileflash.bench.timing.clock_for", lambda device: Stutters())
    arguments = [*COMMAND, "--variants", "math", "--rounds", "3", "--output", str(ledger)]
    assert CliRunner().invoke(app, arguments).exit_code == 0  # 99 times the median is allowed
    result = CliRunner().invoke(app, [*arguments, "--largest-spread", "0.1"])
    assert result.exit_code == 1
    assert "wide_spread" in result.stdout
    assert "error: wide_spread: attention, math, forward batch=2" in result.stderr
    assert "`--largest-spread` was 0.0" in CliRunner().invoke(app, [*arguments, "--largest-spread", "0"]).stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: CUDA events")
def test_on_a_gpu_a_timer_without_synchronisation_is_caught() -> None:
    from tileflash.bench.timing import CpuClock, CudaClock

    class Forgets(CudaClock):
        measure = CpuClock.measure  # type: ignore[assignment]

    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    plan = TimingPlan(rounds=1, target_ms=5.0, warmup_ms=5.0, pause_ms=0.0)
    for clock, disagrees in ((Forgets, True), (CudaClock, False)):
        timing = compare({"product": lambda: a @ a}, clock(torch.device("cuda")), baseline=None, plan=plan)["product"]
        assert timing.disagrees is disagrees
