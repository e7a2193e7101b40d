"""In the place of `GraphRecorder` where there is no GPU.

It does the work anew at each replay, where a CUDA graph repeats its kernels. Tensors that a graph would read and write
by their address must therefore be seen to be the same ones throughout.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

OUT_OF_MEMORY = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class PlainRecorder:
    """Does what is recorded when it is replayed; `error` is raised by the recording number `failing`."""

    def __init__(self, failing: int | None = None, error: Exception | None = None) -> None:
        self.recorded = self.replayed = 0
        self._failing, self._error = failing, error

    def warm_up(self, work: Callable[[], None]) -> None:
        work()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        if self.recorded == self._failing and self._error is not None:
            raise self._error

        def replay() -> None:
            self.replayed += 1
            work()

        return replay
