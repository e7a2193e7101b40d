"""What options do to the logits of a strip of queries, in plain PyTorch: for the backends that are not kernels.

Shapes: [B, Hq, rows, Sk], where B and Hq may be 1 if all are alike; `begin` and `end` bound the strip of queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tileflash.attention.band import Band
from tileflash.attention.philox import kept
from tileflash.kernels.options import Options


def visible_keys(
    band: Band, options: Options, begin: int, end: int, key_length: int, device: torch.device | str | None
) -> Tensor:
    """bool [1 or B, 1 or Hq, rows, Sk]: which keys a query sees, by band, prefix, documents and mask. A bias of -inf hides, too."""
    visible = band.mask(begin, end, key_length, device)[None, None]
    if options.prefix_lengths is not None:
        keys = torch.arange(key_length, device=device)
        visible = visible | (keys < options.prefix_lengths[:, None])[:, None, None, :]
    if options.query_ids is not None and options.key_ids is not None:
        visible = visible & (options.query_ids[:, None, begin:end, None] == options.key_ids[:, None, None, :])
    if options.bias is not None:
        bias = _rows(options.bias, begin, end)
        visible = visible & (bias if bias.dtype == torch.bool else bias != -torch.inf)
    return visible


def additive(
    options: Options,
    shift: int,
    begin: int,
    end: int,
    key_length: int,
    compute: torch.dtype,
    device: torch.device | str,
) -> Tensor | None:
    """ALiBi and bias, what is added to the logits behind the soft cap; None where there is neither."""
    total = None
    if options.alibi_slopes is not None:
        slopes = options.alibi_slopes.to(compute).reshape(-1, options.alibi_slopes.shape[-1])
        total = -slopes[:, :, None, None] * distances(shift, begin, end, key_length, compute, device)
    if options.bias is not None and options.bias.dtype != torch.bool:
        bias = _rows(options.bias, begin, end).to(compute)
        total = bias if total is None else total + bias
    return total


def distances(
    shift: int, begin: int, end: int, key_length: int, compute: torch.dtype, device: torch.device | str
) -> Tensor:
    """|i + shift - j| [rows, Sk]."""
    rows = torch.arange(begin, end, device=device)[:, None] + shift
    return (rows - torch.arange(key_length, device=device)).abs().to(compute)


def kept_weights(options: Options, batch: int, heads: int, begin: int, end: int, key_length: int, first: int) -> Tensor:
    """bool [B, Hq, rows, Sk]: what dropout keeps; `first` is the number of the first sequence."""
    assert options.rng is not None
    streams = torch.arange(first * heads, (first + batch) * heads, device=options.rng.device)
    return kept(options.rng, options.dropout_p, streams, begin, end, key_length).unflatten(0, (batch, heads))


def readable_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., S, D] with zeros for those that hold NaN or Inf, for 0 * NaN is NaN; and which those were, bool [..., S, 1]."""
    lost = ~torch.isfinite(rows).all(-1, keepdim=True)
    return torch.where(lost, 0.0, rows), lost


def log_sum_exp(logits: Tensor) -> Tensor:
    """Over the last dimension; -inf where that has no elements."""
    return torch.logsumexp(logits, -1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], -torch.inf)


def alibi_shift(options: Options, query_length: int, key_length: int) -> int:
    """The key position at which query 0 stands."""
    return 0 if options.top_left else key_length - query_length


def _rows(bias: Tensor, begin: int, end: int) -> Tensor:
    return bias if bias.shape[2] == 1 else bias[:, :, begin:end]
