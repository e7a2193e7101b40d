"""The operators `tileflash::attention_forward` and `tileflash::attention_backward`, and the short way past them.

Registered with torch.library, with fake implementations, autograd and FLOP formulas, so that torch.compile, FakeTensor, FlopCounterMode
and activation checkpointing see them. In plain eager mode their dispatch would cost more host time than the kernel's launch, so there
a torch.autograd.Function calls the same kernels directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor
from torch.utils.flop_counter import register_flop_formula

from tileflash.attention.band import Band
from tileflash.attention.problem import compute_dtype
from tileflash.kernels.options import PLAIN, OptionGradients, Options


class Kernels(NamedTuple):
    """A backend's two functions.

    forward(q, k, v, scale, low, high, options) -> (out, lse);
    backward(d_out, d_lse or None, q, k, v, out, lse, scale, low, high, options) -> (d_q, d_k, d_v, OptionGradients).
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, OptionGradients]]


_factories: dict[str, Callable[[], Kernels]] = {}
_loaded: dict[str, Kernels] = {}


def register_kernels(name: str, factory: Callable[[], Kernels]) -> None:
    """Let the operators find a backend's kernels by name; `factory` is called at the first use."""
    _factories[name] = factory


def kernels_of(name: str) -> Kernels:
    """The kernels registered under `name`."""
    kernels = _loaded.get(name)
    if kernels is None:
        kernels = _loaded[name] = _factories[name]()
    return kernels


# The operators take the fields of Options one by one, behind the backend's name: a schema knows no tuples of tensors.


@torch.library.custom_op("tileflash::attention_forward", mutates_args=())
def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, low: int | None, high: int | None, backend: str,
    bias: Tensor | None = None, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, rng: Tensor | None = None,
    query_ids: Tensor | None = None, key_ids: Tensor | None = None, prefix_lengths: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, max_seqlen_q: int = 0, max_seqlen_k: int = 0,
    softcap: float = 0.0, dropout_p: float = 0.0, top_left: bool = False, allow_tf32: bool = False, bias_gradient: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out [B, Sq, Hq, Dv] and lse [B, Hq, Sq] fp32; query i sees key j where low <= j - i <= high, if options do not say otherwise."""
    options = Options(
        bias, alibi_slopes, sinks, rng, query_ids, key_ids, prefix_lengths, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        softcap, dropout_p, top_left, allow_tf32, bias_gradient,
    )  # fmt: skip
    return kernels_of(backend).forward(q, k, v, scale, low, high, _as_kernels_take_them(options))


@attention_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any, **named: Any) -> tuple[Tensor, Tensor]:
    batch, query_length, heads, _ = q.shape
    return q.new_empty((batch, query_length, heads, v.shape[3])), q.new_empty(
        (batch, heads, query_length), dtype=compute_dtype(q.dtype)
    )


@torch.library.custom_op("tileflash::attention_backward", mutates_args=())
def attention_backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float, low: int | None, high: int | None, backend: str,
    bias: Tensor | None = None, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, rng: Tensor | None = None,
    query_ids: Tensor | None = None, key_ids: Tensor | None = None, prefix_lengths: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, max_seqlen_q: int = 0, max_seqlen_k: int = 0,
    softcap: float = 0.0, dropout_p: float = 0.0, top_left: bool = False, allow_tf32: bool = False, bias_gradient: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """d_q, d_k, d_v of the above, contiguous, and d_bias, d_alibi_slopes and d_sinks, each empty where there is none."""
    options = Options(
        bias, alibi_slopes, sinks, rng, query_ids, key_ids, prefix_lengths, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        softcap, dropout_p, top_left, allow_tf32, bias_gradient,
    )  # fmt: skip
    d_q, d_k, d_v, gradients = kernels_of(backend).backward(
        d_out, d_lse, q, k, v, out, lse, scale, low, high, _as_kernels_take_them(options)
    )
    d_bias, d_slopes, d_sinks = (q.new_empty(0) if gradient is None else gradient for gradient in gradients)
    return d_q, d_k, d_v, d_bias, d_slopes, d_sinks


@attention_backward.register_fake
def _(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float, low: int | None, high: int | None, backend: str,
    bias: Tensor | None = None, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, *rest: Any, **named: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    bias_gradient = rest[-1] if len(rest) == len(Options._fields) - 3 else named.get("bias_gradient", False)
    gradients = (q.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)
                 for tensor in (bias if bias_gradient else None, alibi_slopes, sinks))  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), *gradients  # type: ignore[return-value]


def _as_kernels_take_them(options: Options) -> Options:
    """PLAIN itself, which kernels look for by identity, where `options` is equal to it; else with numbers side by side again.

    The caller has seen to the latter, but the dispatcher lies in between: where it makes real zeros of the zeros that autograd
    makes without memory, they are a single one, expanded. A bias may have any strides.
    """
    if not any(isinstance(value, Tensor) for value in options):
        return options if options[_FIRST_BOUND:] != PLAIN[_FIRST_BOUND:] else PLAIN
    dense: dict[str, Any] = {
        name: value.contiguous()
        for name, value in zip(Options._fields, options, strict=True)
        if isinstance(value, Tensor) and name != "bias" and value.stride(-1) != 1
    }
    return options._replace(**dense)


_FIRST_BOUND = Options._fields.index("max_seqlen_q")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, scale, low, high, backend, *options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, *(value for value in options if isinstance(value, Tensor)))
    ctx.arguments = (scale, low, high, backend)
    # Tensors are saved as such, so that a change in place is noticed; here is where they go.
    ctx.options = [None if isinstance(value, Tensor) else (value,) for value in options]


def _differentiate(
    ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, backward: Callable[..., Any]
) -> tuple[Any, ...]:
    """The gradients of `attention_forward`'s arguments, by `backward`, which has the arguments of `attention_backward`."""
    q, k, v, out, lse, *saved = ctx.saved_tensors
    if d_out is None:
        d_out = torch.zeros_like(out)
    tensors = iter(saved)
    options = [next(tensors) if place is None else place[0] for place in ctx.options]
    d_q, d_k, d_v, *gradients = backward(d_out, d_lse, q, k, v, out, lse, *ctx.arguments, *options)
    if not options:
        return d_q, d_k, d_v, None, None, None, None
    # The operator says by an empty tensor that there is none. One of a wrong shape goes on, and is refused by autograd.
    found = (None if gradient is None or option is None or (gradient.shape == (0,) != option.shape) else gradient
             for gradient, option in zip(gradients, options, strict=False))  # fmt: skip
    return d_q, d_k, d_v, None, None, None, None, *found, *(None for _ in options[len(OptionGradients._fields) :])


