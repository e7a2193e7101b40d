"""What the GPU's sensors say while a suite runs: clocks, temperature, power, and why the clocks are lower than they could be."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from tileflash.bench.flags import THROTTLED
from tileflash.bench.ledger import Line
from tileflash.bench.sitting import Sitting
from tileflash.bench.statistic import summarize

SUITE = "device"
# NVML's clock event reasons (nvml.h). A power cap is how a GPU at full load works, the same for every peer: it is recorded and is no
# fault. Heat, a hardware slowdown and a power brake are.
_REASONS = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
_FAULTS = frozenset(_REASONS.values()) - {"software power cap"}
_INTERVAL_S = 0.25


@dataclass(frozen=True)
class Reading:
    """One look at the sensors."""

    sm_clock_mhz: float
    temperature_c: float
    power_w: float
    reasons: frozenset[str]


class Sensors(Protocol):
    """Whatever can be looked at."""

    def read(self) -> Reading: ...


class NvmlSensors:
    """The sensors of a CUDA device, found by its UUID. Raises pynvml.NVMLError or ImportError where there are none."""

    def __init__(self, device: str) -> None:
        import pynvml
        import torch

        pynvml.nvmlInit()
        self._nvml: Any = pynvml
        uuid = torch.cuda.get_device_properties(torch.device(device)).uuid
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

    def read(self) -> Reading:
        """See `Sensors`."""
        nvml, handle = self._nvml, self._handle
        bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        return Reading(
            nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            frozenset(name for bit, name in _REASONS.items() if bits & bit),
        )

    def energy_j(self) -> float:
        """Joules since the driver was loaded, where the GPU counts them; its counter moves about ten times a second."""
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3


def energy_counter(device: str) -> Callable[[], float] | None:
    """What reads the energy that a device has used, or None where it does not count (a CPU, AMD, older GPUs)."""
    if not device.startswith("cuda"):
        return None
    try:
        sensors = NvmlSensors(device)
        sensors.energy_j()
    except Exception:  # as in `GpuWatch.of`
        return None
    return sensors.energy_j


class GpuWatch:
    """Looks at the sensors four times a second, within `with`, in a thread of its own: NVML is read without the GPU having to stop."""

    def __init__(self, sensors: Sensors | None, interval_s: float = _INTERVAL_S) -> None:
        self._sensors, self._interval_s = sensors, interval_s
        self._readings: list[Reading] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @classmethod
    def of(cls, device: str) -> GpuWatch:
        """Of a device; it sees nothing on a CPU, and where NVML does not answer (AMD, a container without the library)."""
        if not device.startswith("cuda"):
            return cls(None)
        try:
            return cls(NvmlSensors(device))
        except Exception:  # NVML's errors have a base only where the package could be imported
            return cls(None)

    def __enter__(self) -> GpuWatch:
        if self._sensors is not None:
            self._look()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._sensors is not None:
            self._thread.join()
            self._look()

    def lines(self, sitting: Sitting, suite: str) -> Iterator[Line]:
        """Ledger lines: SM clock, temperature and power over the sitting; flagged where the GPU throttled. None where nothing was seen."""
        if not self._readings:
            return
        counts = Counter(reason for reading in self._readings for reason in reading.reasons)
        total = len(self._readings)
        reasons = ", ".join(f"{name} in {counts[name]} of {total} looks" for name in sorted(counts)) or "none"
        flags = (THROTTLED,) if _FAULTS & counts.keys() else ()
        for metric in ("sm_clock_mhz", "temperature_c", "power_w"):
            figure = summarize([float(getattr(reading, metric)) for reading in self._readings])
            yield sitting.line(SUITE, {"suite": suite, "reasons": reasons}, "gpu", metric, figure, flags=flags)

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._look()

    def _look(self) -> None:
        try:
            assert self._sensors is not None
            self._readings.append(self._sensors.read())
        except Exception:  # a GPU that stops answering must not end the measurement: what was seen stands
            self._stop.set()
