"""PyTorch's scaled dot product attention: each of its kernels as a backend of its own, called by name.

`torch.nn.functional.scaled_dot_product_attention` chooses among these kernels in silence; the operators behind it do not. They take
[B, H, S, D] and align a causal mask top-left, so they serve causal problems only where both alignments agree.
"""

import torch
from torch import Tensor

from tileflash.attention.backends.base import Backend, logits_line
from tileflash.attention.problem import AttentionProblem, compute_dtype
from tileflash.kernels.options import PLAIN, Options

_HALF = frozenset({torch.float16, torch.bfloat16})


class _SdpaBackend(Backend):
    """What PyTorch's kernels have in common."""

    equal_head_dims = True
    positive_scale = True
    bands = "square causal"
    empty_tensors = False
    any_strides = False

    def plan(self, problem: AttentionProblem) -> list[str]:
        return ["one operator of PyTorch, whose tiles and order are its own choice and not known here"]

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Tensors are [B, H, S, D]."""
        raise NotImplementedError  # every kernel has its own operator

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
        out, lse = self.call(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale, high is not None, return_lse
        )
        return out.transpose(1, 2), lse


class SdpaFlashBackend(_SdpaBackend):
    name = "sdpa-flash"
    summary = "PyTorch's FlashAttention 2 (CUDA)"
    devices = frozenset({"cuda"})
    dtypes = _HALF
    max_head_dim = 256
    head_dim_multiple = 8
    lse = "without gradient"
    deterministic = False
    min_capability = (8, 0)

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return out, lse


class SdpaCudnnBackend(_SdpaBackend):
    name = "sdpa-cudnn"
    summary = "cuDNN's attention through PyTorch (Hopper and newer)"
    devices = frozenset({"cuda"})
    dtypes = _HALF
    max_head_dim = 256
    head_dim_multiple = 8
    lse = "none"
    deterministic = False
    min_capability = (9, 0)

    def reasons(self, problem: AttentionProblem) -> list[str]:
        # AMD's gfx90a and newer say 9.0 as well.
        return super().reasons(problem) + (["cuDNN is for NVIDIA GPUs"] if torch.version.hip is not None else [])

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        # Without a gradient to come, cuDNN need not write the log-sum-exp.
        keep_lse = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        out, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, keep_lse, 0.0, causal, scale=scale)
        if out.requires_grad:
            out.register_hook(_in_layout_of_output)
        return out, None


class SdpaEfficientBackend(_SdpaBackend):
    name = "sdpa-efficient"
    summary = "PyTorch's memory-efficient attention (CUTLASS, CUDA)"
    devices = frozenset({"cuda"})
    dtypes = _HALF | {torch.float32}
    head_dim_multiple = 8
    grouped_heads = False
    lse = "none"
    deterministic = False

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        keep_lse = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        out, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, None, keep_lse, 0.0, causal, scale=scale
        )
        return out, None


class SdpaCpuBackend(_SdpaBackend):
    name = "sdpa-cpu"
    summary = "PyTorch's flash attention for the CPU"
    devices = frozenset({"cpu"})
    dtypes = _HALF | {torch.float32, torch.float64}
    lse = "without gradient"

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


class SdpaMathBackend(_SdpaBackend):
    name = "sdpa-math"
    summary = "PyTorch's unfused attention (whole matrices)"
    devices = frozenset({"cpu", "cuda"})
    dtypes = _HALF | {torch.float32, torch.float64}
    equal_head_dims = False
    positive_scale = False
    any_strides = True
    lse = "none"
    linear_memory = False
    second_derivative = True

    def plan(self, problem: AttentionProblem) -> list[str]:
        return [logits_line(problem, compute_dtype(problem.dtype))]

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        grouped = q.shape[1] != k.shape[1]
        out, _ = torch.ops.aten._scaled_dot_product_attention_math(
            q, k, v, None, 0.0, causal, scale=scale, enable_gqa=grouped
        )
        return out, None


def _in_layout_of_output(gradient: Tensor) -> Tensor:
    """The gradient [B, H, S, D] laid out as [B, S, H, D], like the output; a copy only where it is not.

    In PyTorch 2.11 cuDNN's backward gives wrong gradients, without a word, where the strides of dO differ from those of O.
    """
    return gradient.transpose(1, 2).contiguous().transpose(1, 2)
