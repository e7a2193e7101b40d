"""Launches the portable attention kernels. Tensors are [B, S, H, D]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tileflash.kernels.buffers import empty_contiguous, empty_out
from tileflash.kernels.compat import PreparedLaunch, current_device, remember
from tileflash.kernels.options import NO_GRADIENTS, PLAIN, OptionGradients, Options
from tileflash.kernels.triton.attention_backward import (
    attention_backward_dkdv_kernel,
    attention_backward_dq_kernel,
)
from tileflash.kernels.triton.attention_backward_bias import attention_backward_bias_kernel
from tileflash.kernels.triton.attention_forward import attention_forward_kernel
from tileflash.kernels.triton.option_arguments import (
    bias_argument,
    feature_bits,
    options_argument,
    sink_gradient,
    slope_gradient,
)
from tileflash.kernels.triton.sizes import Sizes

_BIAS_PROGRAMS = 1024  # enough for a large GPU
# Elements between two rows, as a batch of 1024 has in [S, B, H, D] memory. Tiles have up to 128 rows, and their offsets 32 bits.
_WIDEST_ROW = 2**23
_LOG2_E = 1.4426950408889634

# Launches made ready, by all that they depend on.
_forward_launches: dict[Any, PreparedLaunch] = {}
_backward_launches: dict[Any, tuple[PreparedLaunch, ...]] = {}


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, low: int | None, high: int | None, options: Options = PLAIN
) -> tuple[Tensor, Tensor]:
    """out [B, Sq, Hq, Dv] in q's dtype and lse [B, Hq, Sq] fp32 of q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv].

    Query i sees key j where low <= j - i <= high (None: no bound), as far as `options` do not say otherwise. `scale` multiplies the
    logits. Strides are free; only a last dimension that is not contiguous is copied.
    """
    q_stride, k_stride, v_stride = q.stride(), k.stride(), v.stride()
    if q_stride[3] != 1 or k_stride[3] != 1 or v_stride[3] != 1:
        q, k, v = _rows_contiguous(q), _rows_contiguous(k), _rows_contiguous(v)
        q_stride, k_stride, v_stride = q.stride(), k.stride(), v.stride()
    out, lse = empty_out(q, v)
    if lse.numel() == 0:
        return out, lse
    if k.shape[1] == 0 and options is PLAIN:
        return out.zero_(), lse.fill_(-torch.inf)
    features, tuples = _options(options, scale, q, k)
    key = (
        q.shape, k.shape, v.shape, q_stride, k_stride, v_stride, q.dtype, q.device, scale, low, high, _kind(options)
    )  # fmt: skip
    launch = _forward_launches.get(key)
    if launch is None:
        launch = remember(_forward_launches, key, _prepare_forward(q, k, v, out, scale, low, high, features, options))
    with current_device(q):
        launch((q, k, v, out, lse), q.get_device(), tuples)
    return out, lse


def attention_backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float, low: int | None, high: int | None, options: Options = PLAIN,
) -> tuple[Tensor, Tensor, Tensor, OptionGradients]:  # fmt: skip
    """d_q, d_k, d_v in the inputs' shapes and dtypes, contiguous, and the gradients of options.

    d_out [B, Sq, Hq, Dv] in any strides, d_lse [B, Hq, Sq] or None.
    """
    q, k, v = _rows_contiguous(q), _rows_contiguous(k), _rows_contiguous(v)
    out, d_out = _rows_contiguous(out), _rows_contiguous(d_out)
    d_q, d_k, d_v = empty_contiguous(q), empty_contiguous(k), empty_contiguous(v)
    if lse.numel() == 0 or (k.shape[1] == 0 and options is PLAIN):
        return d_q.zero_(), d_k.zero_(), d_v.zero_(), _no_gradients(options)
    delta = torch.empty_like(lse)
    d_slopes = torch.empty_like(lse) if options.alibi_slopes is not None else delta
    features, tuples = _options(options, scale, q, k)
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), out.stride(), d_out.stride(),
        q.dtype, q.device, scale, low, high, d_lse is None, _kind(options),
    )  # fmt: skip
    launches = _backward_launches.get(key)
    if launches is None:
        prepared = _prepare_backward(
            q, k, v, out, d_out, d_q, d_k, d_v, d_lse is not None, scale, low, high, features, options
        )
        launches = remember(_backward_launches, key, prepared)
    device_index = q.get_device()
    with current_device(q):
        query_launch, *key_launches = launches
        d_lse = delta if d_lse is None else d_lse.contiguous()  # an address that is not looked at, where there is none
        query_launch((q, k, v, out, d_out, lse, d_lse, delta, d_q, d_slopes), device_index, tuples)
        for launch in key_launches:
            launch((q, k, v, d_out, lse, delta, d_k, d_v), device_index, tuples)
        if options is PLAIN:
            return d_q, d_k, d_v, NO_GRADIENTS
        d_bias = None
        if options.bias_gradient:
            d_bias = _bias_gradient(q, k, v, d_out, lse, delta, scale, low, high, features, options, tuples)
    return d_q, d_k, d_v, OptionGradients(
        d_bias,
        None if options.alibi_slopes is None else slope_gradient(d_slopes, options).to(options.alibi_slopes.dtype),
        None if options.sinks is None else sink_gradient(lse, delta, options.sinks).to(options.sinks.dtype),
    )  # fmt: skip


def _options(options: Options, scale: float, q: Tensor, k: Tensor) -> tuple[int, tuple[tuple[Any, ...], ...]]:
    """FEATURES and the kernels' two tuples."""
    if options is PLAIN and scale > 0:
        return 0, ((), ())
    bits = feature_bits(options, scale)
    return bits, (bias_argument(options), options_argument(options, bits, q, k))


