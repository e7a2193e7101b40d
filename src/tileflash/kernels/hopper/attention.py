"""Launches the Hopper attention kernels: outputs, schedules, descriptors. Tensors are [B, S, H, D]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tileflash.kernels.buffers import empty_contiguous, empty_out
from tileflash.kernels.compat import current_device, remember
from tileflash.kernels.hopper.packed import packed_backward, packed_forward
from tileflash.kernels.hopper.prepared import prepare_backward, prepare_forward
from tileflash.kernels.hopper.seen import Seen
from tileflash.kernels.hopper.sinks import sink_gradient
from tileflash.kernels.options import NO_GRADIENTS, PLAIN, OptionGradients, Options

# The tuple that tells the kernels before and after the backward one of packed sequences.
_NOT_PACKED: tuple[tuple[Any, ...], ...] = ((),)

# Launches made ready, by all that they depend on.
_forward_launches: dict[Any, Any] = {}
_backward_launches: dict[Any, Any] = {}


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, low: int | None, high: int | None, options: Options = PLAIN
) -> tuple[Tensor, Tensor]:
    """out [B, Sq, Hq, Dv] in q's dtype and lse [B, Hq, Sq] fp32 of q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv].

    fp16 or bf16; D and Dv multiples of 8, at most 256. Query i sees key j where low <= j - i <= high (None: no bound). `scale` > 0
    multiplies the logits; of the options there are the soft cap, sinks and packed sequences. Strides are free; a tensor that TMA cannot
    address (last dimension not contiguous, a stride or an address that is no multiple of 16 bytes, an expanded dimension) is copied.
    Equal bit for bit from run to run.
    """
    sinks = None if options.sinks is None else options.sinks.float().contiguous()
    if (q.numel() == 0 or k.numel() == 0) and not options.packed:
        out, lse = empty_out(q, v)
        _fill_unseen(lse, sinks)
        return out.zero_(), lse
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    if options.packed:
        q, k, v = (t if _addressable(t) else t.contiguous() for t in (q, k, v))
        return packed_forward(q, k, v, scale, low, high, options, sinks)
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, q.device, scale, low, high,
        options.softcap, sinks is None,
    )  # fmt: skip
    prepared = _forward_launches.get(key)
    if prepared is None:
        if not (_addressable(q) and _addressable(k) and _addressable(v)):
            q, k, v = (t if _addressable(t) else t.contiguous() for t in (q, k, v))
            return attention_forward(q, k, v, scale, low, high, options)
        prepared = remember(_forward_launches, key, prepare_forward(q, k, v, scale, low, high, options))
    seen, launch, table = prepared
    query_length = q.shape[1]
    out, lse = empty_out(q, v)
    seen_out, seen_lse = out, lse
    if seen.queries != query_length or seen.keys != k.shape[1]:
        out[:, : seen.query_begin], out[:, seen.query_end :] = 0, 0
        _fill_unseen(lse[:, :, : seen.query_begin], sinks)
        _fill_unseen(lse[:, :, seen.query_end :], sinks)
        q, k, v = _queries(q, seen), _keys(k, seen), _keys(v, seen)
        seen_out, seen_lse = _queries(out, seen), lse[:, :, seen.query_begin :]
    if launch is not None:
        with current_device(q):
            launch((q, k, v, seen_out), (seen_lse, table, q, k, v, sinks), q.get_device())
    return out, lse


def attention_backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float, low: int | None, high: int | None, options: Options = PLAIN, deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor, OptionGradients]:  # fmt: skip
    """d_q, d_k, d_v in the inputs' shapes and dtypes, contiguous; d_out [B, Sq, Hq, Dv] in any strides, d_lse [B, Hq, Sq] or None.

    The sum of d_q has no fixed order: its last bits differ from run to run. With `deterministic` a pass of its own makes d_q, and all is
    equal bit for bit.
    """
    if (q.numel() == 0 or k.numel() == 0) and not options.packed:
        return (
            q.new_zeros(q.shape),
            k.new_zeros(k.shape),
            v.new_zeros(v.shape),
            sink_gradient(options, d_lse, None, q.shape[0]),
        )
    q, k, v, d_out = _aligned(q), _aligned(k), _aligned(v), _aligned(d_out)
    out = out if out.stride(3) == 1 else out.contiguous()
    lse = lse.contiguous()
    all_d_lse = d_lse = None if d_lse is None else d_lse.contiguous()
    if options.packed:
        q, k, v, d_out = (t if _addressable(t) else t.contiguous() for t in (q, k, v, d_out))
        return packed_backward(d_out, d_lse, q, k, v, out, lse, scale, low, high, options, deterministic)
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), out.stride(), d_out.stride(),
        q.dtype, q.device, scale, low, high, d_lse is None, deterministic, options.softcap,
    )  # fmt: skip
    prepared = _backward_launches.get(key)
    if prepared is None:
        if not all(_addressable(t) for t in (q, k, v, d_out)):
            q, k, v, d_out = (t if _addressable(t) else t.contiguous() for t in (q, k, v, d_out))
            return attention_backward(d_out, d_lse, q, k, v, out, lse, scale, low, high, options, deterministic)
        prepared = prepare_backward(q, k, v, out, d_out, d_lse is not None, scale, low, high, options, deterministic)
        remember(_backward_launches, key, prepared)
    d_q, d_k, d_v = empty_contiguous(q), empty_contiguous(k), empty_contiguous(v)
    seen, launches, tables, stats_shape, acc_shape = prepared
    seen_d_q, seen_d_k, seen_d_v = d_q, d_k, d_v
    if seen.queries != q.shape[1] or seen.keys != k.shape[1]:
        d_q[:, : seen.query_begin], d_q[:, seen.query_end :] = 0, 0
        for d_tensor in (d_k, d_v):
            d_tensor[:, : seen.key_begin], d_tensor[:, seen.key_end :] = 0, 0
        q, out, d_out, seen_d_q = (_queries(t, seen) for t in (q, out, d_out, d_q))
        k, v, seen_d_k, seen_d_v = (_keys(t, seen) for t in (k, v, d_k, d_v))
        lse = lse[:, :, seen.query_begin :]
        d_lse = None if d_lse is None else d_lse[:, :, seen.query_begin :]
    if launches is not None:
        prepare, launch, launch_queries, finish = launches
        stats = torch.empty(stats_shape, dtype=torch.float32, device=q.device)
        acc = torch.empty(acc_shape, dtype=torch.float32, device=q.device)
        device_index = q.get_device()
        with current_device(q):
            # Where there is no d_lse, an address that is not looked at.
            prepare((out, d_out, lse, stats if d_lse is None else d_lse, stats, acc), device_index, _NOT_PACKED)
            launch((q, k, v, d_out, stats, acc, seen_d_k, seen_d_v), (acc, tables[0]), device_index)
            if launch_queries is not None:
                launch_queries((q, k, v, d_out), (stats, acc, tables[1]), device_index)
            finish((acc, seen_d_q, stats, q, k, v, d_out), device_index, _NOT_PACKED)
    if options.sinks is None:
        return d_q, d_k, d_v, NO_GRADIENTS
    unseen = (
        None
        if all_d_lse is None
        else torch.cat([all_d_lse[:, :, : seen.query_begin], all_d_lse[:, :, seen.query_end :]], 2)
    )
    return d_q, d_k, d_v, sink_gradient(options, unseen, stats if launches is not None else None, q.shape[0])


def _fill_unseen(lse: Tensor, sinks: Tensor | None) -> None:
    """The log-sum-exp of rows that see no key, [B, Hq, rows]: that of the sink alone."""
    if sinks is None:
        lse.fill_(-torch.inf)
    else:
        lse.copy_(sinks[None, :, None].expand(lse.shape))


def _queries(tensor: Tensor, seen: Seen) -> Tensor:
    return tensor[:, seen.query_begin : seen.query_end]


def _keys(tensor: Tensor, seen: Seen) -> Tensor:
    return tensor[:, seen.key_begin : seen.key_end]


def _aligned(tensor: Tensor) -> Tensor:
    return tensor if tensor.data_ptr() & 15 == 0 else tensor.clone(memory_format=torch.contiguous_format)


def _addressable(tensor: Tensor) -> bool:
    """Whether TMA can address the tensor: last dimension contiguous, the other strides multiples of 16 bytes and not 0."""
    if tensor.stride(3) != 1 and tensor.shape[3] != 1:
        return False
    return all(
        n == 1 or (stride and stride % 8 == 0) for n, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    )
