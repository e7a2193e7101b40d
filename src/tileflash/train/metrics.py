"""What is measured in a step, and the line that says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tileflash.parallel.layout import SINGLE
from tileflash.train.resident_memory import peak_resident_bytes


@dataclass(frozen=True)
class StepMetrics:
    """One step. Its time spans everything: loading its data, computing, and the wait for the device at its end.

    `skipped` counts the skipped steps of the run so far; `skip_reason` is None where this one was applied. Peaks are of
    the run so far, from the start of the process on, building the model included (see `peak_memory`).
    """

    step: int
    train_loss: float
    learning_rate: float
    gradient_norm: float
    step_ms: float
    tokens_per_s: float
    peak_used_bytes: int
    peak_reserved_bytes: int
    skipped: int
    skip_reason: str | None = None

    def line(self, last_step: int, layout: str = SINGLE.label) -> str:
        """The log line in InfiniTrain's form; MB are of 2^20 bytes; `layout` says how ranks share the work."""
        return (
            f"step {self.step}/{last_step} | train loss {self.train_loss:.6f} | lr {self.learning_rate:.2e} | "
            f"({self.step_ms:.2f} ms | {self.tokens_per_s:.0f} tok/s | peak used: {self.peak_used_bytes >> 20} MB | "
            f"peak reserved: {self.peak_reserved_bytes >> 20} MB, {layout})"
        )

    def event(self) -> dict[str, Any]:
        """The event of the JSON-lines log; `skip_reason` is there only where the step was skipped."""
        event = {"event": "step", **vars(self)}
        if self.skip_reason is None:
            del event["skip_reason"]
        return event


def peak_memory(device: torch.device) -> tuple[int, int]:
    """(used, reserved) bytes at their highest since the process started.

    On a GPU: what PyTorch's allocator had handed out, and what it had taken from the driver (the CUDA context, some
    hundred MB, is in neither). On the CPU both are the largest resident size of this process, Python and PyTorch
    themselves (about 300 MB) included.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    peak = peak_resident_bytes()
    return peak, peak
