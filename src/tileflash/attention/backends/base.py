"""What a backend is: declared facts, the reasons that follow from them, and a function that computes."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tileflash.attention.ops import attend_with_kernels
from tileflash.attention.problem import AttentionProblem
from tileflash.kernels.options import PLAIN, Options


class Backend:
    """One way to compute attention. Subclasses declare facts; `reasons` turns the facts into sentences.

    To add one: subclass, declare, implement `attend`, add it to `tileflash.attention.dispatch.BACKENDS`. The test matrix in
    tests/attention/test_backends.py is generated from the facts.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    devices: ClassVar[frozenset[str]]
    dtypes: ClassVar[frozenset[torch.dtype]]
    max_head_dim: ClassVar[int | None] = None
    head_dim_multiple: ClassVar[int] = 1
    equal_head_dims: ClassVar[bool] = False
    grouped_heads: ClassVar[bool] = True
    # "square causal": full attention, or the causal mask with as many queries as keys (where both alignments agree).
    bands: ClassVar[Literal["any", "square causal"]] = "any"
    positive_scale: ClassVar[bool] = False
    empty_tensors: ClassVar[bool] = True
    lse: ClassVar[Literal["differentiable", "without gradient", "none"]] = "differentiable"
    any_strides: ClassVar[bool] = True
    deterministic: ClassVar[bool] = True
    min_capability: ClassVar[tuple[int, int]] = (0, 0)
    linear_memory: ClassVar[bool] = True
    second_derivative: ClassVar[bool] = False
    features: ClassVar[frozenset[str]] = frozenset()  # of tileflash.attention.problem.FEATURES

    def reasons(self, problem: AttentionProblem) -> list[str]:
        """Why this backend cannot serve the problem; empty when it can."""
        found = self._device_reasons(problem) + self._shape_reasons(problem)
        found += [f"does not have {feature}" for feature in sorted(problem.features - self.features)]
        if self.positive_scale and problem.scale <= 0:
            found.append(f"scale must be positive, is {problem.scale:g}")
        if self.lse == "none" and problem.return_lse:
            found.append("does not return the log-sum-exp")
        if self.lse == "without gradient" and problem.return_lse and problem.needs_grad:
            found.append("the log-sum-exp it returns has no gradient")
        if not self.any_strides and not problem.last_dim_contiguous:
            found.append("q, k and v must be contiguous in their last dimension")
        if not self.deterministic and problem.needs_grad:
            if problem.deterministic:
                found.append("its backward is not deterministic")
            elif torch.are_deterministic_algorithms_enabled():
                found.append("its backward is not deterministic, and torch.use_deterministic_algorithms is on")
        if problem.second_derivative and not self.second_derivative:
            found.append("has no second derivative")
        return found

    def stands_back(self, problem: AttentionProblem) -> str | None:
        """Why a choice among several takes another that serves before this one, out of its turn; None where it does not."""
        return None

    def serving(self, problem: AttentionProblem) -> Backend:
        """What computes the problem: this, unless the backend has other kernels for some problems."""
        return self

    def plan(self, problem: AttentionProblem) -> list[str]:
        """How the problem would be computed, for people to read: a line a kernel or step. For problems without reasons against."""
        return ["how it launches is not described"]

    def _device_reasons(self, problem: AttentionProblem) -> list[str]:
        found = []
        if problem.device.type not in self.devices:
            found.append(f"runs on {_listed(self.devices)}, the tensors are on {problem.device.type}")
        elif problem.device.type == "cuda" and (capability := device_capability(problem.device)) < self.min_capability:
            found.append(
                f"needs compute capability {_version(self.min_capability)}, this GPU has {_version(capability)}"
            )
        if problem.dtype not in self.dtypes:
            names = _listed(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            found.append(f"takes {names}, the tensors are {str(problem.dtype).removeprefix('torch.')}")
        return found

    def _shape_reasons(self, problem: AttentionProblem) -> list[str]:
        found = []
        widest = max(problem.head_dim, problem.head_dim_v)
        if self.max_head_dim is not None and widest > self.max_head_dim:
            found.append(f"head dimension at most {self.max_head_dim}, is {widest}")
        if problem.head_dim % self.head_dim_multiple or problem.head_dim_v % self.head_dim_multiple:
            found.append(f"head dimension must be a multiple of {self.head_dim_multiple}, is {problem.head_dim}")
        if self.equal_head_dims and problem.head_dim != problem.head_dim_v:
            found.append(f"q and v must have the same head dimension, have {problem.head_dim} and {problem.head_dim_v}")
        if not self.grouped_heads and problem.kv_group != 1:
            found.append(f"k must have q's heads, has {problem.kv_heads} for {problem.heads}")
        if self.bands == "square causal" and not (
            problem.band.is_full or problem.band.is_square_causal(problem.query_length, problem.key_length)
        ):
            found.append("masks only causally and only with as many queries as keys")
        if not self.empty_tensors and 0 in (problem.batch, problem.query_length, problem.key_length, problem.heads):
            found.append("does not take empty tensors")
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
        """out [B, Sq, Hq, Dv] and, where asked for, lse [B, Hq, Sq]; differentiable. Called only without reasons against it.

        Packed sequences come as one batch entry: q [1, total, Hq, D].
        """
        raise NotImplementedError  # every backend has its own


class KernelBackend(Backend):
    """A backend that has registered its kernels (`tileflash.attention.ops.register_kernels`) under its own name, or under `kernels`."""

    kernels: str = ""

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
        return attend_with_kernels(self.kernels or self.name, q, k, v, scale, low, high, options)


def device_capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; a constant to torch.compile, which does not trace into the CUDA driver."""
    return torch.cuda.get_device_capability(device)


# What torch.compiler.assume_constant_result does, without its import of torch._dynamo, which doubles the time to import tileflash.
device_capability._dynamo_marked_constant = True  # type: ignore[attr-defined]


def logits_line(problem: AttentionProblem, dtype: torch.dtype) -> str:
    """A plan's line of a backend that holds the logits whole."""
    shape = (problem.batch, problem.heads, problem.query_length, problem.key_length)
    mib = math.prod(shape) * dtype.itemsize / 2**20
    name = str(dtype).removeprefix("torch.")
    return f"unfused: the logits {list(shape)} are held whole, {mib:,.1f} MiB in {name}"


def _listed(names: object) -> str:
    return ", ".join(sorted(str(name) for name in names))  # type: ignore[attr-defined]


def _version(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
