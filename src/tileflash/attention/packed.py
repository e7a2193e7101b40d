"""Packed sequences for backends that have no kernel for them: one sequence after the other. Reads cu_seqlens on the host."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tileflash.attention.problem import compute_dtype
from tileflash.kernels.options import OptionGradients, Options


class _Sequence(NamedTuple):
    number: int
    queries: slice
    keys: slice
    shift: int  # the key at which query 0 stands
    options: Options


def _sequences(options: Options, query_rows: int, key_rows: int) -> Iterator[_Sequence]:
    assert options.cu_seqlens_q is not None
    assert options.cu_seqlens_k is not None
    q_bounds = _within(options.cu_seqlens_q.tolist(), query_rows)
    k_bounds = _within(options.cu_seqlens_k.tolist(), key_rows)
    for number in range(len(q_bounds) - 1):
        queries = slice(q_bounds[number], q_bounds[number + 1])
        keys = slice(k_bounds[number], k_bounds[number + 1])
        rows, columns = queries.stop - queries.start, keys.stop - keys.start
        if rows <= 0:
            continue
        bias, slopes, ids_q, ids_k = options.bias, options.alibi_slopes, options.query_ids, options.key_ids
        if bias is not None:
            bias = bias if bias.shape[0] == 1 else bias[number : number + 1]
            bias = bias[:, :, : rows if bias.shape[2] > 1 else 1, : columns if bias.shape[3] > 1 else 1]
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes if slopes.shape[0] == 1 else slopes[number : number + 1]
        prefix = options.prefix_lengths
        if prefix is not None and prefix.shape[0] > 1:
            prefix = prefix[number : number + 1]
        own = options._replace(
            bias=bias, alibi_slopes=slopes, prefix_lengths=prefix, cu_seqlens_q=None, cu_seqlens_k=None,
            query_ids=None if ids_q is None else ids_q[:, queries], key_ids=None if ids_k is None else ids_k[:, keys],
        )  # fmt: skip
        yield _Sequence(number, queries, keys, 0 if options.top_left else columns - rows, own)


def _within(bounds: list[int], rows: int) -> list[int]:
    """Bounds that nobody looked at, not falling and within [0, rows]: wrong ones give wrong results, of the right shape."""
    highest = [0, *itertools.accumulate((min(max(bound, 0), rows) for bound in bounds), max)]
    return highest[1:]


def _wide(options: Options, compute: torch.dtype) -> Options:
    """The differentiable options in the dtype of the computation: their gradients are sums over all sequences, which a narrow dtype
    would round after each."""
    if options.bias is not None and options.bias.dtype != torch.bool:
        options = options._replace(bias=options.bias.to(compute))
    if options.alibi_slopes is not None:
        options = options._replace(alibi_slopes=options.alibi_slopes.to(compute))
    return options if options.sinks is None else options._replace(sinks=options.sinks.to(compute))


def _shifted(bound: int | None, shift: int) -> int | None:
    return None if bound is None else bound + shift


def packed_forward(
    forward: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, scale: float, low: int | None,
    high: int | None, options: Options,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`forward(q, k, v, scale, low, high, options, first_sequence)` for each sequence: out [1, total, Hq, Dv], lse [1, Hq, total].

    Rows behind the last sequence give out 0 and lse -inf. Differentiable if `forward` is.
    """
    outs, all_lse, at = [], [], 0
    options = _wide(options, compute_dtype(q.dtype))
    for one in _sequences(options, q.shape[1], k.shape[1]):
        if one.queries.start > at:  # only where cu_seqlens do not begin with 0
            outs.append(q.new_zeros((1, one.queries.start - at, q.shape[2], v.shape[3])))
            all_lse.append(_nothing_seen(q, one.queries.start - at))
        out, lse = forward(
            q[:, one.queries], k[:, one.keys], v[:, one.keys],
            scale, _shifted(low, one.shift), _shifted(high, one.shift), one.options, one.number,
        )  # fmt: skip
        outs.append(out)
        all_lse.append(lse)
        at = one.queries.stop
    outs.append(q.new_zeros((1, q.shape[1] - at, q.shape[2], v.shape[3])))
    all_lse.append(_nothing_seen(q, q.shape[1] - at))
    return torch.cat(outs, 1), torch.cat(all_lse, 2)


def _nothing_seen(q: Tensor, rows: int) -> Tensor:
    """The log-sum-exp [1, Hq, rows] of rows that belong to no sequence."""
    return torch.full((1, q.shape[2], rows), -torch.inf, dtype=compute_dtype(q.dtype), device=q.device)


def packed_backward(
    backward: Callable[..., Any], d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor, scale: float, low: int | None, high: int | None, options: Options,
) -> tuple[Tensor, Tensor, Tensor, OptionGradients]:  # fmt: skip
    """The same for a backward function: gradients of packed tensors and of options."""
    d_q, d_k, d_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    wanted = (options.bias if options.bias_gradient else None, options.alibi_slopes, options.sinks)
    options = _wide(options, lse.dtype)
    totals = [None if x is None else torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in wanted]
    for one in _sequences(options, q.shape[1], k.shape[1]):
        part_q, part_k, part_v, parts = backward(
            d_out[:, one.queries], None if d_lse is None else d_lse[:, :, one.queries],
            q[:, one.queries], k[:, one.keys], v[:, one.keys], out[:, one.queries], lse[:, :, one.queries],
            scale, _shifted(low, one.shift), _shifted(high, one.shift), one.options, one.number,
        )  # fmt: skip
        d_q[:, one.queries], d_k[:, one.keys], d_v[:, one.keys] = part_q, part_k, part_v
        for total, part in zip(totals, parts, strict=True):
            if total is not None:
                assert part is not None
                # Where there is one entry for each sequence, this sequence's; a bias also has more rows than short sequences.
                place = total[one.number : one.number + 1] if part.dim() > 1 and total.shape[0] > 1 else total
                place[tuple(slice(0, size) for size in part.shape)] += part
    return (
        d_q,
        d_k,
        d_v,
        OptionGradients(
            *(
                None if total is None or x is None else total.to(x.dtype)
                for total, x in zip(totals, wanted, strict=True)
            )
        ),
    )
