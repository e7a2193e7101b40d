"""The facts of one attention call, checked once at the edge."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tileflash.attention.band import Band, Causal
from tileflash.kernels.options import PLAIN, Options

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Window = tuple[int | None, int | None]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What tensors of `dtype` are computed in, and the dtype of their log-sum-exp: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class AttentionProblem:
    """What a backend is asked to do. Lengths in elements, `scale` multiplies the logits, `features` names the options (FEATURES).

    q [batch, query_length, heads, head_dim], k [batch, key_length, kv_heads, head_dim], v [batch, key_length, kv_heads, head_dim_v].
    Packed sequences are one batch entry; their band counts from where each stands.
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
    features: frozenset[str] = frozenset()
    deterministic: bool = False
    second_derivative: bool = False

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
            + "".join(f", {feature}" for feature in sorted(self.features))
            + (", with lse" if self.return_lse else "")
            + (", with gradients" if self.needs_grad else "")
        )


# Names of options, as backends declare them and messages say them.
FEATURES = (
    "ALiBi", "bias", "bias gradient", "document ids", "dropout", "mask", "packed sequences", "prefix lengths", "sinks", "soft cap",
)  # fmt: skip


def features_of(options: Options) -> frozenset[str]:
    """The FEATURES that `options` ask for."""
    if options is PLAIN:
        return frozenset()
    masks = options.bias is not None and options.bias.dtype == torch.bool
    asked = {
        "ALiBi": options.alibi_slopes is not None,
        "bias": options.bias is not None and not masks,
        "bias gradient": options.bias_gradient,
        "document ids": options.query_ids is not None,
        "dropout": options.dropout_p > 0,
        "mask": masks,
        "packed sequences": options.packed,
        "prefix lengths": options.prefix_lengths is not None,
        "sinks": options.sinks is not None,
        "soft cap": options.softcap > 0,
    }
    return frozenset(name for name, there in asked.items() if there)


def _bound(value: int | None) -> str:
    return "any" if value is None else str(value)


def make_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: Causal,
    window: Window,
    scale: float | None,
    return_lse: bool,
    options: Options = PLAIN,
    *,
    deterministic: bool = False,
    second_derivative: bool = False,
) -> AttentionProblem:
    """Check the arguments of `tileflash.attention` and gather them. Raises ValueError naming the argument that is wrong."""
    check_tensors(q, k, v)
    if not isinstance(causal, (bool, str)) or causal not in (False, True, "top-left", "bottom-right"):
        raise ValueError(f'causal must be False, True (the same as "bottom-right") or "top-left", got {causal!r}')
    _check_window(window)
    batch, query_length, heads, head_dim = q.shape
    _, key_length, kv_heads, head_dim_v = v.shape
    if scale is None:
        scale = 1.0 / math.sqrt(head_dim)
    else:
        limits = torch.finfo(compute_dtype(q.dtype))
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not abs(scale) <= limits.max:
            raise ValueError(
                f"scale must be a finite number of {limits.dtype} or None (1 / sqrt(head dimension)), got {scale!r}"
            )
        if abs(scale) < limits.tiny:  # kernels would read a positive number, and multiply by 0
            scale = 0.0
    needs_grad = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or options.requires_grad
    )
    band = Band.packed(causal, window) if options.packed else Band.of(causal, window, query_length, key_length)
    return AttentionProblem(
        batch, query_length, key_length, heads, kv_heads, head_dim, head_dim_v, q.dtype, q.device,
        band, float(scale), return_lse, needs_grad, q.stride(3) == 1 and k.stride(3) == 1 and v.stride(3) == 1,
        features_of(options), deterministic, second_derivative,
    )  # fmt: skip


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError naming the tensor that is wrong."""
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
    if q.shape[2] % k.shape[2] if k.shape[2] else q.shape[2]:
        raise ValueError(f"q's heads must be a multiple of k's heads, got {q.shape[2]} and {k.shape[2]}")


def _check_window(window: Window) -> None:
    if not isinstance(window, tuple) or len(window) != 2:
        raise ValueError(f"window must be a pair (left, right), got {window!r}")
    for name, bound in zip(("left", "right"), window, strict=True):
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, (int, torch.SymInt)) or bound < 0):
            raise ValueError(f"window's {name} bound must be None (no bound) or an integer >= 0, got {bound!r}")
