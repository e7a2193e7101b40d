"""The visible order of backends, and the choice among them (`explanation` tells of it)."""

from __future__ import annotations

from tileflash.attention.backends.base import Backend
from tileflash.attention.backends.hopper import HopperBackend
from tileflash.attention.backends.reference import ReferenceBackend
from tileflash.attention.backends.sdpa import (
    SdpaCpuBackend,
    SdpaCudnnBackend,
    SdpaEfficientBackend,
    SdpaFlashBackend,
    SdpaMathBackend,
)
from tileflash.attention.backends.tiled import TiledBackend
from tileflash.attention.backends.triton import TritonBackend
from tileflash.attention.problem import AttentionProblem

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        TritonBackend(),
        HopperBackend(),
        SdpaCudnnBackend(),
        SdpaFlashBackend(),
        SdpaEfficientBackend(),
        SdpaCpuBackend(),
        TiledBackend(),
        SdpaMathBackend(),
        ReferenceBackend(),
    )
}

# `backend="auto"` takes the first of these that serves. Backends that need O(Sq * Sk) memory are not among them: whoever wants one
# names it.
AUTO_ORDER = ("hopper", "triton", "sdpa-cudnn", "sdpa-flash", "sdpa-efficient", "sdpa-cpu", "tiled")

# Names that stand for several backends: the first that serves.
FAMILIES = {"auto": AUTO_ORDER, "sdpa": ("sdpa-cudnn", "sdpa-flash", "sdpa-efficient", "sdpa-cpu", "sdpa-math")}


class NoBackendError(ValueError):
    """No backend of those asked for can serve the problem; the message names every reason."""


def choose(problem: AttentionProblem, backend: str) -> Backend:
    """The backend for a problem. Raises NoBackendError with all reasons, ValueError for an unknown name."""
    order = order_of(backend, problem.second_derivative)
    chosen = first_that_serves(problem, order)
    if chosen is not None:
        return chosen
    details = "\n".join(f"  {name}: {'; '.join(BACKENDS[name].reasons(problem))}" for name in order)
    hint = '\nbackend="reference" serves every problem, with O(Sq * Sk) memory' if backend == "auto" else ""
    raise NoBackendError(f"backend {backend!r} cannot serve attention of {problem.describe()}:\n{details}{hint}")


def first_that_serves(problem: AttentionProblem, order: tuple[str, ...]) -> Backend | None:
    """The first backend that serves and does not stand back, else the first that serves."""
    standing_back = None
    for name in order:
        backend = BACKENDS[name]
        if backend.reasons(problem):
            continue
        if backend.stands_back(problem) is None:
            return backend
        standing_back = standing_back or backend
    return standing_back


def order_of(backend: str, second_derivative: bool = False) -> tuple[str, ...]:
    """The backends that a name stands for, in order. Raises ValueError for an unknown name.

    Whoever asks "auto" for second derivatives, which need whole matrices, has asked for the reference.
    """
    if isinstance(backend, str):
        if backend == "auto" and second_derivative:
            return (*AUTO_ORDER, "reference")
        if backend in FAMILIES:
            return FAMILIES[backend]
        if backend in BACKENDS:
            return (backend,)
    raise ValueError(f"backend must be one of {', '.join([*FAMILIES, *BACKENDS])}, got {backend!r}")
