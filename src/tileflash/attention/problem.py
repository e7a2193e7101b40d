"""The facts of one attention call, checked once at the edge."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from tileflash.attention.band import Band, Causal

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Window = tuple[int | None, int | None]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What tensors of `dtype` are computed in, and the dtype of their log-sum-exp: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class AttentionProblem:
    """What a backend is asked to do. Lengths in elements, `scale` multiplies the logits.

    q [batch, query_length, heads, head_dim], k [batch, key_length, kv_heads, head_dim], v [batch, key_length, kv_heads, head_dim_v].
    """

    batch: int
    query_length: int
    key_length: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    device: torch.device
    band: Band
    scale: float
    return_lse: bool
    needs_grad: bool
    last_dim_contiguous: bool

    @property
    def kv_group(self) -> int:
        """Query heads that share one K/V head."""
        return self.heads // self.kv_heads if self.kv_heads else 1

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward pass: two matrix products over the visible pairs."""
        pairs = self.band.visible_pairs(self.query_length, self.key_length)
        return 2 * self.batch * self.heads * pairs * (self.head_dim + self.head_dim_v)

    @property
    def bytes(self) -> int:
        """Bytes the forward pass must move at least: q, k, v read once, out and lse written once."""
        queries = self.batch * self.query_length * self.heads
        keys = self.batch * self.key_length * self.kv_heads
        return (queries + keys) * (self.head_dim + self.head_dim_v) * self.dtype.itemsize + 4 * queries

    def describe(self) -> str:
        """One line for messages."""
        band = "full" if self.band.is_full else f"{_bound(self.band.low)} <= j - i <= {_bound(self.band.high)}"
        return (
            f"q [{self.batch}, {self.query_length}, {self.heads}, {self.head_dim}], "
            f"k [{self.batch}, {self.key_length}, {self.kv_heads}, {self.head_dim}], "
            f"v [{self.batch}, {self.key_length}, {self.kv_heads}, {self.head_dim_v}], "
            f"{str(self.dtype).removeprefix('torch.')} on {self.device}, band {band}, scale {self.scale:.6g}"
            + (", with lse" if self.return_lse else "")
            + (", with gradients" if self.needs_grad else "")
        )


def _bound(value: int | None) -> str:
    return "any" if value is None else str(value)


def make_problem(
    q: Tensor, k: Tensor, v: Tensor, causal: Causal, window: Window, scale: float | None, return_lse: bool
) -> AttentionProblem:
    """Check the arguments of `tileflash.attention` and gather them. Raises ValueError naming the argument that is wrong."""
    _check_tensors(q, k, v)
    if not isinstance(causal, (bool, str)) or causal not in (False, True, "top-left", "bottom-right"):
        raise ValueError(f'causal must be False, True (the same as "bottom-right") or "top-left", got {causal!r}')
    _check_window(window)
    batch, query_length, heads, head_dim = q.shape
    _, key_length, kv_heads, head_dim_v = v.shape
    if scale is None:
        scale = 1.0 / math.sqrt(head_dim)
    elif isinstance(scale, bool) or not isinstance(scale, (int, float)) or not abs(scale) <= sys.float_info.max:
        raise ValueError(f"scale must be a finite number or None (1 / sqrt(head dimension)), got {scale!r}")
    return AttentionProblem(
        batch, query_length, key_length, heads, kv_heads, head_dim, head_dim_v, q.dtype, q.device,
        Band.of(causal, window, query_length, key_length), float(scale), return_lse,
        torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
        q.stride(3) == 1 and k.stride(3) == 1 and v.stride(3) == 1,
    )  # fmt: skip


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.layout is not torch.strided:
            raise ValueError(f"{name} must be a dense tensor, got layout {tensor.layout}")
        if tensor.dim() != 4:
            raise ValueError(f"{name} must be [batch, sequence, heads, head dimension], got shape {list(tensor.shape)}")
        if tensor.dtype not in FLOATS:
            raise ValueError(f"{name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name} must have q's dtype {q.dtype}, got {tensor.dtype}")
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {tensor.device}")
        if tensor.shape[0] != q.shape[0]:
            raise ValueError(
                f"{name} must have q's batch size {q.shape[0]}, got {tensor.shape[0]} (shape {list(tensor.shape)})"
            )
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k must have q's head dimension {q.shape[3]}, got {k.shape[3]} (shape {list(k.shape)})")
    if v.shape[1:3] != k.shape[1:3]:
        raise ValueError(f"v must have k's sequence length and heads {list(k.shape[1:3])}, got {list(v.shape[1:3])}")
    if q.shape[3] == 0 or v.shape[3] == 0:
        raise ValueError(f"q, k and v must have a head dimension of at least 1, got {q.shape[3]} and {v.shape[3]}")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"q's heads must be a multiple of k's heads, got {q.shape[2]} and {k.shape[2]}")


def _check_window(window: Window) -> None:
    if not isinstance(window, tuple) or len(window) != 2:
        raise ValueError(f"window must be a pair (left, right), got {window!r}")
    for name, bound in zip(("left", "right"), window, strict=True):
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, (int, torch.SymInt)) or bound < 0):
            raise ValueError(f"window's {name} bound must be None (no bound) or an integer >= 0, got {bound!r}")
