"""Peers that are loaded first, as variants of the benchmark: the flash-attn package, FlashAttention 3 and 4, compiled FlexAttention.

Each is looked for when it is first called. One that is not here raises NotImplementedError with what was looked for: a reason in the
table's cell, not the end of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


class _FlashAttention3(torch.autograd.Function):
    """torch.ops.flash_attn_3, the operators that the package flash_attn_3 and xformers' wheel share."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        scale = q.shape[3] ** -0.5
        out, lse = torch.ops.flash_attn_3.fwd(
            q, k, v, max_seqlen_q=None, softmax_scale=scale, is_causal=causal, num_splits=1
        )[:2]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        d_q, d_k, d_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        torch.ops.flash_attn_3.bwd(
            gradients[0], q, k, v, out, lse, d_q, d_k, d_v, softmax_scale=ctx.scale, is_causal=ctx.causal
        )
        return d_q, d_k, d_v, None


def _load_fa3(library: Path | None) -> Attention:
    if library is not None:
        if not library.is_file():
            raise NotImplementedError(f"FlashAttention 3: `--fa3-library` was {str(library)!r}, which is no file")
        torch.ops.load_library(str(library))
    else:
        try:
            import flash_attn_3._C  # noqa: F401  # registers the operators
        except ImportError as error:
            raise NotImplementedError(
                f"FlashAttention 3 is not here: no package flash_attn_3 ({error}), and no --fa3-library"
            ) from error
    return lambda q, k, v, causal: _FlashAttention3.apply(q, k, v, causal)


def _load_fa4(library: Path | None) -> Attention:
    try:
        from flash_attn.cute.interface import flash_attn_func
    except ImportError as error:
        raise NotImplementedError(f"FlashAttention 4 is not here: flash_attn.cute.interface: {error}") from error

    def run(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        result = flash_attn_func(q, k, v, causal=causal)
        return result[0] if isinstance(result, tuple) else result  # (out, lse) since its betas

    return run


def _load_flash_attn(library: Path | None) -> Attention:
    try:
        from flash_attn import flash_attn_func
    except ImportError as error:
        raise NotImplementedError(f"the package flash-attn is not here: {error}") from error
    return lambda q, k, v, causal: flash_attn_func(q, k, v, causal=causal)


def _load_flex(library: Path | None) -> Attention:
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

    compiled: Any = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    masks: dict[tuple[int, int, str], BlockMask] = {}
    known: set[tuple[object, ...]] = set()

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    def run(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        if causal and q.shape[1] != k.shape[1]:
            raise NotImplementedError("flex: this variant's causal mask is for as many queries as keys")
        place = (q.shape[1], k.shape[1], str(q.device))
        if causal and place not in masks:
            masks[place] = create_block_mask(visible, None, None, q.shape[1], k.shape[1], device=str(q.device))
        tensors = [tensor.transpose(1, 2) for tensor in (q, k, v)]
        options: dict[str, Any] = {
            "block_mask": masks[place] if causal else None,
            "enable_gqa": q.shape[2] != k.shape[2],
        }
        shape = (q.shape, k.shape, q.dtype, causal, torch.is_grad_enabled() and q.requires_grad)
        if shape in known:
            out: Tensor = compiled(*tensors, **options)
            return out.transpose(1, 2)
        # Beyond its limit of recompilations Dynamo runs FlexAttention uncompiled, with the whole S x S matrix, and says so in a log
        # alone. Here each new shape may compile, and a limit that is reached is an error.
        with config.patch(fail_on_recompile_limit_hit=True, recompile_limit=256):
            out = compiled(*tensors, **options)
        known.add(shape)
        return out.transpose(1, 2)

    return run


LOADERS: dict[str, Callable[[Path | None], Attention]] = {
    "fa3": _load_fa3,
    "fa4": _load_fa4,
    "flash-attn": _load_flash_attn,
    "flex": _load_flex,
}


def peer(name: str, fa3_library: Path | None = None) -> Attention:
    """The peer `name` of LOADERS as a variant; NotImplementedError at the first call where it is not here. `fa3_library`: the file of
    FlashAttention 3's compiled operators, where no package brings them."""
    loaded: list[Attention] = []

    def run(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        if not loaded:
            loaded.append(LOADERS[name](fa3_library))
        return loaded[0](q, k, v, causal)

    return run
