"""The visible order of backends, the choice among them, and `explain`."""

from __future__ import annotations

from dataclasses import dataclass

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
AUTO_ORDER = ("triton", "sdpa-cudnn", "sdpa-flash", "sdpa-efficient", "sdpa-cpu", "tiled")

# Names that stand for several backends: the first that serves.
FAMILIES = {"auto": AUTO_ORDER, "sdpa": ("sdpa-cudnn", "sdpa-flash", "sdpa-efficient", "sdpa-cpu", "sdpa-math")}


class NoBackendError(ValueError):
    """No backend of those asked for can serve the problem; the message names every reason."""


@dataclass(frozen=True)
class Explanation:
    """What would run for a problem and why; `print` it.

    `choice` is None when nothing serves; `reasons` has every backend's reasons, an empty list for those that could serve.
    """

    problem: AttentionProblem
    asked_for: str
    choice: str | None
    reasons: dict[str, list[str]]

    def __str__(self) -> str:
        lines = [f"attention of {self.problem.describe()}"]
        lines.append(f"backend {self.asked_for!r} -> {self.choice or 'none can serve'}")
        width = max(map(len, self.reasons))
        order = FAMILIES.get(self.asked_for, (self.asked_for,))
        for name, reasons in self.reasons.items():
            if name == self.choice:
                verdict = "chosen"
            elif reasons:
                verdict = "cannot: " + "; ".join(reasons)
            elif name in order:
                verdict = f"could serve, stands after {self.choice} in the order"
            else:
                verdict = "could serve, only when named" + (
                    "" if BACKENDS[name].linear_memory else " (needs O(Sq * Sk) memory)"
                )
            lines.append(f"  {name:<{width}}  {BACKENDS[name].summary}: {verdict}")
        lines.append(f"  forward: {self.problem.flops:,} FLOPs, at least {self.problem.bytes:,} bytes moved")
        return "\n".join(lines)


def choose(problem: AttentionProblem, backend: str) -> Backend:
    """The backend for a problem. Raises NoBackendError with all reasons, ValueError for an unknown name."""
    order = _order(backend)
    for name in order:
        if not BACKENDS[name].reasons(problem):
            return BACKENDS[name]
    details = "\n".join(f"  {name}: {'; '.join(BACKENDS[name].reasons(problem))}" for name in order)
    hint = '\nbackend="reference" serves every problem, with O(Sq * Sk) memory' if backend == "auto" else ""
    raise NoBackendError(f"backend {backend!r} cannot serve attention of {problem.describe()}:\n{details}{hint}")


def explain_problem(problem: AttentionProblem, backend: str) -> Explanation:
    """What `choose` would do, and every backend's reasons."""
    order = _order(backend)
    reasons = {name: candidate.reasons(problem) for name, candidate in BACKENDS.items()}
    choice = next((name for name in order if not reasons[name]), None)
    return Explanation(problem, backend, choice, reasons)


def _order(backend: str) -> tuple[str, ...]:
    if isinstance(backend, str):
        if backend in FAMILIES:
            return FAMILIES[backend]
        if backend in BACKENDS:
            return (backend,)
    raise ValueError(f"backend must be one of {', '.join([*FAMILIES, *BACKENDS])}, got {backend!r}")