def _backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
    return _differentiate(ctx, d_out, d_lse, torch.ops.tileflash.attention_backward)


attention_forward.register_autograd(_backward, setup_context=_setup_context)


def _refuse_second_derivative(ctx: Any, *_: Tensor) -> NoReturn:
    raise RuntimeError(
        'tileflash\'s kernels have no second derivative; attention(..., backend="reference") has, with O(Sq * Sk) memory'
    )


attention_backward.register_autograd(_refuse_second_derivative)


@register_flop_formula(torch.ops.tileflash.attention_forward)
def _forward_flops(q: Any, k: Any, v: Any, scale: float, low: Any, high: Any, *_: Any, **__: Any) -> int:
    pairs = Band(low, high).visible_pairs(q[1], k[1])
    return 2 * q[0] * q[2] * pairs * (q[3] + v[3])


@register_flop_formula(torch.ops.tileflash.attention_backward)
def _backward_flops(
    d_out: Any, d_lse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, low: Any, high: Any, *_: Any, **__: Any
) -> int:  # fmt: skip
    pairs = Band(low, high).visible_pairs(q[1], k[1])
    return 2 * q[0] * q[2] * pairs * (3 * q[3] + 2 * v[3])


class _DirectAttention(torch.autograd.Function):
    """The same pair of kernels without the operators' dispatch."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        low: int | None,
        high: int | None,
        name: str,
        *options: Any,
    ) -> tuple[Tensor, Tensor]:
        output = kernels_of(name).forward(q, k, v, scale, low, high, Options(*options) if options else PLAIN)
        _setup_context(ctx, (q, k, v, scale, low, high, name, *options), output)
        return output

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
        # With create_graph=True the operator is needed: it is connected to its inputs, and refuses when the second
        # derivative is taken. So it is for gradients that only the dispatcher can read.
        direct = not torch.is_grad_enabled() and _readable(d_out) and _readable(d_lse)
        operator = torch.ops.tileflash.attention_backward
        return _differentiate(ctx, d_out, d_lse, _direct_backward if direct else operator)


def _direct_backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float, low: int | None, high: int | None, name: str, *options: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    d_q, d_k, d_v, gradients = kernels_of(name).backward(
        d_out, d_lse, q, k, v, out, lse, scale, low, high, Options(*options) if options else PLAIN
    )
    return d_q, d_k, d_v, *gradients


class _TransformedAttention(torch.autograd.Function):
    """The operator for function transforms (torch.func) and forward-mode differentiation.

    torch.library's own autograd refuses torch.func.grad with a message about something else, and passes tangents by in
    silence: a derivative of 0. A Function in this form is differentiated by torch.func.grad, and its `jvp` can refuse.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, scale: float, low: int | None, high: int | None, name: str, *options: Any
    ) -> tuple[Tensor, Tensor]:
        return torch.ops.tileflash.attention_forward(q, k, v, scale, low, high, name, *options)

    setup_context = staticmethod(_setup_context)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
        return _differentiate(ctx, d_out, d_lse, _TransformedGradients.apply)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise NotImplementedError(
            'tileflash\'s kernels have no forward-mode derivative; attention(..., backend="reference") has, with '
            "O(Sq * Sk) memory"
        )


