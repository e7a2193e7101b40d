"""The 1024-byte header of llm.c's weight files: what model the numbers behind it are.

256 int32, little endian. The LLaMA-3 header is a trap: llm.c assigns ffn_dim_multiplier (1.3), norm_eps (1e-5) and
rope_theta to int32 slots, which truncates them (1, 0, 500000), while other readers (InfiniTrain) take the bits of those
slots for a float. Both are read here: an integer that makes sense is taken, else the bits as a float, else the value of
the preset with the same dimensions; and the width of the MLP must agree with the size of the file.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..models import PRESETS, GPT2Config, Llama3Config, ModelConfig, RopeScaling

HEADER_BYTES = 1024
INTEGERS = struct.Struct("<256i")
GPT2_MAGIC = 20240326
LLAMA3_MAGIC = 20240803
DTYPES = {3: torch.float32, 5: torch.bfloat16}
VERSIONS = {dtype: version for version, dtype in DTYPES.items()}
GPT2_VOCAB_MULTIPLE = 128
_DEFAULT_EPSILON = 1e-5  # of every LLaMA-3
_FACTOR_BY_MINOR_VERSION = {1: 8.0, 2: 32.0}  # LLaMA 3.1 and 3.2
_MULTIPLIER_LIMIT = 10**6  # the bits of a float above its inverse are larger integers than this
_GENERATION_BATCH = 4  # llm.c's default of a slot that has no meaning here
# (n_embd, intermediate_size) -> (ffn_dim_multiplier, multiple_of) of Meta's params.json.
_META_FFN = {(2048, 8192): (1.5, 256), (3072, 8192): (1.0, 256), (4096, 14336): (1.3, 1024)}


@dataclass(frozen=True)
class Header:
    """A header understood: the model, the dtype of the numbers, the rows of the vocabulary as stored."""

    config: ModelConfig
    dtype: torch.dtype
    vocabulary_rows: int


def read_header(path: Path) -> Header:
    """The header of the file at `path`. Raises ValueError, naming the file, for one that makes no sense.

    A LLaMA-3 header does not say whether the head is the embedding; the configuration has tied=False.
    """
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        raw = file.read(HEADER_BYTES)
    if len(raw) < HEADER_BYTES:
        raise ValueError(f"{path}: has {size_bytes} bytes; an llm.c file has a header of {HEADER_BYTES}")
    try:
        return parse_header(INTEGERS.unpack(raw), size_bytes)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse_header(slots: Sequence[int], size_bytes: int) -> Header:
    """As `read_header`, from the 256 integers and the size of the whole file."""
    magic, version = slots[:2]
    if magic not in (GPT2_MAGIC, LLAMA3_MAGIC):
        raise ValueError(f"magic is {magic}; weights have {GPT2_MAGIC} (GPT-2) or {LLAMA3_MAGIC} (LLaMA-3)")
    if version not in DTYPES:
        raise ValueError(f"version is {version}; it must be 3 (float32) or 5 (bfloat16)")
    if magic == LLAMA3_MAGIC:
        config = _llama3_config(slots, size_bytes, DTYPES[version].itemsize)
        return Header(config, DTYPES[version], config.vocab_size)
    length, vocabulary, layers, heads, width, rows = slots[2:8]
    if rows < vocabulary:
        raise ValueError(f"padded vocabulary is {rows}; it must be at least the vocabulary, {vocabulary}")
    gpt2 = GPT2Config(vocabulary, length, layers, heads, width, vocab_multiple=GPT2_VOCAB_MULTIPLE)
    # Told before its tensors are listed: a damaged number of layers may stand for more of them than fit the memory.
    if layers * width * DTYPES[version].itemsize > size_bytes:
        raise ValueError(f"n_layer is {layers}; a file of {size_bytes} bytes cannot hold so many layers")
    return Header(gpt2, DTYPES[version], rows)


def _llama3_config(slots: Sequence[int], size_bytes: int, itemsize: int) -> Llama3Config:
    length, vocabulary, layers, heads, kv_heads, width = slots[2:8]
    shape = Llama3Config(vocabulary, length, layers, heads, kv_heads, width, intermediate_size=1)  # checks the integers
    intermediate = _intermediate_size(slots, size_bytes, itemsize, shape)
    preset = _preset_like(shape, intermediate)
    return Llama3Config(
        vocabulary,
        length,
        layers,
        heads,
        kv_heads,
        width,
        intermediate,
        rope_theta=_rope_theta(slots[11], preset),
        rope_scaling=_rope_scaling(slots[12], slots[15], preset),
        norm_epsilon=_norm_epsilon(slots[10], preset),
        tied=False,
    )


def _preset_like(shape: Llama3Config, intermediate: int | None = None) -> Llama3Config | None:
    for preset in PRESETS.values():
        if not isinstance(preset, Llama3Config):
            continue
        names = ("n_layer", "n_head", "n_kv_head", "n_embd")
        if all(getattr(preset, name) == getattr(shape, name) for name in names) and intermediate in (
            None,
            preset.intermediate_size,
        ):
            return preset
    return None


def _as_float(slot: int) -> float:
    return float(struct.unpack("<f", struct.pack("<i", slot))[0])


def _float_slot(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def _rope_theta(slot: int, preset: Llama3Config | None) -> float:
    # The bits of a float above 1 are an integer above 10^9.
    if 1 < slot < 10**9:
        return float(slot)
    if 1 < (value := _as_float(slot)) < 1e12:
        return value
    if preset is None:
        raise ValueError(f"rope_theta is {slot}, neither a sensible integer nor a sensible float's bits")
    return preset.rope_theta


def _norm_epsilon(slot: int, preset: Llama3Config | None) -> float:
    # No integer is a sensible epsilon; llm.c's truncated one is 0.
    if 1e-12 < (value := _as_float(slot)) < 0.1:
        return float(f"{value:.6g}")  # the number that was meant: float32's 1e-5 is 9.99999974e-06
    if slot != 0:
        raise ValueError(f"norm_eps is {slot}, neither 0 nor a sensible float's bits")
    return _DEFAULT_EPSILON if preset is None else preset.norm_epsilon


def _rope_scaling(flag: int, minor_version: int, preset: Llama3Config | None) -> RopeScaling | None:
    if flag not in (0, 1):
        raise ValueError(f"use_scaled_rope is {flag}; it must be 0 or 1")
    if flag == 0:
        return None
    if preset is not None and preset.rope_scaling is not None:
        return preset.rope_scaling
    return RopeScaling(factor=_FACTOR_BY_MINOR_VERSION.get(minor_version, 8.0))


def swiglu_width(n_embd: int, multiplier: float, multiple_of: int) -> int:
    """Meta's rule: two thirds of four times the width, times the multiplier, up to the next multiple."""
    return math.ceil(int(multiplier * int(8 * n_embd / 3)) / multiple_of) * multiple_of


