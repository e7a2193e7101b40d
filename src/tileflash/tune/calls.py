"""Calls of attention's kernels that each keep a configuration of their own, side by side in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tileflash.kernels.options import PLAIN, Options
from tileflash.tune.candidates import Target

Call = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Shape:
    """A problem of `tokens` tokens and `width` columns, so that all lengths and head dimensions hold equally many elements."""

    length: int
    tokens: int
    width: int
    dtype: str


def kernels_module(backend: str) -> ModuleType:
    """Where a backend's launches are."""
    if backend == "hopper":
        from tileflash.kernels.hopper import attention as hopper

        return hopper
    from tileflash.kernels.triton import attention as portable

    return portable


def install(target: Target, configuration: Any) -> None:
    """Put a configuration into the table that launches are made from."""
    if target.backend == "triton":
        from tileflash.kernels.triton.configurations import HOPPER, HOPPER_WITH_OPTIONS

        key: Any = (target.kernel, target.head_dim)
        if target.options:
            HOPPER_WITH_OPTIONS[key] = configuration
        else:
            pair = list(HOPPER[key])
            pair[target.banded] = configuration
            HOPPER[key] = (pair[0], pair[1])
        return
    from tileflash.kernels.hopper.configurations import BACKWARD, FORWARD

    table: dict[Any, Any] = FORWARD if target.is_forward else BACKWARD
    table[target.head_dim, target.banded] = configuration


def bind(target: Target, configuration: Any, call: Call) -> Call:
    """`call` with a configuration: launches are made ready once for each, and found by a dictionary of their own."""
    module = kernels_module(target.backend)
    name = "_forward_launches" if target.is_forward else "_backward_launches"
    launches: dict[Any, Any] = {}

    def run() -> tuple[Tensor, ...]:
        if not launches:
            install(target, configuration)
        setattr(module, name, launches)
        return call()

    return run


def make_call(target: Target, shape: Shape, device: str) -> Call:
    """Forward, or backward as a whole, on standard normal tensors; backward with the forward pass's own results."""
    module = kernels_module(target.backend)
    batch, heads = max(1, shape.tokens // shape.length), max(1, shape.width // target.head_dim)
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, shape.dtype)
    q, k, v, d_out = (
        torch.randn(batch, shape.length, heads, target.head_dim, generator=generator, device=device, dtype=dtype)
        for _ in range(4)
    )
    options = _options(target.options, q, k)
    scale, high = target.head_dim**-0.5, 0 if target.banded else None
    if target.is_forward:
        return lambda: module.attention_forward(q, k, v, scale, None, high, options)
    out, lse = module.attention_forward(q, k, v, scale, None, high, options)

    def backward() -> tuple[Tensor, ...]:
        d_q, d_k, d_v, _ = module.attention_backward(d_out, None, q, k, v, out, lse, scale, None, high, options)
        return d_q, d_k, d_v

    return backward


def _options(name: str, q: Tensor, k: Tensor) -> Options:
    from tileflash.attention.arguments import make_options

    heads, length = q.shape[2], q.shape[1]
    if not name:
        return PLAIN
    make: dict[str, Callable[[], dict[str, Any]]] = {
        "softcap": lambda: {"softcap": 30.0},
        "alibi": lambda: {"alibi_slopes": torch.full((heads,), 0.05, device=q.device)},
        "dropout": lambda: {"dropout_p": 0.1, "dropout_seed": 1},
        "bias": lambda: {"bias": torch.zeros(heads, length, length, device=q.device, dtype=q.dtype)},
        "mask": lambda: {"bias": torch.ones(1, 1, length, length, device=q.device, dtype=torch.bool)},
    }
    return make_options(q, k, **make[name]())


def disagreement(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> str:
    """Why two results are not the same but for rounding; "" where they are. Rows are judged one by one: a wrong one among small numbers
    is not hidden by large numbers elsewhere."""
    for ours, theirs in zip(found, expected, strict=True):
        if not bool(torch.isfinite(ours).all()):
            return "a result is not finite"
        errors = (ours.float() - theirs.float()).abs().amax(-1)
        sizes = theirs.float().abs().amax(-1)
        allowed = 0.03 * sizes + 0.003 * sizes.max() + 1e-4
        if bool((errors > allowed).any()):
            worst = int((errors / allowed).argmax())
            return (
                f"differs from the shipped configuration by {float(errors.flatten()[worst]):.3g} in a row where "
                f"{float(allowed.flatten()[worst]):.3g} is allowed"
            )
    return ""
