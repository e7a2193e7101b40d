"""tileflash's own portable kernels: FlashAttention 2 in Triton, forward and backward."""

from __future__ import annotations

import functools
import importlib.util

import torch

from tileflash.attention.backends.base import KernelBackend
from tileflash.attention.ops import Kernels, register_kernels
from tileflash.attention.problem import FEATURES, AttentionProblem


def _triton_kernels() -> Kernels:
    # Triton is imported with the first call, not with tileflash: not every machine has it.
    from tileflash.kernels.triton import attention

    return Kernels(attention.attention_forward, attention.attention_backward)


@functools.cache
def _load_kernels() -> str | None:
    try:
        _triton_kernels()
    except Exception as error:  # whatever a broken install raises: ImportError, OSError, AttributeError, ...
        return f"{type(error).__name__}: {error}"
    return None


def loading_error() -> str | None:
    """Why Triton or the kernels cannot be imported, in the loader's words; None when they can be."""
    return _load_kernels()


# A constant to torch.compile, which must not trace into an import (see `device_capability`).
loading_error._dynamo_marked_constant = True  # type: ignore[attr-defined]


class TritonBackend(KernelBackend):
    name = "triton"
    summary = "tileflash's portable Triton kernels"
    devices = frozenset({"cuda"})
    dtypes = frozenset({torch.float16, torch.bfloat16, torch.float32})
    max_head_dim = 512
    features = frozenset(FEATURES)
    min_capability = (8, 0)

    def __init__(self) -> None:
        self.installed = importlib.util.find_spec("triton") is not None

    def reasons(self, problem: AttentionProblem) -> list[str]:
        if not self.installed:
            return ["Triton is not installed (pip install triton)"]
        found = super().reasons(problem)
        # Only when nothing else stands against it: loading Triton takes a second.
        if not found and (error := loading_error()):
            found = [f"Triton cannot be loaded (tileflash doctor says more): {error}"]
        return found

    def _device_reasons(self, problem: AttentionProblem) -> list[str]:
        found = super()._device_reasons(problem)
        if problem.device.type == "cpu" and loading_error() is None:
            from tileflash.kernels.triton import sizes

            if sizes.INTERPRETED:
                return [reason for reason in found if "runs on" not in reason]
            return [*found, "(TRITON_INTERPRET=1, set before the start, runs it on the CPU for tests)"]
        return found

    def plan(self, problem: AttentionProblem) -> list[str]:
        from tileflash.kernels.triton import sizes

        return sizes.describe_launches(
            problem.batch, problem.query_length, problem.key_length, problem.heads, problem.kv_heads, problem.head_dim,
            problem.head_dim_v, problem.dtype, problem.device, problem.band.low, problem.band.high, problem.needs_grad,
            bool(problem.features) or problem.scale <= 0, "packed sequences" in problem.features,
            "bias gradient" in problem.features,
        )  # fmt: skip


register_kernels(TritonBackend.name, _triton_kernels)
