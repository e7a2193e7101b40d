"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import copy
import math
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tileflash.parallel.box import Box
from tileflash.train.checkpoint import Stored, save_checkpoint

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Save:
    """How the save of `step` ended: where the checkpoint lies, or what went wrong."""

    step: int
    path: Path | None
    error: BaseException | None


class Saver:
    """Writes one checkpoint at a time to `output`, in a thread; `keep` of them stay. See `save_checkpoint` for `group` and `run`."""

    def __init__(self, output: Path, keep: int, *, group: ProcessGroup | None = None, run: str) -> None:
        self._output, self._keep, self._group, self._run = output, keep, group, run
        self._thread: threading.Thread | None = None
        self._ended: Save | None = None

    def start(self, step: int, stored: Stored, state: dict[str, Any]) -> None:
        """Begin to write a copy of `stored` and `state`. The save before must have ended, with its `result` taken.

        When this returns both may change.
        """
        assert self._thread is None
        written = step, _copied(stored), copy.deepcopy(state)
        # PyTorch's async_save would do, but for its pool, which keeps a process that is to end at once waiting.
        self._thread = threading.Thread(
            target=self._write, args=written, name=f"checkpoint of step {step}", daemon=True
        )
        self._thread.start()

    def result(self, *, wait_s: float) -> Save | None:
        """How the save ended that was started last; None: it has not, or was told before."""
        if self._thread is None:
            return None
        self._thread.join(None if math.isinf(wait_s) else wait_s)
        if self._thread.is_alive():
            return None
        ended, self._thread, self._ended = self._ended, None, None
        assert ended is not None
        return ended

    def _write(self, step: int, stored: Stored, state: dict[str, Any]) -> None:
        try:
            path = save_checkpoint(self._output, step, stored, state, self._keep, group=self._group, run=self._run)
            self._ended = Save(step, path, None)
        except BaseException as error:  # it is the first thread that it must reach
            self._ended = Save(step, None, error)


def _copied(stored: Stored) -> dict[str, list[Box]]:
    """Copies in the host's memory of just what is written, complete when this returns."""
    copies: dict[str, list[Box]] = {}
    on_gpu = False
    for name, value in stored.items():
        boxes = value if isinstance(value, list) else [Box.whole(value)]
        copies[name] = [replace(box, tensor=_begin_copy(box.tensor.detach())) for box in boxes]
        on_gpu = on_gpu or any(box.tensor.is_cuda for box in boxes)
    if on_gpu:
        torch.cuda.current_stream().synchronize()
    return copies


def _begin_copy(tensor: torch.Tensor) -> torch.Tensor:
    # PyTorch keeps pinned memory for the next save: only the first takes it from the system, which is slow.
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=tensor.is_cuda)
