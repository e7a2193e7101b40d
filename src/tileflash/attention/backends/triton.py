"""tileflash's own portable kernels: FlashAttention 2 in Triton, forward and backward."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from tileflash.attention.backends.base import Backend
from tileflash.attention.ops import Kernels, attend_with_kernels, register_kernels
from tileflash.attention.problem import FEATURES, AttentionProblem
from tileflash.kernels.options import PLAIN, Options


def _triton_kernels() -> Kernels:
    # Triton is imported with the first call, not with tileflash: not every machine has it.
    from tileflash.kernels.triton import attention

    return Kernels(attention.attention_forward, attention.attention_backward)


class TritonBackend(Backend):
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
        return super().reasons(problem)

    def _device_reasons(self, problem: AttentionProblem) -> list[str]:
        found = super()._device_reasons(problem)
        if problem.device.type == "cpu":
            from tileflash.kernels.triton import attention

            if attention.INTERPRETED:
                return [reason for reason in found if "runs on" not in reason]
            return [*found, "(TRITON_INTERPRET=1, set before the start, runs it on the CPU for tests)"]
        return found

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        low: int | None,
        high: int | None,
        return_lse: bool,
        options: Options = PLAIN,
    ) -> tuple[Tensor, Tensor | None]:
        return attend_with_kernels(self.name, q, k, v, scale, low, high, options)


register_kernels(TritonBackend.name, _triton_kernels)