def _intermediate_size(slots: Sequence[int], size_bytes: int, itemsize: int, shape: Llama3Config) -> int:
    multiplier, multiple_of = slots[8], slots[9]
    if multiple_of < 1:
        raise ValueError(f"multiple_of is {multiple_of}; it must be a positive integer")
    candidates = list(_width_candidates(multiplier, multiple_of, shape))
    # All that is not MLP: embedding and head, norms, the projections of attention.
    attention = (2 * shape.n_head + 2 * shape.n_kv_head) * shape.head_dim * shape.n_embd
    others = 2 * shape.vocab_size * shape.n_embd + shape.n_layer * (2 * shape.n_embd + attention) + shape.n_embd
    per_unit = 3 * shape.n_layer * shape.n_embd
    sizes = [HEADER_BYTES + itemsize * (others + per_unit * width) for width in candidates]
    for width, size in zip(candidates, sizes, strict=True):
        if size == size_bytes:
            return width
    # A multiplier that was cut to an integer: its width lies between those of that integer and the next.
    elements, torn = divmod(size_bytes - HEADER_BYTES, itemsize)
    width, rest = divmod(elements - others, per_unit)
    if not torn and not rest and width % multiple_of == 0 and 0 <= multiplier <= _MULTIPLIER_LIMIT:
        low, high = (swiglu_width(shape.n_embd, multiplier + step, multiple_of) for step in (0, 1))
        if max(low, 1) <= width <= high:
            return width
    expected = " or ".join(str(size) for size in sorted(set(sizes))) or "another number"
    raise ValueError(
        f"the file has {size_bytes} bytes; by its header (ffn_dim_multiplier {multiplier}, multiple_of {multiple_of}) "
        f"it must have {expected}: it is truncated, or not the file that its header says"
    )


def _width_candidates(multiplier: int, multiple_of: int, shape: Llama3Config) -> Iterator[int]:
    if 1 <= multiplier <= _MULTIPLIER_LIMIT:
        yield swiglu_width(shape.n_embd, multiplier, multiple_of)
    if 1 / _MULTIPLIER_LIMIT < (value := _as_float(multiplier)) < _MULTIPLIER_LIMIT:
        yield swiglu_width(shape.n_embd, float(f"{value:.7g}"), multiple_of)
        rounded = round(value * int(8 * shape.n_embd / 3))  # InfiniTrain rounds where llm.c truncates
        yield math.ceil(rounded / multiple_of) * multiple_of
    preset = _preset_like(shape)
    if preset is not None:
        yield preset.intermediate_size


def header_bytes(config: ModelConfig, dtype: torch.dtype, vocabulary_rows: int, float_slots: bool) -> bytes:
    """The header that llm.c writes for this model; with `float_slots` the one that InfiniTrain reads (LLaMA-3 only)."""
    if dtype not in VERSIONS:
        raise ValueError(f"dtype is {dtype}; llm.c files hold torch.float32 or torch.bfloat16")
    slots = [0] * 256
    if isinstance(config, GPT2Config):
        head = [GPT2_MAGIC, VERSIONS[dtype], config.max_sequence_length, config.vocab_size]
        slots[:8] = [*head, config.n_layer, config.n_head, config.n_embd, vocabulary_rows]
    else:
        slots[:16] = _llama3_slots(config, dtype, float_slots)
    return INTEGERS.pack(*slots)


def _llama3_slots(config: Llama3Config, dtype: torch.dtype, float_slots: bool) -> list[int]:
    multiplier, multiple_of = _ffn_rule(config)
    store = _float_slot if float_slots else int
    factor = None if config.rope_scaling is None else config.rope_scaling.factor
    minor = {None: 0, 32.0: 2}.get(factor, 1)
    head = [LLAMA3_MAGIC, VERSIONS[dtype], config.max_sequence_length, config.vocab_size, config.n_layer, config.n_head]
    floats = [store(config.norm_epsilon), store(config.rope_theta)]
    ffn = [store(multiplier), multiple_of]
    return [*head, config.n_kv_head, config.n_embd, *ffn, *floats, int(factor is not None), _GENERATION_BATCH, 3, minor]


def _ffn_rule(config: Llama3Config) -> tuple[float, int]:
    """An (ffn_dim_multiplier, multiple_of) that gives the configuration's intermediate_size."""
    known = _META_FFN.get((config.n_embd, config.intermediate_size))
    if known is not None:
        return known
    multiple_of = math.gcd(config.intermediate_size, 256)
    return config.intermediate_size / int(8 * config.n_embd / 3), multiple_of