def _kind(options: Options) -> Any:
    """What a prepared launch depends on of the options: all but addresses and the numbers in the tuples, which go with each call."""
    if options is PLAIN:
        return None
    return tuple(
        (value.dtype, value.shape, value.stride()) if isinstance(value, Tensor) else value for value in options
    )


def _no_gradients(options: Options) -> OptionGradients:
    """Zeros for what an empty problem's gradients are."""
    return OptionGradients(
        torch.zeros_like(options.bias) if options.bias is not None and options.bias_gradient else None,
        None if options.alibi_slopes is None else torch.zeros_like(options.alibi_slopes),
        None if options.sinks is None else torch.zeros_like(options.sinks),
    )


def _prepare_forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float, low: int | None, high: int | None,
    features: int, options: Options,
) -> PreparedLaunch:  # fmt: skip
    sizes = Sizes.of(q, k, v, low, high, features, options)
    tile = sizes.tile("forward")
    scalars = (
        *_strides(options, q, k, v, out),
        sizes.query_length, sizes.key_length, sizes.heads, sizes.batch * sizes.heads, sizes.kv_heads_in_l2() * sizes.kv_group,
        sizes.head_dim, sizes.head_dim_v, scale, scale * _LOG2_E, low or 0, high or 0,
        tile.block_m, tile.block_n, sizes.block_d, sizes.block_dv, *sizes.flags(),
    )  # fmt: skip
    return PreparedLaunch(
        attention_forward_kernel,
        sizes.query_programs(tile.block_m),
        scalars,
        tile.num_warps,
        tile.num_stages,
        tile.max_registers,
    )


