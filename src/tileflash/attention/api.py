"""`tileflash.attention`, `tileflash.attention_varlen` and `tileflash.explain`."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from tileflash.attention.arguments import DocumentIds, DropoutSeed, check_cu_seqlens, make_options
from tileflash.attention.backends.base import Backend
from tileflash.attention.band import Causal
from tileflash.attention.dispatch import choose
from tileflash.attention.explanation import Explanation, explain_problem
from tileflash.attention.problem import Window, check_tensors, features_of, make_problem
from tileflash.kernels.options import PLAIN, Options

# Checked arguments by what they look like, so that a call seen before costs a dictionary look-up. Emptied when full.
_seen: dict[tuple[Any, ...], tuple[Backend, float, int | None, int | None]] = {}
_SEEN_MOST = 4096


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **options: Any) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Any
) -> tuple[Tensor, Tensor]: ...
def attention(  # type: ignore[misc]  # the overloads are about return_lse alone and leave the rest to this signature
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = False,
    window: Window = (None, None),
    scale: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: DropoutSeed | None = None,
    generator: torch.Generator | None = None,
    document_ids: DocumentIds | None = None,
    prefix_lengths: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    allow_tf32: bool = False,
    second_derivative: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, softmax(scale * Q K^T) V, without a matrix of size Sq x Sk; differentiable once.

    All options combine, forward and backward.

    Args:
        q: queries [B, Sq, Hq, D], fp16, bf16, fp32 or fp64, any strides.
        k: keys [B, Sk, Hkv, D]; Hq must be a multiple of Hkv (each K/V head serves Hq / Hkv query heads in a row).
        v: values [B, Sk, Hkv, Dv].
        causal: False; True or "bottom-right": the last query stands at the last key; "top-left": the first at the first.
        window: (left, right) keys visible around each query's position besides its own; None means no bound.
        scale: multiplies the products; None is 1 / sqrt(D).
        bias: added to the logits (behind the soft cap); broadcasts to [B, Hq, Sq, Sk], any strides and float dtype, with gradient.
            -inf hides a key. A bool tensor says which keys are visible.
        alibi_slopes: [Hq] or [B, Hq], with gradient: slope * |i + shift - j| is taken from the logit of query i and key j, where shift
            is the key at which query 0 stands (Sk - Sq, or 0 with causal="top-left").
        softcap: c > 0 makes c * tanh(x / c) of each scaled product x; 0 is none.
        sinks: [Hq], with gradient: the logit of a key without a value that every query sees.
        dropout_p: probability in [0, 1) that a weight is dropped; the others are divided by 1 - dropout_p. Which ones is a function of
            (seed, offset, batch, head, query, key) alone. The log-sum-exp is that of all weights.
        dropout_seed: an integer, a pair (seed, offset), or an int64 tensor [2] of them on q's device. None: drawn on the device.
        generator: to draw it from; None is the device's default one, which checkpointing and CUDA graphs know of.
        document_ids: int32 [B, S] (or a pair, of the queries and of the keys): a query sees keys with its own number only.
        prefix_lengths: int32 [B]: every query sees this many first keys, whatever `causal` and `window` say.
        return_lse: also return the log-sum-exp of each row of logits, differentiable.
        deterministic: only a backend whose gradients are equal bit for bit from run to run.
        allow_tf32: products of fp32 tensors may be made of TF32 operands (10 bits of mantissa): faster, not exact.
        second_derivative: only a backend that can be differentiated twice, or forward; they need O(Sq * Sk) memory.
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
        check_tensors(q, k, v)  # raises, naming the one that is none
    q, k, v = to_autocast_dtype(q, k, v)
    plain = (
        bias is None and alibi_slopes is None and sinks is None and document_ids is None and prefix_lengths is None
        and dropout_p == 0 and softcap == 0 and not allow_tf32
    )  # fmt: skip
    options = PLAIN
    if not plain:
        check_tensors(q, k, v)
        options = make_options(
            q, k, bias=bias, alibi_slopes=alibi_slopes, softcap=softcap, sinks=sinks, dropout_p=dropout_p,
            dropout_seed=dropout_seed, generator=generator, document_ids=document_ids, prefix_lengths=prefix_lengths,
            top_left=causal == "top-left", allow_tf32=allow_tf32,
        )  # fmt: skip
    return _attend(
        q, k, v, causal, window, scale, return_lse, backend, options, bool(deterministic), bool(second_derivative)
    )


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *, return_lse: Literal[False] = ..., **options: Any
) -> Tensor: ...  # fmt: skip
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *, return_lse: Literal[True], **options: Any
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention_varlen(  # type: ignore[misc]  # as above
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: Causal = False,
    window: Window = (None, None),
    scale: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: DropoutSeed | None = None,
    generator: torch.Generator | None = None,
    document_ids: DocumentIds | None = None,
    prefix_lengths: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    allow_tf32: bool = False,
    second_derivative: bool = False,
    validate: bool | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of N sequences of any lengths, packed behind each other without padding.

    Args:
        q: queries [total_q, Hq, D]; sequence n has the rows cu_seqlens_q[n] to cu_seqlens_q[n + 1]. As for k and v, rows behind the
            last sequence are allowed: their output and gradients are 0.
        k, v: keys [total_k, Hkv, D] and values [total_k, Hkv, Dv]; sequence n has the rows cu_seqlens_k[n] to cu_seqlens_k[n + 1].
        cu_seqlens_q, cu_seqlens_k: int32 [N + 1], from 0 on, not falling. Sequences may be empty.
        max_seqlen_q, max_seqlen_k: no sequence is longer. Needed for a bias only, which is indexed by positions within a sequence:
            [1 or N, 1 or Hq, 1 or >= max_seqlen_q, 1 or >= max_seqlen_k].
        document_ids: int32 [total] (or a pair); alibi_slopes [Hq] or [N, Hq]; prefix_lengths int32 [N].
        validate: look into cu_seqlens and raise a ValueError where they are wrong. That waits for the GPU, so None means on the CPU
            only. Without it, wrong ones give wrong results, but nothing outside the tensors is touched.
        Everything else: as in `attention`, in each sequence for itself.

    Returns:
        out [total_q, Hq, Dv]; with `return_lse` also lse [Hq, total_q] in fp32.

    With backend "triton" nothing waits for the GPU, and a CUDA graph captured once serves other lengths of the same total.

    Raises:
        ValueError: as in `attention`.
    """
    packed_q, packed_k, packed_v = _one_entry(q, k, v)
    cu_seqlens, longest = check_cu_seqlens(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, validate)
    options = make_options(
        packed_q, packed_k, bias=bias, alibi_slopes=alibi_slopes, softcap=softcap, sinks=sinks, dropout_p=dropout_p,
        dropout_seed=dropout_seed, generator=generator, document_ids=document_ids, prefix_lengths=prefix_lengths,
        top_left=causal == "top-left", allow_tf32=allow_tf32, cu_seqlens=cu_seqlens, max_seqlens=longest,
    )  # fmt: skip
    result = _attend(
        packed_q, packed_k, packed_v, causal, window, scale, return_lse, backend, options, bool(deterministic),
        bool(second_derivative),
    )  # fmt: skip
    if isinstance(result, tuple):
        return result[0].squeeze(0), result[1].squeeze(0)
    return result.squeeze(0)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = False,
    window: Window = (None, None),
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    second_derivative: bool = False,
    backend: str = "auto",
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    validate: bool | None = None,
    **options: Any,
) -> Explanation:
    """What `attention` would run for these arguments, how, and why each other backend would not; `print` the result.

    Takes every argument of `attention`, and with `cu_seqlens_q` and `cu_seqlens_k` those of `attention_varlen`. Raises ValueError as
    they do, except that a problem nobody serves is explained.
    """
    if unknown := sorted(set(options) - _EXPLAINED):
        raise TypeError(f"explain() got an unexpected keyword argument {unknown[0]!r}")
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        packed = _one_entry(q, k, v)
        cu_seqlens, longest = check_cu_seqlens(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, validate)
        options |= {"cu_seqlens": cu_seqlens, "max_seqlens": longest}
        q, k, v = packed
    else:
        check_tensors(q, k, v)
        q, k, v = to_autocast_dtype(q, k, v)
    if options.get("dropout_seed") is None:  # any seed: what is only explained must not move a generator
        options = {**options, "dropout_seed": 0, "generator": None}
    made = make_options(q, k, **options, top_left=causal == "top-left")
    problem = make_problem(
        q, k, v, causal, window, scale, return_lse, made, deterministic=deterministic, second_derivative=second_derivative
    )  # fmt: skip
    return explain_problem(problem, backend)


