"""Who computes attention in the benchmark: ours by backend, PyTorch's backends pinned one by one, and the peers beside it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tileflash.bench.attention_peers import LOADERS, Attention, peer
from tileflash.bench.flags import FAILED, OUT_OF_MEMORY, UNSUPPORTED

TUTORIAL = "tutorial-fa1"
_OURS = "tileflash-"
_LONGEST_REASON = 400
_REFUSALS = ("No available kernel", "No viable backend")  # what a pinned SDPA says when its backend cannot serve
_PEERS = {
    "fa2": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def attention_variant(name: str, fa3_library: Path | None = None) -> Attention:
    """The function (q, k, v, causal) -> out, tensors [B, S, H, D], of a variant.

    `tileflash-BACKEND` is tileflash.attention(..., backend=BACKEND), `reference` its textbook backend; `fa2`, `cudnn`,
    `efficient` and `math` are the backends of PyTorch's scaled_dot_product_attention, each pinned so that it never
    falls back silently. `tutorial-fa1` is FlashAttention 1 in plain PyTorch (`tileflash.attention.tutorial`). `flex` is
    compiled FlexAttention; `fa3`, `fa4` and `flash-attn` are packages of their own (`attention_peers`); `fa3_library` is
    a file that holds FA3's operators where no package does. ValueError for another name.
    """
    if name in _PEERS:
        return _pinned(_PEERS[name])
    if name in LOADERS:
        return peer(name, fa3_library)
    if name == "reference":
        return _ours("reference")
    if name == TUTORIAL:
        from tileflash.bench.attention_tutorial import flash_attention_1

        return flash_attention_1
    if name.startswith(_OURS) and len(name) > len(_OURS):
        from tileflash.attention.dispatch import BACKENDS, FAMILIES

        backend = name.removeprefix(_OURS)
        if backend not in BACKENDS and backend not in FAMILIES:
            raise ValueError(f"`variants` named {name!r}; BACKEND must be one of {', '.join([*FAMILIES, *BACKENDS])}")
        return _ours(backend)
    raise ValueError(
        f"`variants` named {name!r}; it must be tileflash-BACKEND, reference, {', '.join((TUTORIAL, *_PEERS, *LOADERS))}"
    )


def _ours(backend: str) -> Attention:
    from tileflash.attention.api import attention

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        return attention(q, k, v, causal=causal, backend=backend)

    return run


def held_variant(
    name: str, fa3_library: Path | None = None
) -> tuple[Callable[[], AbstractContextManager[object]], Attention]:
    """What makes a context in which to call a variant many times, and the function. Who pins a backend of PyTorch's does it once, and not
    at each call, which would cost tens of microseconds."""
    if name in _PEERS:
        return partial(sdpa_kernel, _PEERS[name]), _scaled_dot_product
    return nullcontext, attention_variant(name, fa3_library)


def _pinned(backend: SDPBackend) -> Attention:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        with sdpa_kernel(backend):
            return _scaled_dot_product(q, k, v, causal)

    return run


def _scaled_dot_product(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


@dataclass(frozen=True)
class Trial:
    """What came of calling a variant once: its result, or the flag of the ledger and the reason in words."""

    result: tuple[torch.Tensor, ...] | None
    flag: str | None = None
    reason: str = ""


def attempt(call: Callable[[], tuple[torch.Tensor, ...]]) -> Trial:
    """Call a variant once. A variant that cannot serve is a row of the table, not the end of the suite: whatever it
    raises becomes the reason shown, with the warnings in which PyTorch explains why it refused."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            return Trial(call())
        except torch.OutOfMemoryError as error:
            return Trial(None, OUT_OF_MEMORY, _words(error))
        except Exception as error:  # a compiler's or a driver's error has no common base
            reasons = [_words(error), *(_words(warning.message) for warning in caught)]
            refused = isinstance(error, ValueError | NotImplementedError) or any(w in str(error) for w in _REFUSALS)
            return Trial(None, UNSUPPORTED if refused else FAILED, "; ".join(dict.fromkeys(reasons)))


def _words(error: object) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    # PyTorch ends its explanations with the place in its C++ source that printed them.
    text = text.split(" (Triggered internally")[0]
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 4] + " ..."