def _prepare_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, d_out: Tensor, d_q: Tensor, d_k: Tensor, d_v: Tensor,
    has_d_lse: bool, scale: float, low: int | None, high: int | None, features: int, options: Options,
) -> tuple[PreparedLaunch, ...]:  # fmt: skip
    """The launches of a backward pass in order: d_q (and delta), then d_k and d_v, in one launch or two."""
    sizes = Sizes.of(q, k, v, low, high, features, options)
    numbers = (sizes.head_dim, sizes.head_dim_v, scale, scale * _LOG2_E, low or 0, high or 0)
    tile = sizes.tile("dq")
    scalars: tuple[Any, ...] = (
        *_strides(options, q, k, v, out, d_out, d_q),
        sizes.query_length, sizes.key_length, sizes.heads, sizes.batch * sizes.heads, sizes.kv_heads_in_l2() * sizes.kv_group, *numbers,
        tile.block_m, tile.block_n, sizes.block_d, sizes.block_dv, *sizes.flags(), has_d_lse,
    )  # fmt: skip
    programs = sizes.query_programs(tile.block_m)
    launches = [
        PreparedLaunch(
            attention_backward_dq_kernel, programs, scalars, tile.num_warps, tile.num_stages, tile.max_registers
        )
    ]
    for kernel, make_dk, make_dv in sizes.key_passes():
        tile = sizes.tile(kernel)
        scalars = (
            *_strides(options, q, k, v, d_out, d_k, d_v),
            sizes.query_length, sizes.key_length, sizes.kv_heads, sizes.batch * sizes.kv_heads, sizes.kv_heads_in_l2(), *numbers,
            tile.block_m, tile.block_n, sizes.block_d, sizes.block_dv, *sizes.flags(), make_dk, make_dv,
        )  # fmt: skip
        programs = sizes.key_programs(tile.block_n)
        launches.append(
            PreparedLaunch(
                attention_backward_dkdv_kernel, programs, scalars, tile.num_warps, tile.num_stages, tile.max_registers
            )
        )
    return tuple(launches)


def _bias_gradient(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, lse: Tensor, delta: Tensor,
    scale: float, low: int | None, high: int | None, features: int, options: Options, tuples: tuple[tuple[Any, ...], ...],
) -> Tensor:  # fmt: skip
    """d_bias in the bias's shape and dtype. Launched the long way: it is no hot path, and its grid depends on the bias."""
    bias = options.bias
    assert bias is not None
    if bias.numel() == 0:
        return torch.zeros_like(bias)
    sizes = Sizes.of(q, k, v, low, high, features, options)
    batch, query_length, key_length = sizes.batch, sizes.query_length, sizes.key_length
    if options.packed:
        batch, query_length, key_length = sizes.sequences, options.max_seqlen_q, options.max_seqlen_k
    bias_batch, bias_heads, bias_queries, bias_keys = bias.shape
    tile = sizes.tile("bias")
    own_tiles = -(-bias_queries // tile.block_m) * -(-bias_keys // tile.block_n) * bias_batch * bias_heads
    walk = batch * sizes.heads * -(-query_length // tile.block_m) * -(-key_length // tile.block_n) // own_tiles
    # Enough programs for a large GPU, and partial sums of at most this many copies of the bias.
    splits = max(1, min(walk, _BIAS_PROGRAMS // own_tiles, 64))
    partial = torch.empty((splits, *bias.shape), dtype=torch.float32, device=bias.device)
    scalars = (
        *_strides(options, q, k, v, d_out),
        query_length, key_length, batch, sizes.heads, bias_queries, bias_keys, splits, sizes.head_dim, sizes.head_dim_v,
        scale, low or 0, high or 0,
        *(ones == 1 and size != 1 for ones, size in zip(bias.shape, (batch, sizes.heads, query_length, key_length), strict=True)),
        tile.block_m, tile.block_n, sizes.block_d, sizes.block_dv, *sizes.flags(),
    )  # fmt: skip
    launch = PreparedLaunch(
        attention_backward_bias_kernel, own_tiles * splits, scalars, tile.num_warps, tile.num_stages, tile.max_registers
    )
    launch((q, k, v, d_out, lse, delta, partial), q.get_device(), tuples)
    return partial.sum(0).to(bias.dtype)


def _strides(options: Options, *tensors: Tensor) -> tuple[int, ...]:
    """Batch, sequence and head strides of each tensor, in elements. Packed sequences lie behind each other: no batch stride."""
    if options.packed:
        return tuple(stride for tensor in tensors for stride in (0, *tensor.stride()[1:3]))
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:3])


def _rows_contiguous(tensor: Tensor) -> Tensor:
    """The tensor itself where its last dimension is contiguous and its rows are near enough for 32-bit offsets in a tile, else a copy."""
    stride = tensor.stride()
    return tensor if stride[3] == 1 and stride[1] <= _WIDEST_ROW else tensor.contiguous()
