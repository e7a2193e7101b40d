"""Options as the Triton kernels take them: the bits of FEATURES, the two tuples of operands, and gradients from what kernels leave."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tileflash.kernels.options import Options, drop_below
from tileflash.kernels.triton import features


def feature_bits(options: Options, scale: float) -> int:
    """FEATURES of a call."""
    bits = 0
    if options.alibi_slopes is not None:
        bits |= features.ALIBI.value
    if options.softcap:
        bits |= features.SOFTCAP.value
    if options.bias is not None:
        bits |= features.MASK.value if options.bias.dtype == torch.bool else features.BIAS.value
    if options.query_ids is not None:
        bits |= features.DOCUMENTS.value
    if options.prefix_lengths is not None:
        bits |= features.PREFIX.value
    if options.sinks is not None:
        bits |= features.SINKS.value
    if options.dropout_p:
        bits |= features.DROPOUT.value
    if options.packed:
        bits |= features.VARLEN.value
    if scale <= 0:
        bits |= features.ANY_SCALE.value
    return bits


def bias_argument(options: Options) -> tuple[Any, ...]:
    """(bias, strides by batch, head, query, key, 0 where it is broadcast, last query and key); () without a bias."""
    bias = options.bias
    if bias is None:
        return ()
    strides = (0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride(), strict=True))
    last = (size - 1 for size in bias.shape[2:])
    return (bias.view(torch.uint8) if bias.dtype == torch.bool else bias, *strides, *last)


def options_argument(options: Options, bits: int, q: Tensor, k: Tensor) -> tuple[Any, ...]:
    """What `features.operands` unpacks; () without options. q fills the places of tensors that are not there."""
    if bits == 0:
        return ()

    def given(tensor: Tensor | None) -> Tensor:
        return q if tensor is None else tensor

    def batch_stride(tensor: Tensor | None) -> int:
        return tensor.stride(0) if tensor is not None and tensor.dim() == 2 and tensor.shape[0] > 1 else 0

    sequences = 0 if options.cu_seqlens_q is None else options.cu_seqlens_q.shape[0] - 1
    return (
        given(options.alibi_slopes), given(options.sinks), given(options.rng), given(options.query_ids), given(options.key_ids),
        given(options.prefix_lengths), given(options.cu_seqlens_q), given(options.cu_seqlens_k),
        batch_stride(options.alibi_slopes), batch_stride(options.query_ids), batch_stride(options.key_ids),
        sequences, sequences.bit_length(), q.shape[1], k.shape[1],
        options.softcap or 1.0, drop_below(options.dropout_p), 1.0 / (1.0 - options.dropout_p), int(options.top_left),
    )  # fmt: skip


def slope_gradient(rows: Tensor, options: Options) -> Tensor:
    """d_slopes from each row's part of it, [B, Hq, Sq] (packed: [1, Hq, total]); fp32."""
    slopes = options.alibi_slopes
    assert slopes is not None
    if slopes.dim() == 1 or slopes.shape[0] == 1:
        return rows.sum((0, 2)).view(slopes.shape)
    if options.cu_seqlens_q is None:
        return rows.sum(2)
    return by_sequence(rows[0], options.cu_seqlens_q)


def by_sequence(rows: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sums [N, Hq] over each packed sequence of rows [Hq, total], each in a fixed order."""
    bounds = cu_seqlens.long().clamp(0, rows.shape[1])
    lengths = torch.cat(
        [bounds.diff().clamp(min=0), rows.shape[1] - bounds[-1:]]
    )  # the last: rows behind all sequences
    return torch.segment_reduce(rows.T.contiguous(), "sum", lengths=lengths, axis=0, unsafe=True)[:-1]


def sink_gradient(lse: Tensor, delta: Tensor, sinks: Tensor) -> Tensor:
    """d_sinks [Hq]: a sink is a key whose dP is 0, so its dS is exp(sink - lse) * (0 - delta). lse and delta are [B, Hq, Sq]."""
    weights = torch.exp(sinks.to(lse.dtype)[None, :, None] - lse)
    return -torch.where(lse == -torch.inf, 0.0, weights * delta).sum((0, 2))
