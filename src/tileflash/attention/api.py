"""`tileflash.attention` and `tileflash.explain`."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from tileflash.attention.backends.base import Backend
from tileflash.attention.band import Causal
from tileflash.attention.dispatch import choose
from tileflash.attention.explanation import Explanation, explain_problem
from tileflash.attention.problem import Window, make_problem

# Checked arguments by what they look like, so that a call seen before costs a dictionary look-up. Emptied when full.
_seen: dict[tuple[Any, ...], tuple[Backend, float, int | None, int | None]] = {}
_SEEN_MOST = 4096


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: Causal = ..., window: Window = ..., scale: float | None = ...,
    return_lse: Literal[False] = ..., backend: str = ...,
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: Causal = ..., window: Window = ..., scale: float | None = ...,
    return_lse: Literal[True], backend: str = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = False,
    window: Window = (None, None),
    scale: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, softmax(scale * Q K^T) V, without a matrix of size Sq x Sk; differentiable once.

    Args:
        q: queries [B, Sq, Hq, D], fp16, bf16, fp32 or fp64, any strides.
        k: keys [B, Sk, Hkv, D]; Hq must be a multiple of Hkv (each K/V head serves Hq / Hkv query heads in a row).
        v: values [B, Sk, Hkv, Dv].
        causal: False; True or "bottom-right": the last query stands at the last key; "top-left": the first at the first.
        window: (left, right) keys visible around each query's position besides its own; None means no bound.
        scale: multiplies the logits; None is 1 / sqrt(D).
        return_lse: also return the log-sum-exp of each row of logits, differentiable.
        backend: "auto" (the first that serves, in the order of `tileflash.attention.dispatch.AUTO_ORDER`), "sdpa" (the first of
            PyTorch's), or one by name: see `tileflash.explain`.

    Returns:
        out [B, Sq, Hq, Dv] in q's dtype; with `return_lse` also lse [B, Hq, Sq] in fp32 (fp64 for fp64 inputs), natural logarithm.
        A query that sees no key gets out 0, lse -inf and gradients 0.

    Under torch.autocast, q, k and v are cast to its dtype first.

    Raises:
        ValueError: an argument is wrong (the message names it), or no backend of those asked for can serve (it names every reason).

    Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023.
    """
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        make_problem(q, k, v, causal, window, scale, return_lse)  # raises, naming the one that is none
    q, k, v = _autocast(q, k, v)
    if torch.compiler.is_compiling():
        # The choice is made while tracing; under dynamic shapes a dictionary of shapes would pin them.
        chosen, scale, low, high = _check(q, k, v, causal, window, scale, return_lse, backend)
    else:
        chosen, scale, low, high = _check_once(q, k, v, causal, window, scale, return_lse, backend)
    out, lse = chosen.attend(q, k, v, scale, low, high, return_lse)
    if not return_lse:
        return out
    assert lse is not None  # a backend without it has a reason against return_lse
    return out, lse


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = False,
    window: Window = (None, None),
    scale: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Explanation:
    """What `attention` would run for these arguments, how, and why each other backend would not; `print` the result.

    Raises ValueError as `attention` does, except that a problem nobody serves is explained rather than raised.
    """
    q, k, v = _autocast(q, k, v)
    return explain_problem(make_problem(q, k, v, causal, window, scale, return_lse), backend)


def _check(
    q: Tensor, k: Tensor, v: Tensor, causal: Causal, window: Window, scale: float | None, return_lse: bool, backend: str
) -> tuple[Backend, float, int | None, int | None]:
    problem = make_problem(q, k, v, causal, window, scale, return_lse)
    return choose(problem, backend), problem.scale, problem.band.low, problem.band.high


def _check_once(
    q: Tensor, k: Tensor, v: Tensor, causal: Causal, window: Window, scale: float | None, return_lse: bool, backend: str
) -> tuple[Backend, float, int | None, int | None]:
    """`_check`, remembered for arguments that look the same."""
    try:
        key = (
            q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
            q.stride()[-1:], k.stride()[-1:], v.stride()[-1:], causal, window, scale, return_lse, backend,
            torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
            torch.are_deterministic_algorithms_enabled(),
            causal.__class__, scale.__class__,  # 1 == True, and yet only one of them is a mask
        )  # fmt: skip
        found = _seen.get(key)
    except (TypeError, NotImplementedError):  # what has no hash (a list) or no strides (sparse) is wrong: say which
        return _check(q, k, v, causal, window, scale, return_lse, backend)
    if found is None:
        if len(_seen) >= _SEEN_MOST:
            _seen.clear()
        found = _seen[key] = _check(q, k, v, causal, window, scale, return_lse, backend)
    return found


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in autocast's dtype where it is on for their device, as it does for matrix products; fp64 stays as it is."""
    if not torch._C._is_any_autocast_enabled():
        return q, k, v
    device_type = q.device.type
    if not torch.is_autocast_enabled(device_type):
        return q, k, v
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in (q, k, v))  # type: ignore[return-value]
