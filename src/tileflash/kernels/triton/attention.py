"""Launches the portable attention kernels: outputs, tile sizes, grids. Tensors are [B, S, H, D]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tileflash.kernels.compat import PreparedLaunch, is_interpreted
from tileflash.kernels.options import NO_GRADIENTS, PLAIN, OptionGradients, Options
from tileflash.kernels.triton.attention_backward import (
    attention_backward_dkdv_kernel,
    attention_backward_dq_kernel,
)
from tileflash.kernels.triton.attention_backward_bias import attention_backward_bias_kernel
from tileflash.kernels.triton.attention_forward import attention_forward_kernel
from tileflash.kernels.triton.configurations import AMD, SPLIT_KEY_PASS_FROM, Kernel, Tile, select_tile
from tileflash.kernels.triton.features import VARLEN
from tileflash.kernels.triton.option_arguments import (
    bias_argument,
    feature_bits,
    options_argument,
    sink_gradient,
    slope_gradient,
)

INTERPRETED = is_interpreted(attention_forward_kernel)

# What K and V of the heads worked on together may fill of the L2 cache.
_L2_SHARE_BYTES = 24 * 2**20
_BIAS_PROGRAMS = 1024
# Narrower heads are padded to this on a GPU. With operands 16 and 32 columns wide that are loaded element by element (D = 24 with
# Dv = 8, fp16) Triton 3.6 makes wrong wgmma operands on Hopper: keys from the 17th on took the wrong values.
_NARROWEST = 16 if INTERPRETED else 64
_LOG2_E = 1.4426950408889634

# Launches made ready, by all that they depend on. A training run has a handful; emptied when full.
_forward_launches: dict[Any, PreparedLaunch] = {}
_backward_launches: dict[Any, tuple[PreparedLaunch, ...]] = {}
_MOST_LAUNCHES = 4096


@dataclass(frozen=True)
class _Sizes:
    """Sizes of one problem, and what follows from them for every kernel."""

    batch: int
    query_length: int
    key_length: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    capability: tuple[int, int]
    low: int | None
    high: int | None
    features: int
    sequences: int
    allow_tf32: bool

    @staticmethod
    def of(
        q: Tensor, k: Tensor, v: Tensor, low: int | None, high: int | None, features: int, options: Options
    ) -> _Sizes:
        capability = (0, 0) if INTERPRETED else _tile_capability(q.device)
        batch, query_length, heads, head_dim = q.shape
        _, key_length, kv_heads, head_dim_v = v.shape
        return _Sizes(
            batch, query_length, key_length, heads, kv_heads, head_dim, head_dim_v, q.dtype, capability, low, high, features,
            0 if options.cu_seqlens_q is None else options.cu_seqlens_q.shape[0] - 1, options.allow_tf32,
        )  # fmt: skip

    @property
    def block_d(self) -> int:
        return max(_NARROWEST, 1 << (self.head_dim - 1).bit_length())

    @property
    def block_dv(self) -> int:
        return max(_NARROWEST, 1 << (self.head_dim_v - 1).bit_length())

    @property
    def kv_group(self) -> int:
        return self.heads // self.kv_heads

    def tile(self, kernel: Kernel) -> Tile:
        banded = self.low is not None or self.high is not None
        return select_tile(kernel, max(self.block_d, self.block_dv), self.dtype, self.capability, banded, self.features)

    def kv_heads_in_l2(self) -> int:
        """How many K/V heads are worked on together. Without a band all programs take equally long and none need go first."""
        if self.low is None and self.high is None:
            return 1
        bytes_per_head = self.key_length * (self.head_dim + self.head_dim_v) * self.dtype.itemsize
        return max(1, _L2_SHARE_BYTES // max(1, bytes_per_head))  # there may be no keys

    def flags(self) -> tuple[Any, ...]:
        """The constants that end every attention kernel's parameters."""
        precision = "upcast" if INTERPRETED and self.dtype is not torch.float32 else "ieee"
        if self.allow_tf32 and self.dtype is torch.float32:
            precision = "tf32"
        even_d, even_dv = self.block_d == self.head_dim, self.block_dv == self.head_dim_v
        return (self.kv_group, even_d, even_dv, self.low is not None, self.high is not None, precision, self.features)

    def query_programs(self, block_m: int) -> int:
        """Programs of a kernel that owns tiles of queries. Packed: see `packed.packed_tile`."""
        if self.features & VARLEN.value:
            return (self.query_length // block_m + self.sequences + 1) * self.heads
        return -(-self.query_length // block_m) * self.batch * self.heads

    def key_programs(self, block_n: int) -> int:
        """Programs of a kernel that owns tiles of keys."""
        if self.features & VARLEN.value:
            return (self.key_length // block_n + self.sequences + 1) * self.kv_heads
        return -(-self.key_length // block_n) * self.batch * self.kv_heads

    def key_passes(self) -> tuple[tuple[Kernel, bool, bool], ...]:
        """The launches that make d_k and d_v: (kernel, makes d_k, makes d_v)."""
        if max(self.block_d, self.block_dv) >= SPLIT_KEY_PASS_FROM:
            return ("dk", True, False), ("dv", False, True)
        return (("dkdv", True, True),)


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, low: int | None, high: int | None, options: Options = PLAIN
) -> tuple[Tensor, Tensor]:
    """out [B, Sq, Hq, Dv] in q's dtype and lse [B, Hq, Sq] fp32 of q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv].

    Query i sees key j where low <= j - i <= high (None: no bound), as far as `options` do not say otherwise. `scale` multiplies the
    logits. Strides are free; only a last dimension that is not contiguous is copied.
    """
    q, k, v = _rows_contiguous(q), _rows_contiguous(k), _rows_contiguous(v)
    batch, query_length, heads, _ = q.shape
    out = torch.empty((batch, query_length, heads, v.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, query_length), dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse
    if k.shape[1] == 0 and options is PLAIN:
        return out.zero_(), lse.fill_(-torch.inf)
    features, tuples = _options(options, scale, q, k)
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, q.device, scale, low, high, _kind(options)
    )  # fmt: skip
    launch = _forward_launches.get(key)
    if launch is None:
        launch = _remember(_forward_launches, key, _prepare_forward(q, k, v, out, scale, low, high, features, options))
    with _current_device(q):
        launch((q, k, v, out, lse), q.get_device(), tuples)
    return out, lse


def attention_backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float, low: int | None, high: int | None, options: Options = PLAIN,
) -> tuple[Tensor, Tensor, Tensor, OptionGradients]:  # fmt: skip
    """d_q, d_k, d_v in the inputs' shapes and dtypes, contiguous, and the gradients of options.

    d_out [B, Sq, Hq, Dv] in any strides, d_lse [B, Hq, Sq] or None.
    """
    q, k, v, out, d_out = (_rows_contiguous(tensor) for tensor in (q, k, v, out, d_out))
    d_q, d_k, d_v = (torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (q, k, v))
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
        launches = _remember(_backward_launches, key, prepared)
    device_index = q.get_device()
    with _current_device(q):
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
    sizes = _Sizes.of(q, k, v, low, high, features, options)
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
    sizes = _Sizes.of(q, k, v, low, high, features, options)
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
    sizes = _Sizes.of(q, k, v, low, high, features, options)
    batch, query_length, key_length = sizes.batch, sizes.query_length, sizes.key_length
    if options.packed:
        batch, query_length, key_length = sizes.sequences, options.max_seqlen_q, options.max_seqlen_k
    if bias.numel() == 0:  # of no keys
        return torch.zeros_like(bias)
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


def describe_launches(
    batch: int, query_length: int, key_length: int, heads: int, kv_heads: int, head_dim: int, head_dim_v: int,
    dtype: torch.dtype, device: torch.device, low: int | None, high: int | None, backward: bool,
    with_options: bool = False, packed: bool = False, bias_gradient: bool = False,
) -> list[str]:  # fmt: skip
    """What is launched for a problem, a line a kernel: programs, tile, warps, stages; then the order of the programs."""
    capability = (0, 0) if INTERPRETED else _tile_capability(device)
    sizes = _Sizes(
        batch, query_length, key_length, heads, kv_heads, head_dim, head_dim_v, dtype, capability, low, high,
        int(with_options), 0, False,
    )  # fmt: skip
    if 0 in (batch, query_length, key_length, heads):
        return ["no kernel: the tensors are empty"]

    def line(kernel: Kernel, programs: int | None, by: str) -> str:
        tile = sizes.tile(kernel)
        count = f"{programs:,} programs" if programs is not None else f"programs by {by},"
        stages = f"{tile.num_stages} stage{'s' if tile.num_stages > 1 else ''}"
        return f"{count} of {tile.num_warps} warps, tile {tile.block_m} queries x {tile.block_n} keys, {stages}"

    def query_line(kernel: Kernel) -> str:
        return line(
            kernel, None if packed else sizes.query_programs(sizes.tile(kernel).block_m), "the sequences' lengths"
        )

    def key_line(kernel: Kernel) -> str:
        return line(
            kernel, None if packed else sizes.key_programs(sizes.tile(kernel).block_n), "the sequences' lengths"
        )

    lines = [f"forward: {query_line('forward')}"]
    if backward:
        lines.append(f"backward, d_q and delta: {query_line('dq')}")
        for kernel, make_dk, make_dv in sizes.key_passes():
            made = " and ".join(name for name, is_made in (("d_k", make_dk), ("d_v", make_dv)) if is_made)
            lines.append(f"backward, {made}: {key_line(kernel)}")
        if bias_gradient:
            lines.append(f"backward, d_bias: {line('bias', None, 'the shape of the bias')}")
    if packed:
        return [*lines, "order: head by head, the last tiles of queries and the first tiles of keys first"]
    together = min(sizes.kv_heads_in_l2(), batch * kv_heads)
    order = f"K/V heads in groups of {together}"
    if low is not None or high is not None:
        order += f" (K and V of a group fill at most {_L2_SHARE_BYTES >> 20} MiB of the L2 cache)"
    return [*lines, f"order: {order}; in a group the last query tiles and the first key tiles of all its heads first"]


def _tile_capability(device: torch.device) -> tuple[int, int]:
    """What tiles are chosen by: the compute capability, or AMD."""
    return AMD if torch.version.hip is not None else torch.cuda.get_device_capability(device)


def _strides(options: Options, *tensors: Tensor) -> tuple[int, ...]:
    """Batch, sequence and head strides of each tensor, in elements. Packed sequences lie behind each other: no batch stride."""
    if options.packed:
        return tuple(stride for tensor in tensors for stride in (0, *tensor.stride()[1:3]))
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:3])


def _rows_contiguous(tensor: Tensor) -> Tensor:
    """The tensor itself where its last dimension is contiguous, else a copy."""
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


class _NoDevice:
    """Nothing to switch: the tensors are on the current device (or on the CPU, in the interpreter)."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


_NO_DEVICE = _NoDevice()


def _current_device(tensor: Tensor) -> Any:
    """A context in which the tensor's device is the current one, as launches need it."""
    if INTERPRETED or tensor.get_device() == torch._C._cuda_getDevice():
        return _NO_DEVICE
    return torch.cuda.device(tensor.device)


def _remember(launches: dict[Any, Any], key: Any, prepared: Any) -> Any:
    if len(launches) >= _MOST_LAUNCHES:
        launches.clear()
    launches[key] = prepared
    return prepared