_EXPLAINED = {
    "bias", "alibi_slopes", "softcap", "sinks", "dropout_p", "dropout_seed", "generator", "document_ids", "prefix_lengths", "allow_tf32",
}  # fmt: skip


def _one_entry(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Packed tensors [total, H, D] as one batch entry, checked, in autocast's dtype."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 3:
            got = f"shape {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{name} must be a tensor [total, heads, head dimension], got {got}")
    packed = to_autocast_dtype(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0))
    check_tensors(*packed)
    return packed


def _attend(
    q: Tensor, k: Tensor, v: Tensor, causal: Causal, window: Window, scale: float | None, return_lse: bool, backend: str,
    options: Options, deterministic: bool, second_derivative: bool,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    # The choice is made while tracing; under dynamic shapes a dictionary of shapes would pin them.
    check = _check if torch.compiler.is_compiling() else _check_once
    chosen, scale, low, high = check(
        q, k, v, causal, window, scale, return_lse, backend, options, deterministic, second_derivative
    )
    out, lse = chosen.attend(q, k, v, scale, low, high, return_lse, options)
    if not return_lse:
        return out
    assert lse is not None  # a backend without it has a reason against return_lse
    return out, lse


def _check(
    q: Tensor, k: Tensor, v: Tensor, causal: Causal, window: Window, scale: float | None, return_lse: bool, backend: str,
    options: Options, deterministic: bool, second_derivative: bool,
) -> tuple[Backend, float, int | None, int | None]:  # fmt: skip
    problem = make_problem(
        q, k, v, causal, window, scale, return_lse, options, deterministic=deterministic, second_derivative=second_derivative
    )  # fmt: skip
    return choose(problem, backend).serving(problem), problem.scale, problem.band.low, problem.band.high


def _check_once(
    q: Tensor, k: Tensor, v: Tensor, causal: Causal, window: Window, scale: float | None, return_lse: bool, backend: str,
    options: Options, deterministic: bool, second_derivative: bool,
) -> tuple[Backend, float, int | None, int | None]:  # fmt: skip
    """`_check`, remembered for arguments that look the same."""
    arguments = (q, k, v, causal, window, scale, return_lse, backend, options, deterministic, second_derivative)
    try:
        key = (
            q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
            q.stride()[-1:], k.stride()[-1:], v.stride()[-1:], causal, window, scale, return_lse, backend,
            torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
            torch.are_deterministic_algorithms_enabled(), deterministic, second_derivative,
            causal.__class__, scale.__class__,  # 1 == True, and yet only one of them is a mask
            None if options is PLAIN else _look(options),
        )  # fmt: skip
        found = _seen.get(key)
    except (TypeError, NotImplementedError):  # what has no hash (a list) or no strides (sparse) is wrong: say which
        return _check(*arguments)
    if found is None:
        if len(_seen) >= _SEEN_MOST:
            _seen.clear()
        found = _seen[key] = _check(*arguments)
    return found


def _look(options: Options) -> tuple[Any, ...]:
    """What the choice of a backend depends on."""
    return features_of(options), torch.is_grad_enabled() and options.requires_grad


def to_autocast_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in autocast's dtype where it is on for their device, as it does for matrix products; fp64 stays as it is."""
    if not torch._C._is_any_autocast_enabled():
        return q, k, v
    device_type = q.device.type
    if not torch.is_autocast_enabled(device_type):
        return q, k, v
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in (q, k, v))  # type: ignore[return-value]
