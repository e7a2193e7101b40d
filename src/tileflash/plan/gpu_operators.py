"""A step on the CPU that keeps in memory what it would keep on a GPU.

PyTorch chooses other operators on the two: under autocast a GPU takes the softmax in fp32, and a GPU has RMSNorm in one operator, where
the CPU keeps what lies between. Attention's kernels are represented by what they take and give.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from tileflash.attention.band import Band
from tileflash.attention.ops import Kernels, register_kernels
from tileflash.kernels.options import NO_GRADIENTS, Options

KERNELS = "plan"


class GpuOperators(TorchFunctionMode):
    """While in force, what the models call is computed by the operators that a GPU would take."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.softmax and torch.is_autocast_enabled("cpu") and "dtype" not in kwargs:
            return func(*args, **kwargs, dtype=torch.float32)
        if func is F.rms_norm and args[0].dtype == torch.float32:
            x, weight = args[0], kwargs["weight"] if "weight" in kwargs else args[2]
            return _RmsNorm.apply(x, weight)
        return func(*args, **kwargs)


class _RmsNorm(torch.autograd.Function):
    """What torch's fused operator keeps: the input, and a reciprocal of each row."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x, x.new_empty((*x.shape[:-1], 1)), weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, _, weight = context.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def register_planned_kernels() -> None:
    """Let `attend` and ring attention find kernels that compute nothing, under the name `KERNELS`."""
    register_kernels(KERNELS, lambda: Kernels(_forward, _backward))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float | None, **_: Any
) -> torch.Tensor:
    """An AttentionFunction that has the memory and the FLOPs of tileflash's kernels: out and the log-sum-exp are kept."""
    band = Band.of(causal, (None, None), q.shape[1], k.shape[1])
    out: torch.Tensor = torch.ops.tileflash.attention_forward(q, k, v, 1.0, band.low, band.high, KERNELS)[0]
    return out


def _forward(q: Any, k: Any, v: Any, scale: float, low: Any, high: Any, options: Options) -> Any:
    return torch.ops.tileflash.attention_forward(q, k, v, scale, low, high, KERNELS)


def _backward(
    d_out: Any, d_lse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, low: Any, high: Any, _: Any
) -> Any:
    found = torch.ops.tileflash.attention_backward(d_out, d_lse, q, k, v, out, lse, scale, low, high, KERNELS)
    return (*found[:3], NO_GRADIENTS)
