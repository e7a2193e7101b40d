"""The optional arguments of attention, checked and brought to the forms that kernels take. ValueError names what is wrong."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor

from tileflash.kernels.options import PLAIN, Options

DocumentIds = Tensor | tuple[Tensor, Tensor]
DropoutSeed = int | tuple[int, int] | Tensor
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int32, torch.int64)


def make_options(
    q: Tensor,
    k: Tensor,
    *,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: DropoutSeed | None = None,
    generator: torch.Generator | None = None,
    document_ids: DocumentIds | None = None,
    prefix_lengths: Tensor | None = None,
    top_left: bool = False,
    allow_tf32: bool = False,
    cu_seqlens: tuple[Tensor, Tensor] | None = None,
    max_seqlens: tuple[int | None, int | None] = (None, None),
) -> Options:
    """Options for q [B, Sq, Hq, D] and k [B, Sk, Hkv, D], or packed ones [1, total, H, D] with `cu_seqlens`.

    Draws the dropout's seed where none is given: on q's device, so that it can be captured in a CUDA graph, and from the default
    generator, so that activation checkpointing draws the same again.
    """
    batch, query_length, heads, _ = q.shape
    rows = (batch, query_length, batch, k.shape[1])
    logits: tuple[int | None, ...] = (batch, heads, query_length, k.shape[1])
    if cu_seqlens is not None:
        batch = cu_seqlens[0].shape[0] - 1
        logits = (batch, heads, *max_seqlens)
    bias_4d = _bias(bias, logits, q.device, packed=cu_seqlens is not None)
    query_ids, key_ids = _documents(document_ids, rows, q.device, packed=cu_seqlens is not None)
    options = Options(
        bias=bias_4d,
        alibi_slopes=_float_tensor("alibi_slopes", alibi_slopes, [(heads,), (batch, heads), (1, heads)], q.device),
        sinks=_float_tensor("sinks", sinks, [(heads,)], q.device),
        rng=_rng(_probability(dropout_p), dropout_seed, generator, q.device),
        query_ids=query_ids,
        key_ids=key_ids,
        prefix_lengths=_prefix(prefix_lengths, batch, q.device),
        cu_seqlens_q=None if cu_seqlens is None else cu_seqlens[0],
        cu_seqlens_k=None if cu_seqlens is None else cu_seqlens[1],
        max_seqlen_q=max_seqlens[0] or 0,
        max_seqlen_k=max_seqlens[1] or 0,
        softcap=_softcap(softcap, q.dtype),
        dropout_p=float(dropout_p),
        top_left=top_left and (alibi_slopes is not None or cu_seqlens is not None),
        allow_tf32=allow_tf32 and q.dtype == torch.float32,
        bias_gradient=bias is not None and bias.requires_grad and torch.is_grad_enabled(),
    )
    asked = any(value is not None for value in options[:_TENSORS]) or options.softcap or options.dropout_p
    return options if asked or options.allow_tf32 else PLAIN


_TENSORS = Options._fields.index("max_seqlen_q")


def check_cu_seqlens(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_seqlen_q: int | None, max_seqlen_k: int | None,
    validate: bool | None,
) -> tuple[tuple[Tensor, Tensor], tuple[int | None, int | None]]:  # fmt: skip
    """int32 cu_seqlens and upper bounds of the lengths (None: nobody said). `validate` looks into them, which waits for the GPU.

    None: on a CPU, where nobody traces and they are no batch of vmap's.
    """
    if validate is None:
        validate = q.device.type == "cpu" and not torch.compiler.is_compiling()
        validate = validate and not any(
            isinstance(x, Tensor) and is_batchedtensor(x) for x in (cu_seqlens_q, cu_seqlens_k)
        )
    both = []
    for name, cu, rows in (("cu_seqlens_q", cu_seqlens_q, q.shape[0]), ("cu_seqlens_k", cu_seqlens_k, k.shape[0])):
        if not isinstance(cu, Tensor) or cu.dtype not in _INTEGERS or cu.dim() != 1 or cu.shape[0] < 1:
            raise ValueError(f"{name} must be an int32 tensor [sequences + 1], got {_describe(cu)}")
        _check_dense(name, cu)
        if cu.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {cu.device}")
        if validate:
            _look_into(name, cu, rows)
        both.append(_as_int32(cu))
    if both[0].shape != both[1].shape:
        sizes = (both[0].shape[0], both[1].shape[0])
        raise ValueError(f"cu_seqlens_k must have as many entries as cu_seqlens_q, {sizes[0]}, got {sizes[1]}")
    longest: list[int | None] = []
    for name, bound, cu in (("max_seqlen_q", max_seqlen_q, both[0]), ("max_seqlen_k", max_seqlen_k, both[1])):
        if bound is None:
            longest.append(None)
            continue
        if isinstance(bound, bool) or not isinstance(bound, (int, torch.SymInt)) or bound < 0:
            raise ValueError(f"{name} must be an integer >= 0 or None, got {bound!r}")
        if validate and cu.shape[0] > 1 and int(cu.diff().max()) > bound:
            raise ValueError(f"{name} is {bound}, and a sequence has {int(cu.diff().max())}")
        longest.append(bound)
    return (both[0], both[1]), (longest[0], longest[1])


def _look_into(name: str, cu: Tensor, rows: int) -> None:
    values = cu.tolist()
    if values[0] != 0:
        raise ValueError(f"{name} must begin with 0, got {values[0]}")
    for place, (before, after) in enumerate(itertools.pairwise(values)):
        if after < before:
            raise ValueError(f"{name} must not fall, but entry {place + 1} is {after} behind {before}")
    if values[-1] > rows:
        raise ValueError(f"{name} must end at or before the {rows} rows there are, got {values[-1]}")


def _bias(bias: Tensor | None, shape: tuple[int | None, ...], device: torch.device, *, packed: bool) -> Tensor | None:
    """The bias as [1 or B, 1 or Hq, 1 or Sq, 1 or Sk]."""
    if bias is None:
        return None
    if not isinstance(bias, Tensor) or (bias.dtype != torch.bool and bias.dtype not in _FLOATS):
        raise ValueError(f"bias must be a bool or floating-point tensor, got {_describe(bias)}")
    _check_dense("bias", bias)
    if bias.device != device:
        raise ValueError(f"bias must be on q's device {device}, got {bias.device}")
    if bias.dim() > 4:
        raise ValueError(f"bias must have at most 4 dimensions, got shape {list(bias.shape)}")
    bias = bias[(None,) * (4 - bias.dim())]
    names = ("sequences" if packed else "batch", "heads", "queries", "keys")
    for place, (name, size, whole) in enumerate(zip(names, bias.shape, shape, strict=True)):
        if packed and place >= 2:
            if size != 1 and (whole is None or size < whole):
                said = "is not given" if whole is None else f"is {whole}"
                raise ValueError(
                    f"bias has {size} {name}: of packed sequences it must have 1 or at least max_seqlen_"
                    f"{'qk'[place - 2]}, which {said}"
                )
        elif size not in (1, whole):
            raise ValueError(f"bias must broadcast to {list(shape)}, got shape {list(bias.shape)}")
    return bias


def _float_tensor(
    name: str, tensor: Tensor | None, shapes: list[tuple[int, ...]], device: torch.device
) -> Tensor | None:
    if tensor is None:
        return None
    if not isinstance(tensor, Tensor) or tensor.dtype not in _FLOATS or tuple(tensor.shape) not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise ValueError(f"{name} must be a floating-point tensor {wanted}, got {_describe(tensor)}")
    _check_dense(name, tensor)
    if tensor.device != device:
        raise ValueError(f"{name} must be on q's device {device}, got {tensor.device}")
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _documents(
    ids: DocumentIds | None, rows: tuple[int, int, int, int], device: torch.device, *, packed: bool
) -> tuple[Tensor | None, Tensor | None]:
    if ids is None:
        return None, None
    pair = ids if isinstance(ids, tuple) else (ids, ids)
    if len(pair) != 2:
        raise ValueError(f"document_ids must be a tensor or a pair (of queries, of keys), got {len(pair)} of them")
    result = []
    for name, tensor, shape in (("queries", pair[0], rows[:2]), ("keys", pair[1], rows[2:])):
        wanted = shape[1:] if packed else shape
        if not isinstance(tensor, Tensor) or tensor.dtype not in _INTEGERS or tuple(tensor.shape) != tuple(wanted):
            raise ValueError(
                f"document_ids of the {name} must be an int32 tensor {list(wanted)}, got {_describe(tensor)}"
            )
        _check_dense(f"document_ids of the {name}", tensor)
        if tensor.device != device:
            raise ValueError(f"document_ids of the {name} must be on q's device {device}, got {tensor.device}")
        # int64 numbers stay as they are: the lower 32 bits of two that differ may be the same.
        result.append(tensor.reshape(shape).contiguous())
    return result[0], result[1]


def _prefix(lengths: Tensor | None, batch: int, device: torch.device) -> Tensor | None:
    if lengths is None:
        return None
    if not isinstance(lengths, Tensor) or lengths.dtype not in _INTEGERS or tuple(lengths.shape) != (batch,):
        raise ValueError(f"prefix_lengths must be an int32 tensor [{batch}], got {_describe(lengths)}")
    _check_dense("prefix_lengths", lengths)
    if lengths.device != device:
        raise ValueError(f"prefix_lengths must be on q's device {device}, got {lengths.device}")
    return _as_int32(lengths)


def _as_int32(numbers: Tensor) -> Tensor:
    """Those that do not fit become the nearest that do, and not others by losing their upper bits."""
    if numbers.dtype == torch.int64:
        numbers = numbers.clamp(-(2**31), 2**31 - 1)
    return numbers.to(torch.int32).contiguous()


def _softcap(softcap: float, dtype: torch.dtype) -> float:
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)) or not 0 <= softcap < math.inf:
        raise ValueError(f"softcap must be a finite number >= 0 (0: none), got {softcap!r}")
    limits = torch.finfo(torch.promote_types(dtype, torch.float32))
    if softcap and not limits.tiny <= softcap <= limits.max:
        raise ValueError(f"softcap must be 0 or from {limits.tiny:.3g} to {limits.max:.3g}, got {softcap!r}")
    return float(softcap)


def _probability(dropout_p: float) -> float:
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)) or not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be at least 0 and below 1, got {dropout_p!r}")
    return float(dropout_p)


def _rng(
    dropout_p: float, seed: DropoutSeed | None, generator: torch.Generator | None, device: torch.device
) -> Tensor | None:
    """int64 [2]: seed and offset."""
    if dropout_p == 0:
        return None
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(f"generator must be a torch.Generator, got {type(generator).__name__}")
    if seed is None:
        if generator is not None and generator.device.type != device.type:
            raise ValueError(f"generator must be on q's device {device}, got {generator.device}")
        # Drawn where it is used: a captured draw gives a new seed at each replay, and nothing waits.
        return torch.randint(-(2**63), 2**63 - 1, (2,), device=device, generator=generator, dtype=torch.int64)
    if generator is not None:
        raise ValueError("dropout_seed and generator are both given: give one of them")
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or tuple(seed.shape) != (2,) or seed.device != device:
            raise ValueError(f"dropout_seed must be an int64 tensor [2] on {device}, got {_describe(seed)}")
        return seed.contiguous()
    pair = seed if isinstance(seed, tuple) else (seed, 0)
    if len(pair) != 2 or not all(type(number) is int and -(2**63) <= number < 2**63 for number in pair):
        raise ValueError(
            f"dropout_seed must be a 64-bit integer, a pair (seed, offset) or an int64 tensor [2], got {seed!r}"
        )
    return torch.tensor(pair, dtype=torch.int64, device=device)


def _check_dense(name: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got layout {tensor.layout}")


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
    return repr(value)