class _TransformedGradients(torch.autograd.Function):
    """The backward of the above, which torch.func.grad calls as something that may be differentiated once more."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        scale: float, low: int | None, high: int | None, name: str, *options: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        return torch.ops.tileflash.attention_backward(d_out, d_lse, q, k, v, out, lse, scale, low, high, name, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None: ...

    @staticmethod
    def backward(ctx: Any, *d_gradients: Tensor | None) -> tuple[Any, ...]:
        _refuse_second_derivative(ctx)


def attend_with_kernels(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    low: int | None,
    high: int | None,
    options: Options = PLAIN,
) -> tuple[Tensor, Tensor]:
    """(out, lse) by the kernels registered under `name`, differentiable in q, k, v, bias, slopes and sinks through both."""
    fields: tuple[Any, ...] = () if options is PLAIN else options
    if not (_plain_eager(q, k, v) and (options is PLAIN or _all_readable(options))):
        if _transformed(q, k, v, *options.differentiable):
            return _TransformedAttention.apply(q, k, v, scale, low, high, name, *fields)
        return torch.ops.tileflash.attention_forward(q, k, v, scale, low, high, name, *fields)
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (options is not PLAIN and options.requires_grad)
    ):
        return _DirectAttention.apply(q, k, v, scale, low, high, name, *fields)
    return kernels_of(name).forward(q, k, v, scale, low, high, options)


_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def _plain_eager(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Nobody is watching: no tracing, no dispatch mode, no function transform, no forward-mode AD, no tensor subclass."""
    return (
        type(q) in _PLAIN_TYPES
        and type(k) in _PLAIN_TYPES
        and type(v) in _PLAIN_TYPES
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch.autograd.forward_ad._current_level < 0
        and not (q.is_neg() or k.is_neg() or v.is_neg())
        and not (q._is_zerotensor() or k._is_zerotensor() or v._is_zerotensor())
    )


def _readable(tensor: Tensor | None) -> bool:
    """Memory holds the values. It does not for lazily negated views (`x.conj().imag`), for the zeros that autograd makes without memory,
    and for the batches of vmap; the dispatcher brings all of them to a form that kernels can read.
    """
    return tensor is None or not (
        tensor.is_neg() or tensor._is_zerotensor() or is_batchedtensor(tensor) or is_legacy_batchedtensor(tensor)
    )


def _all_readable(options: Options) -> bool:
    return all(_readable(value) for value in options if isinstance(value, Tensor))


def _transformed(*tensors: Tensor | None) -> bool:
    """Inside a function transform, or some input carries a tangent of forward-mode differentiation."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return torch.autograd.forward_ad._current_level >= 0 and any(
        tensor is not None and torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    )
