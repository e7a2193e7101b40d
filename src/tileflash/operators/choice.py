"""Who computes an operator (Triton's kernels or plain PyTorch), and which way leads there."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

BACKENDS = ("auto", "triton", "plain")


_HAS_TRITON = importlib.util.find_spec("triton") is not None  # looked for, not imported


def uses_triton(backend: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton's kernels compute on `device` in `dtype`; `backend` "auto" takes them on a GPU where Triton is installed.

    Raises ValueError for a name that is none, and where "triton" is asked for and cannot serve.
    """
    if backend not in BACKENDS:
        raise ValueError(f'backend is "{backend}": it must be one of {", ".join(BACKENDS)}')
    served = _HAS_TRITON and dtype in (torch.bfloat16, torch.float16, torch.float32)
    if backend == "triton":
        if not served:
            reason = f"its kernels have no {dtype}" if _HAS_TRITON else "Triton is not installed"
            raise ValueError(f'backend is "triton": {reason}; it must be "plain" or "auto"')
        return True  # on a CPU, too, in Triton's interpreter
    return backend == "auto" and served and device.type == "cuda"


_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def plain_eager(*tensors: Tensor | None) -> bool:
    """Nobody is watching: no tracing, no dispatch mode, no function transform, no forward-mode AD, no tensor subclass.

    Then kernels are called directly, for an operator's dispatch takes the host longer than a launch.
    """
    return (
        not torch.compiler.is_compiling()
        and all(tensor is None or type(tensor) in _PLAIN_TYPES for tensor in tensors)
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch.autograd.forward_ad._current_level < 0
    )


def compute_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a matrix product of tensors of `dtype` is computed: autocast's where it is on, else their own."""
    if torch.is_autocast_enabled(device.type) and dtype != torch.float64:
        return torch.get_autocast_dtype(device.type)
    return dtype
