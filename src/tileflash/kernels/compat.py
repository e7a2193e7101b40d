"""Every name taken from Triton that differs between versions, or that is not part of its public interface."""

from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime.jit import JITFunction

TRITON_VERSION = triton.__version__


def is_interpreted(kernel: Any) -> bool:
    """Whether `kernel` runs in Triton's interpreter (TRITON_INTERPRET=1 when it was imported) instead of on a GPU."""
    return not isinstance(kernel, JITFunction)


class CachedLauncher:
    """Launches one Triton kernel, at a third of the host time of `kernel[grid](...)` once a case has been seen.

    Triton's own launch looks at every argument to find the compiled variant. The caller knows when two calls are of one kind (same
    shapes, strides, dtypes, alignment, constants, device) and says so by an equal `key`; from the second call on, the compiled
    kernel is taken from a dictionary and started directly, as `CompiledKernel.__getitem__` does in Triton 3.6 and 3.7.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: dict[Any, Any] = {}

    def __call__(
        self, key: Any, grid_size: int, device_index: int, arguments: tuple[Any, ...], options: dict[str, int]
    ) -> None:
        """Run with `grid_size` programs. `arguments` are all parameters in order, constants too; `options` num_warps and the like.

        `device_index` must be the current CUDA device; it is not looked at in the interpreter.
        """
        compiled = self.compiled.get(key)
        if compiled is None or knobs.runtime.launch_enter_hook is not None:
            compiled = self.kernel[(grid_size,)](*arguments, **options)
            if compiled is not None:  # the interpreter returns nothing
                self.compiled[key] = compiled
            return
        stream = torch._C._cuda_getCurrentRawStream(device_index)
        compiled.run(
            grid_size, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments
        )  # fmt: skip
