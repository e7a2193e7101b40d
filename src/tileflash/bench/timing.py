"""Fair timing of several callables on the same inputs.

Every variant is warmed up; then come rounds, in each of which every variant runs once for the same target time after
the same pause, in an order drawn anew. A round's figure is the median of its calls; a ratio is formed within a round,
so that a GPU that grows warmer or slower between rounds moves both its sides.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Protocol

from tileflash.bench.statistic import Statistic, summarize

if TYPE_CHECKING:
    import torch

L2_FLUSH_BYTES = 256 * 1024 * 1024  # several times the largest L2 (60 MB on an H200, 126 MB on a B200)
_MAX_CALLS = 1_000
_MIN_CALLS = 3
_WALL_CALLS = 5
_LONG_MS = 100.0  # what takes longer is timed by the host's clock once
_HOST_BOUND = 2.0  # a call that takes less than this many times its issuing may be the host's time, not the device's
_DISAGREES = 0.5  # a time below this share of the wall clock's is none: the clock did not wait for the device
_MAX_LEAD = 32


class Clock(Protocol):
    """Times calls on one kind of device. `is_asynchronous`: whether a call returns before the device has done it."""

    is_asynchronous: bool

    def measure(self, call: Callable[[], object], calls: int) -> list[float]:
        """Milliseconds of each of `calls` calls."""
        ...

    def prepare(self, host_ms: float) -> None:
        """Told, once, the longest time that issuing a call of any variant takes on the host."""
        ...

    def issue_ms(self, call: Callable[[], object]) -> float:
        """Milliseconds until one call returns on the host, whatever the device still has to do."""
        ...

    def wall_ms(self, call: Callable[[], object], calls: int) -> float:
        """Milliseconds a call of `calls` in a row by the host's clock, the device waited for before and after: a second opinion."""
        ...


class CpuClock:
    """perf_counter around each call. Caches are left as they are."""

    is_asynchronous = False
    description = "CPU: time.perf_counter around each call, caches warm"

    def measure(self, call: Callable[[], object], calls: int) -> list[float]:
        """See `Clock.measure`."""
        times = []
        for _ in range(calls):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
        return times

    def prepare(self, host_ms: float) -> None:
        """Nothing to prepare: a call returns when it is done."""

    def issue_ms(self, call: Callable[[], object]) -> float:
        """See `Clock.issue_ms`."""
        return self.measure(call, 1)[0]

    def wall_ms(self, call: Callable[[], object], calls: int) -> float:
        """See `Clock.wall_ms`."""
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls * 1e3


class CudaClock:
    """CUDA events around each call, the L2 cache flushed before each by zeroing a 256 MB buffer.

    The flush also keeps the GPU busy while the host issues the call, and is repeated where one is too short for that:
    the events then hold the kernels' time and no launch time. Every variant gets the same flushes.
    """

    is_asynchronous = True
    description = "CUDA events around each call, L2 flushed before each (a 256 MB buffer zeroed), launches hidden"

    def __init__(self, device: torch.device) -> None:
        import torch

        self._torch = torch
        self._device = device
        self._buffer = torch.empty(L2_FLUSH_BYTES, dtype=torch.int8, device=device)
        self._lead = 1

    def prepare(self, host_ms: float) -> None:
        """See `Clock.prepare`."""
        self._buffer.zero_()
        flush_ms = median(self._events(self._buffer.zero_, 5, lead=1))
        self._lead = min(_MAX_LEAD, max(1, math.ceil(1.5 * host_ms / flush_ms)))

    def measure(self, call: Callable[[], object], calls: int) -> list[float]:
        """See `Clock.measure`."""
        return self._events(call, calls, self._lead)

    def issue_ms(self, call: Callable[[], object]) -> float:
        """See `Clock.issue_ms`."""
        self._torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        call()
        issued = time.perf_counter() - start
        self._torch.cuda.synchronize(self._device)
        return issued * 1e3

    def wall_ms(self, call: Callable[[], object], calls: int) -> float:
        """See `Clock.wall_ms`."""
        self._torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        self._torch.cuda.synchronize(self._device)
        return (time.perf_counter() - start) / calls * 1e3

    def _events(self, call: Callable[[], object], calls: int, lead: int) -> list[float]:
        event = self._torch.cuda.Event
        stream = self._torch.cuda.current_stream(self._device)  # the device need not be the current one
        pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(calls)]
        for start, end in pairs:
            for _ in range(lead):
                self._buffer.zero_()
            start.record(stream)
            call()
            end.record(stream)
        self._torch.cuda.synchronize(self._device)
        return [float(start.elapsed_time(end)) for start, end in pairs]


