"""Work of a GPU recorded in CUDA graphs; what PyTorch leaves behind of a capture that failed is put right here."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tileflash.train.errors import GraphCaptureError, is_out_of_memory


class GraphRecorder:
    """Records work in CUDA graphs that share one pool of memory.

    Their replays must therefore follow each other, and what is to outlive a replay must lie in tensors that were made
    before the recording.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], None]) -> None:
        """Do `work`, which makes what may not be made during a capture: moments, cuBLAS's workspace, compiled kernels.

        It is done on the stream of the captures: there autograd then accumulates gradients, and cuBLAS keeps a
        workspace for each stream and thread that it has been called from (32 MiB each on Hopper) while the process lives.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture `work`, which is not done by this; return what does it, on the current stream.

        GraphCaptureError says why it could not be captured. Where memory ran out the error is of the kind that
        `is_out_of_memory` knows. Nothing of a capture that failed stays in the way of what comes after it.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            # The outer context is for a capture that CUDA gave up: PyTorch's own then never leaves the stream.
            with torch.cuda.stream(self._stream), torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                work()
        except BaseException as error:
            self._put_right()  # while `graph` lives: the allocator calls back into it
            if isinstance(error, Exception) and not is_out_of_memory(error):
                raise GraphCaptureError(_reason(error)) from error
            raise
        return graph.replay

    def _put_right(self) -> None:
        """A capture that CUDA gave up cannot be ended, and PyTorch then leaves its allocator and its generator in it."""
        try:
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        except RuntimeError:
            pass  # no recording to the pool is left open: the capture never began, or was ended after its work failed
        else:
            # What the capture had taken would else be lost to the eager steps that follow.
            torch._C._cuda_releasePool(self._device.index, self._pool)
        # The generator may still believe in the capture and refuse to draw: a new one goes on from where it is.
        generator = torch.cuda.default_generators[self._device.index]
        successor = torch.Generator(self._device)
        successor.set_state(generator.get_state())
        generator.graphsafe_set_state(successor)


def _reason(error: Exception) -> str:
    """The kind and first line of the error that made a capture fail.

    Ending a capture that CUDA gave up fails as well, and it is that error which comes out; its context is the first.
    """
    first = error
    if isinstance(error.__context__, Exception) and "error during capture" in str(error):
        first = error.__context__
    lines = str(first).splitlines() or [""]
    return f"{type(first).__name__}: {lines[0]}"
