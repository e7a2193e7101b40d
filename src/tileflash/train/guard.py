"""What keeps one bad batch from ruining a run: steps with NaN, Inf or a spike are skipped; too many are the end."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

from tileflash.train.errors import TrainingStoppedError
from tileflash.train.step import Limits

_LARGEST_FP32 = 3.4028234663852886e38  # with no other limit: whatever is finite


class SpikeGuard:
    """Limits for the next step's loss and gradient norm, from the last `window` steps that were applied.

    A value more than z standard deviations above the window's mean is a spike (as llm.c's `-sl` and `-sg`). z = 0 turns
    this off, and so does a window that is not yet full. Skipped steps do not enter the window: one spike would
    otherwise widen the limit for the next. NaN and Inf are always beyond the limit.
    """

    def __init__(self, *, loss_z: float, gradient_z: float, window: int, max_skips_in_a_row: int) -> None:
        self._z = (loss_z, gradient_z)
        self._windows: tuple[deque[float], deque[float]] = (deque(maxlen=window), deque(maxlen=window))
        self._max_skips_in_a_row = max_skips_in_a_row
        self._skips_in_a_row = 0
        self.skipped = 0  # steps of the whole run

    def limits(self) -> Limits:
        """The limits for the next step."""
        loss, gradient_norm = (_limit(window, z) for window, z in zip(self._windows, self._z, strict=True))
        return Limits(loss, gradient_norm)

    def record(self, step: int, loss: float, gradient_norm: float, skipped: bool) -> str | None:
        """Take note of a step; return why it was skipped, or None. TrainingStoppedError after too many in a row."""
        if not skipped:
            self._skips_in_a_row = 0
            self._windows[0].append(loss)
            self._windows[1].append(gradient_norm)
            return None
        self.skipped += 1
        self._skips_in_a_row += 1
        reason = self._reason(loss, gradient_norm)
        if self._skips_in_a_row >= self._max_skips_in_a_row:
            raise TrainingStoppedError(
                f"stopped at step {step}: {self._skips_in_a_row} steps in a row were skipped; at the last {reason}. "
                "The weights are those of before these steps. Try a lower --learning-rate, more --warmup-iterations "
                "or --dtype float32; --max-skips-in-a-row sets when to stop"
            )
        return reason

    def _reason(self, loss: float, gradient_norm: float) -> str:
        limits = self.limits()  # unchanged by skipped steps, so still those the step was judged by
        if not loss <= limits.loss:
            return f"the loss was {_compared(loss, limits.loss)}"
        return f"the norm of the gradient was {_compared(gradient_norm, limits.gradient_norm)}"

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint; JSON keeps every bit of them."""
        return {
            "losses": list(self._windows[0]),
            "gradient_norms": list(self._windows[1]),
            "skips_in_a_row": self._skips_in_a_row,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave; a smaller window keeps the latest steps."""
        for window, values in zip(self._windows, (state["losses"], state["gradient_norms"]), strict=True):
            window.clear()
            window.extend(values)
        self._skips_in_a_row = state["skips_in_a_row"]
        self.skipped = state["skipped"]


def _limit(window: deque[float], z: float) -> float:
    if z == 0 or len(window) < (window.maxlen or 0):
        return _LARGEST_FP32
    deviation = statistics.pstdev(window)
    # A window of equal values says nothing of how far the next may lie from them.
    return statistics.fmean(window) + z * deviation if deviation > 0 else _LARGEST_FP32


def _compared(value: float, limit: float) -> str:
    return f"{value:.4g} (limit {limit:.4g})" if math.isfinite(value) else str(value)