def clock_for(device: torch.device | str) -> CpuClock | CudaClock:
    """The clock of a device: CPU or CUDA (ROCm included); ValueError for another."""
    import torch

    device = torch.device(device)
    if device.type == "cpu":
        return CpuClock()
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"`device` was {device}, but PyTorch sees no GPU here; use --device cpu")
        return CudaClock(device)
    raise ValueError(f"`device` was {device}; timing knows cpu and cuda")


@dataclass(frozen=True)
class TimingPlan:
    """How long and how often to measure. ValueError names a field that makes no sense."""

    rounds: int = 3
    target_ms: float = 200.0  # of calls, for each variant in each round
    warmup_ms: float = 50.0
    pause_ms: float = 20.0
    seed: int = 0
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)

    def __post_init__(self) -> None:
        if not self.rounds >= 1:  # written so that NaN is refused too
            raise ValueError(f"`rounds` was {self.rounds}; it must be at least 1")
        for name in ("target_ms", "warmup_ms", "pause_ms"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"`{name}` was {value}; it must be a finite number of milliseconds >= 0")


@dataclass(frozen=True)
class Timing:
    """Times of one variant over the rounds, and its speed relative to the baseline: baseline's time / its time within
    each round (above 1 is faster than the baseline). `calls` were timed in each round. `wall_ms`: what a call takes at least by the
    host's clock with the device waited for; None where the host, not the device, sets the pace, so that it says nothing."""

    time_ms: Statistic
    speed_ratio: Statistic | None
    calls: int
    wall_ms: float | None = None

    @property
    def disagrees(self) -> bool:
        """Whether the host's clock says at least twice as long: then the timer did not wait, or timed something else."""
        return self.wall_ms is not None and self.time_ms.median < _DISAGREES * self.wall_ms


def compare(
    variants: Mapping[str, Callable[[], object]], clock: Clock, *, baseline: str | None, plan: TimingPlan
) -> dict[str, Timing]:
    """Time every variant; ratios are to `baseline`, None when that is not among the variants.

    An exception of a variant passes through: call each once before, to see that it works.
    """
    if not variants:
        raise ValueError("`variants` was empty; there must be something to time")
    calls = {name: _warm_up(call, clock, plan) for name, call in variants.items()}
    issue_ms = {name: median(clock.issue_ms(call) for _ in range(3)) for name, call in variants.items()}
    clock.prepare(max(issue_ms.values()))
    wall_ms = {name: _wall_ms(call, clock, issue_ms[name]) for name, call in variants.items()}
    generator = random.Random(plan.seed)
    rounds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(plan.rounds):
        order = list(variants)
        generator.shuffle(order)
        for name in order:
            plan.sleep(plan.pause_ms * 1e-3)
            clock.measure(variants[name], 1)  # after the pause the clocks are down and the caches cold: not counted
            rounds[name].append(median(clock.measure(variants[name], calls[name])))
    reference = rounds.get(baseline) if baseline is not None else None
    return {
        name: Timing(
            summarize(times),
            None if reference is None else summarize([r / t for r, t in zip(reference, times, strict=True)]),
            calls[name],
            wall_ms[name],
        )
        for name, times in rounds.items()
    }


def _wall_ms(call: Callable[[], object], clock: Clock, issue_ms: float) -> float | None:
    """The lowest of three, so that a busy host does not show as a slow device."""
    if not clock.is_asynchronous:
        return None  # there is nothing to wait for, so nothing that could be forgotten
    wall = clock.wall_ms(call, 1)
    if wall < _LONG_MS:
        wall = min(clock.wall_ms(call, _WALL_CALLS) for _ in range(3))
    return wall if wall >= _HOST_BOUND * issue_ms else None


def _warm_up(call: Callable[[], object], clock: Clock, plan: TimingPlan) -> int:
    """Run for `warmup_ms`; how many calls then fill `target_ms`."""
    clock.measure(call, 1)  # may compile
    times = clock.measure(call, 2)
    while sum(times) < plan.warmup_ms and len(times) < _MAX_CALLS:
        times += clock.measure(call, min(len(times), _MAX_CALLS))
    typical = max(median(times), 1e-6)
    return max(_MIN_CALLS, min(_MAX_CALLS, math.ceil(plan.target_ms / typical)))


def impossible(time_ms: float, limit_ms: float | None) -> bool:
    """Whether a time beats the physical limit: then the timer or the count of work is broken, never the kernel good."""
    return limit_ms is not None and not time_ms >= limit_ms
