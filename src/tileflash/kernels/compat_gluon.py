"""The names taken from Gluon, Triton's lower layer: looked at here and nowhere else.

Gluon is experimental and changes between Triton's versions. Importing this module where it is missing, or lacks a name, raises
ImportError; who wants to know beforehand asks `why_not`. Apart from `compat` because the portable kernels need none of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton._C.libtriton import ir
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tileflash.kernels.compat import start_of

__all__ = [
    "LAUNCH_OPTIONS",
    "DescribedTensor",
    "GluonASTSource",
    "PreparedDescriptorLaunch",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "reinterpret",
    "thread_barrier",
    "tma_load",
    "tma_reduce_add",
    "tma_store",
    "tma_store_wait",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

# A partition is one warpgroup; more make waits for wgmma wrong (triton#11047). The softmax counts on s * scale - m being one instruction,
# which from Triton 3.10 on is so only where asked for.
LAUNCH_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
# TMA's copies have the longer names until Triton 3.6 and the shorter ones since; both live side by side for a while.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait
# A barrier of the threads of one partition, by its name until Triton 3.6 and since 3.7.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@builtin
def tma_reduce_add(descriptor: Any, coordinates: Any, source: Any, _semantic: Any = None) -> None:
    """Add a shared-memory tile to global memory (cp.reduce.async.bulk.tensor). The builder has it from Triton 3.6 on, Gluon a name
    for it (`tma.async_atomic_add`) from 3.9 on."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, source.handle
    )


@builtin
def reinterpret(memory: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """The same shared memory seen with another dtype, shape and layout: `_reinterpret` until Triton 3.8, `reinterpret` since."""
    method = memory.reinterpret if hasattr(memory, "reinterpret") else memory._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


class DescribedTensor(NamedTuple):
    """How a kernel's TMA descriptor sees a tensor: sizes, strides in elements (the last 1), and what is moved at a time."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]
    layout: Any


class _Bound:
    """What Triton's launcher reads of a TensorDescriptor, without the checks of its constructor, which cost more than the launch."""

    __slots__ = ("base", "block_shape", "layout", "padding", "shape", "strides")

    def __init__(self, base: Tensor, described: DescribedTensor) -> None:
        self.base = base
        self.shape, self.strides, self.block_shape, self.layout = described
        self.padding = "zero"


class PreparedDescriptorLaunch:
    """`compat.PreparedLaunch` for a kernel whose first parameters are TMA descriptors, then pointers, then scalars and constants.

    An encoded descriptor depends on the tensor's address and on nothing else that changes, so it is kept by address: a training step
    finds its buffers where they were the step before. The descriptor travels in the kernel's arguments; nothing outlives the launch.
    """

    __slots__ = ("compiled", "constants", "described", "encoded", "fixed", "grid_size", "kernel", "scalars", "start")

    _MOST_ENCODED = 1024

    def __init__(
        self,
        kernel: Any,
        grid_size: int,
        described: tuple[DescribedTensor, ...],
        scalars: tuple[Any, ...],
        constants: dict[str, Any],
    ) -> None:
        """`scalars` are all parameters after the pointers, `constants` the constexpr ones that end the parameters, in order."""
        self.kernel = kernel
        self.grid_size = grid_size
        self.described = described
        self.scalars = scalars
        self.constants = constants
        self.fixed = (*scalars, *constants.values())
        self.compiled: Any = None
        self.start: tuple[Any, tuple[Any, ...]] = (None, ())
        self.encoded: tuple[dict[int, list[Any]], ...] = tuple({} for _ in described)

    def __call__(self, tensors: tuple[Tensor, ...], pointers: tuple[Tensor | None, ...], device_index: int) -> None:
        """Launch on the current stream of CUDA device `device_index`, the current device. All addresses must be multiples of 16 bytes. A
        pointer that is None must be so in all calls: the kernel is compiled without it."""
        if self.compiled is None or knobs.runtime.launch_enter_hook.calls:  # a profiler's hook wants the whole way
            described = [
                TensorDescriptor(tensor, list(shape), list(strides), list(block_shape), layout)
                for tensor, (shape, strides, block_shape, layout) in zip(tensors, self.described, strict=True)
            ]
            self.compiled = self.kernel[(self.grid_size,)](
                *described, *pointers, *self.scalars, **self.constants, **LAUNCH_OPTIONS
            )
            self.start = start_of(self.compiled)
            return
        run, first = self.start
        stream = torch._C._cuda_getCurrentRawStream(device_index)
        addresses = [None if pointer is None else pointer.data_ptr() for pointer in pointers]
        descriptors: list[Any] = []
        if run is self.compiled.run:  # Triton's whole launcher encodes descriptors itself
            descriptors += [
                _Bound(tensor, described) for tensor, described in zip(tensors, self.described, strict=True)
            ]
        else:
            for i, tensor in enumerate(tensors):
                address = tensor.data_ptr()
                encoded = self.encoded[i].get(address)
                if encoded is None:
                    encoded = self._encode(i, address, tensor)
                descriptors += encoded
        run(self.grid_size, 1, 1, stream, *first, *descriptors, *addresses, *self.fixed)

    def _encode(self, i: int, address: int, tensor: Tensor) -> list[Any]:
        kept = self.encoded[i]
        if len(kept) >= self._MOST_ENCODED:
            kept.clear()
        encoded = make_tensordesc_arg(_Bound(tensor, self.described[i]), self.compiled.metadata.tensordesc_meta[i])
        kept[address] = encoded
        return encoded
