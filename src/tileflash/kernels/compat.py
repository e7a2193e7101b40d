"""What is taken from Triton beyond its public interface, or differs between its versions: looked at here and nowhere else."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction


def is_interpreted(kernel: Any) -> bool:
    """Whether `kernel` runs in Triton's interpreter (TRITON_INTERPRET=1 when it was imported) instead of on a GPU."""
    return not isinstance(kernel, JITFunction)


class PreparedLaunch:
    """One kernel made ready for one kind of call: everything but the tensors' addresses is fixed.

    Triton's own launch looks at all arguments to find the compiled variant, which takes longer than the launch. Here the caller
    promises that calls through one object differ in addresses only; the variant then depends on nothing but which addresses are
    multiples of 16 bytes, and is started directly, as `CompiledKernel.__getitem__` does in Triton 3.6 and 3.7.
    """

    __slots__ = ("compiled", "grid_size", "kernel", "options", "scalars")

    def __init__(
        self,
        kernel: Any,
        grid_size: int,
        scalars: tuple[Any, ...],
        num_warps: int,
        num_stages: int,
        max_registers: int = 0,
    ) -> None:
        """`scalars` are all parameters after the tensors and tuples, constants included, in order."""
        self.kernel = kernel
        self.grid_size = grid_size
        self.scalars = scalars
        self.options = {"num_warps": num_warps, "num_stages": num_stages}
        if max_registers:  # no option of AMD's
            self.options["maxnreg"] = max_registers
        self.compiled: dict[int, Any] = {}

    def __call__(
        self, tensors: tuple[Tensor, ...], device_index: int, tuples: tuple[tuple[Any, ...], ...] = ()
    ) -> None:
        """Launch on the current stream of CUDA device `device_index`, which must be the current device.

        `tuples` of tensors and numbers come behind the tensors. Triton specialises what is in them, too (a number that is 1 or a
        multiple of 16, an address that is a multiple of 16); the numbers must be those of the first call.
        """
        if self.grid_size == 0:
            return
        addresses = [tensor.data_ptr() for tensor in tensors]
        misaligned = 0
        for address in addresses:
            misaligned = misaligned << 1 | (address & 15 != 0)
        for values in tuples:
            for value in values:
                if isinstance(value, Tensor):
                    misaligned = misaligned << 1 | (value.data_ptr() & 15 != 0)
        compiled = self.compiled.get(misaligned)
        if compiled is None or knobs.runtime.launch_enter_hook.calls:  # a profiler's hook wants the whole way
            compiled = self.kernel[(self.grid_size,)](*tensors, *tuples, *self.scalars, **self.options)
            if compiled is not None:  # the interpreter returns nothing
                self.compiled[misaligned] = compiled
            return
        stream = torch._C._cuda_getCurrentRawStream(device_index)
        compiled.run(
            self.grid_size, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *addresses, *tuples, *self.scalars,
        )  # fmt: skip


_MOST_LAUNCHES = 4096


def remember(launches: dict[Any, Any], key: Any, prepared: Any) -> Any:
    """Keep a launch that was made ready. A training run has a handful of them; all go when there are too many."""
    if len(launches) >= _MOST_LAUNCHES:
        launches.clear()
    launches[key] = prepared
    return prepared


_NO_DEVICE = contextlib.nullcontext()


def current_device(tensor: Tensor) -> Any:
    """A context in which the tensor's device is the current one, as launches need it; of the CPU (the interpreter) there is none."""
    index = tensor.get_device()
    if index < 0 or index == torch._C._cuda_getDevice():
        return _NO_DEVICE
    return torch.cuda.device(tensor.device)
