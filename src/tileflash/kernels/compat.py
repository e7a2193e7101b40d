"""What is taken from Triton beyond its public interface, or differs between its versions: looked at here and nowhere else."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
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

    __slots__ = ("grid_size", "kernel", "options", "scalars", "starts")

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
        self.starts: dict[int, tuple[Any, tuple[Any, ...]]] = {}

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
        bits = 0
        for address in addresses:
            bits |= address
        misaligned = _misaligned(addresses, tuples) if bits & 15 or any(tuples) else 0
        start = self.starts.get(misaligned)
        if start is None or knobs.runtime.launch_enter_hook.calls:  # a profiler's hook wants the whole way
            compiled = self.kernel[(self.grid_size,)](*tensors, *tuples, *self.scalars, **self.options)
            if compiled is not None:  # the interpreter returns nothing
                self.starts[misaligned] = start_of(compiled)
            return
        run, first = start
        stream = torch._C._cuda_getCurrentRawStream(device_index)
        run(self.grid_size, 1, 1, stream, *first, *addresses, *tuples, *self.scalars)


def start_of(compiled: Any) -> tuple[Any, tuple[Any, ...]]:
    """What starts `compiled`: run and first, to be called as run(grid x, y, z, stream, *first, *arguments).

    Triton 3.6's launcher is a C function beneath two in Python, one that allocates scratch memory and one that encodes descriptors. Where
    nothing is to be allocated it is called itself, with descriptors that the caller has encoded. Other versions are called as they are.
    """
    launcher = compiled.run
    found = bare_launcher(compiled)
    if found is None:
        return launcher, (compiled.function, compiled.packed_metadata, None, None, None)
    return found, (compiled.function, False, False, None, None, compiled.packed_metadata, None, None, None)


def bare_launcher(compiled: Any) -> Any:
    """Triton 3.6's C function that starts `compiled`; None in other versions, whose arguments are not known, or where the function alone
    would not do."""
    launcher = compiled.run
    if (
        not triton.__version__.startswith("3.6.") or type(launcher).__name__ != "CudaLauncher"
    ):  # AMD's has other arguments
        return None
    if (
        launcher.global_scratch_size
        or launcher.profile_scratch_size
        or launcher.launch_cooperative_grid
        or launcher.launch_pdl
    ):
        return None
    wrapper = launcher.launch
    names = getattr(getattr(wrapper, "__code__", None), "co_freevars", None)
    if names is None:  # no function of Python's: there were no descriptors to wrap it for
        return wrapper
    return wrapper.__closure__[names.index("launcher")].cell_contents if "launcher" in names else None


def _misaligned(addresses: list[int], tuples: tuple[tuple[Any, ...], ...]) -> int:
    """A bit for each address, those of tensors in tuples included: whether it is no multiple of 16."""
    addresses = addresses + [value.data_ptr() for values in tuples for value in values if isinstance(value, Tensor)]
    misaligned = 0
    for address in addresses:
        misaligned = misaligned << 1 | (address & 15 != 0)
    return misaligned


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
