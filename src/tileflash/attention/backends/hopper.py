"""tileflash's own kernels for Hopper GPUs: FlashAttention 3's structure in Gluon, forward and backward."""

from __future__ import annotations

import functools
import importlib.util

import torch

from tileflash.attention.backends.base import Backend, KernelBackend, device_capability
from tileflash.attention.ops import Kernels, register_kernels
from tileflash.attention.problem import AttentionProblem

# Forward and backward together, causal, H200: at 256 rows 0.94 to 0.97 times the speed of the portable kernels with 12 to 16 heads and a
# batch of 4, at 512 1.07 (docs/kernels/hopper.md).
FASTER_FROM_ROWS = 512


def _hopper_kernels() -> Kernels:
    # Imported with the first call, not with tileflash: not every machine has Triton, and not every Triton has Gluon.
    from tileflash.kernels.hopper import attention

    return Kernels(attention.attention_forward, attention.attention_backward)


def _deterministic_kernels() -> Kernels:
    from tileflash.kernels.hopper import attention

    return Kernels(attention.attention_forward, functools.partial(attention.attention_backward, deterministic=True))


class HopperBackend(KernelBackend):
    name = "hopper"
    summary = "tileflash's Gluon kernels for Hopper (H100, H200)"
    devices = frozenset({"cuda"})
    dtypes = frozenset({torch.float16, torch.bfloat16})
    max_head_dim = 256
    head_dim_multiple = 8
    positive_scale = True
    features = frozenset({"packed sequences", "sinks", "soft cap"})
    min_capability = (9, 0)

    def __init__(self) -> None:
        self.installed = importlib.util.find_spec("triton") is not None

    def serving(self, problem: AttentionProblem) -> Backend:
        return _DETERMINISTIC if _wants_determinism(problem) else self

    def reasons(self, problem: AttentionProblem) -> list[str]:
        if not self.installed:
            return ["Triton is not installed (pip install triton)"]
        found = super().reasons(problem)
        if not found and (missing := _what_gluon_lacks()):
            found.append(missing)
        return found

    def _device_reasons(self, problem: AttentionProblem) -> list[str]:
        found = super()._device_reasons(problem)
        if found or problem.device.type != "cuda":
            return found
        if torch.version.hip is not None:
            return ["runs on NVIDIA GPUs"]  # gfx90a says 9.0 as Hopper does
        major, minor = device_capability(problem.device)  # two numbers: torch.compile cannot trace tuples' inequality
        if major != 9 or minor != 0:
            return ["uses Hopper's own tensor core instructions (compute capability 9.0), which this GPU does not have"]
        return found

    def stands_back(self, problem: AttentionProblem) -> str | None:
        if min(problem.query_length, problem.key_length) < FASTER_FROM_ROWS:
            return f"with fewer than {FASTER_FROM_ROWS} queries or keys its kernels take longer to start than they save"
        if problem.features:
            return f"with {', '.join(sorted(problem.features))} its kernels have not been measured against the portable ones yet"
        if _wants_determinism(problem):
            return "its deterministic backward has not been measured against the portable kernels yet"
        return None

    def plan(self, problem: AttentionProblem) -> list[str]:
        from tileflash.kernels.hopper.configurations import describe

        widest = max(problem.head_dim, problem.head_dim_v)
        return describe(
            widest,
            problem.band.is_full,
            problem.needs_grad,
            _wants_determinism(problem),
            "soft cap" in problem.features,
            "packed sequences" in problem.features,
        )


class _DeterministicHopper(HopperBackend):
    """The same with d_q by a pass of its own: no sum depends on what comes first."""

    kernels = "hopper deterministic"


def _wants_determinism(problem: AttentionProblem) -> bool:
    return problem.needs_grad and (problem.deterministic or torch.are_deterministic_algorithms_enabled())


_DETERMINISTIC = _DeterministicHopper()


@functools.lru_cache
def _look_at_gluon() -> str | None:
    from tileflash.kernels.hopper.support import why_not

    return why_not()


def _what_gluon_lacks() -> str | None:
    """Why this Triton cannot compile the kernels, or None; a constant to torch.compile."""
    return _look_at_gluon()


_what_gluon_lacks._dynamo_marked_constant = True  # type: ignore[attr-defined]

register_kernels(HopperBackend.name, _hopper_kernels)
register_kernels(_DeterministicHopper.kernels, _deterministic_kernels)
