"""llm.c's weight files (`gpt2_124M.bin`, `llama3.1_8B_bf16.bin`): a header, then the tensors with nothing between.

The tensors come kind by kind, each for all layers. LLaMA-3's q and k are in Meta's order of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from ..files import written_aside
from ..models import GPT2Config, Llama3Config, Model, ModelConfig
from .llmc_header import GPT2_VOCAB_MULTIPLE, HEADER_BYTES, INTEGERS, header_bytes, parse_header, read_header
from .tensor_map import TensorMap, WeightSource, differing_fields

EMBEDDING = "wte"
HEAD = "lm_head"


def llmc_maps(config: ModelConfig, vocabulary_rows: int) -> list[TensorMap]:
    """Every tensor in the order of the file; q, k and v are one tensor there and three neighbours here."""
    vocabulary, width = config.vocab_size, config.n_embd
    padding = vocabulary_rows - vocabulary
    shape = (vocabulary_rows, width)
    maps = [TensorMap(EMBEDDING, "embedding.weight", shape, 0, vocabulary, padding_rows=padding)]
    maps.extend(_gpt2_maps(config) if isinstance(config, GPT2Config) else _llama3_maps(config))
    if isinstance(config, Llama3Config):
        head = "embedding.weight" if config.tied else "head.weight"
        maps.append(TensorMap(HEAD, head, (vocabulary, width), 0, vocabulary))
    return maps


def _gpt2_maps(config: GPT2Config) -> Iterator[TensorMap]:
    width = config.n_embd
    kinds: list[tuple[str, str, tuple[int, ...]]] = [
        ("ln_1.weight", "attention_norm.weight", (width,)),
        ("ln_1.bias", "attention_norm.bias", (width,)),
        ("attn.c_attn.weight", "attention.qkv.weight", (3 * width, width)),
        ("attn.c_attn.bias", "attention.qkv.bias", (3 * width,)),
        ("attn.c_proj.weight", "attention.output.weight", (width, width)),
        ("attn.c_proj.bias", "attention.output.bias", (width,)),
        ("ln_2.weight", "mlp_norm.weight", (width,)),
        ("ln_2.bias", "mlp_norm.bias", (width,)),
        ("mlp.c_fc.weight", "mlp.up.weight", (4 * width, width)),
        ("mlp.c_fc.bias", "mlp.up.bias", (4 * width,)),
        ("mlp.c_proj.weight", "mlp.down.weight", (width, 4 * width)),
        ("mlp.c_proj.bias", "mlp.down.bias", (width,)),
    ]
    yield TensorMap("wpe", "positions", (config.max_sequence_length, width))
    for theirs, ours, shape in kinds:
        for i in range(config.n_layer):
            yield TensorMap(f"h.{i}.{theirs}", f"layers.{i}.{ours}", shape)
    yield TensorMap("ln_f.weight", "norm.weight", (width,))
    yield TensorMap("ln_f.bias", "norm.bias", (width,))


def _llama3_maps(config: Llama3Config) -> Iterator[TensorMap]:
    width, inner, layers = config.n_embd, config.intermediate_size, range(config.n_layer)
    rows, kv_rows = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
    qkv = [
        ("q", 0, rows, config.n_head),
        ("k", rows, rows + kv_rows, config.n_kv_head),
        ("v", rows + kv_rows, rows + 2 * kv_rows, 0),
    ]
    for i in layers:
        yield TensorMap(f"h.{i}.ln_1.weight", f"layers.{i}.attention_norm.weight", (width,))
    for i in layers:
        for part, start, stop, heads in qkv:
            name, shape = f"h.{i}.attn.c_attn.weight ({part})", (stop - start, width)
            yield TensorMap(name, f"layers.{i}.attention.qkv.weight", shape, start, stop, paired_heads=heads)
    # llm.c's c_fc2 is the gate, c_fc what it multiplies.
    kinds = [
        ("attn.c_proj", "attention.output", (width, rows)),
        ("ln_2", "mlp_norm", (width,)),
        ("mlp.c_fc", "mlp.up", (inner, width)),
        ("mlp.c_fc2", "mlp.gate", (inner, width)),
        ("mlp.c_proj", "mlp.down", (width, inner)),
    ]
    for theirs, ours, kind_shape in kinds:
        for i in layers:
            yield TensorMap(f"h.{i}.{theirs}.weight", f"layers.{i}.{ours}.weight", kind_shape)
    yield TensorMap("ln_f.weight", "norm.weight", (width,))


@contextmanager
def open_llmc(path: Path) -> Iterator[WeightSource]:
    """Open a file, memory-mapped. LLaMA-3 counts as tied when the head holds the very numbers of the embedding.

    Raises ValueError naming the file, and the tensor at which it breaks off.
    """
    header = read_header(path)
    maps = llmc_maps(header.config, header.vocabulary_rows)
    spans = _spans(path, maps, header.dtype.itemsize)
    stored = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)

    def read(name: str) -> torch.Tensor:
        start, stop, shape = spans[name]
        return stored[start:stop].view(header.dtype).view(shape)

    config = header.config
    if isinstance(config, Llama3Config) and _same(read(EMBEDDING), read(HEAD)):
        config = replace(config, tied=True)
        maps = maps[:-1]
    yield WeightSource(path, "llmc", config, header.dtype, maps, read)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    # The first row tells most pairs apart without reading the rest.
    return torch.equal(one[0], other[0]) and torch.equal(one, other)


def _spans(path: Path, maps: Sequence[TensorMap], itemsize: int) -> dict[str, tuple[int, int, tuple[int, ...]]]:
    """Name -> (first byte, byte after the last, shape), checked against the size of the file."""
    size_bytes, start = path.stat().st_size, HEADER_BYTES
    total = HEADER_BYTES + itemsize * sum(entry.elements for entry in maps)
    spans = {}
    for entry in maps:
        stop = start + itemsize * entry.elements
        if stop > size_bytes:
            raise ValueError(f"{path}: breaks off in tensor {entry.name}: {size_bytes} bytes, it must have {total}")
        spans[entry.name] = (start, stop, entry.shape)
        start = stop
    if size_bytes != total:
        raise ValueError(f"{path}: has {size_bytes} bytes; by its header it must have {total}")
    return spans


def save_llmc(
    model: Model, path: Path | str, dtype: torch.dtype = torch.float32, *, float_header: bool = False
) -> None:
    """Write the model as llm.c would, version 3 (float32) or 5 (bfloat16), tensor by tensor, aside and then renamed.

    `float_header` (LLaMA-3) stores ffn_dim_multiplier, norm_eps and rope_theta as the bits of floats, as InfiniTrain
    reads them, instead of truncated to integers, as llm.c does. Raises ValueError naming the field when the header
    cannot hold the model in such a way that it is read back as the same (untied GPT-2; unusual epsilon or RoPE
    scaling).
    """
    path, config = Path(path), model.config
    if float_header and isinstance(config, GPT2Config):
        raise ValueError("float_header is True; it must be False for GPT-2, whose header has no fractions")
    multiple = GPT2_VOCAB_MULTIPLE if isinstance(config, GPT2Config) else 1
    rows = -(-config.vocab_size // multiple) * multiple
    maps = llmc_maps(config, rows)
    header = header_bytes(config, dtype, rows, float_header)
    _require_readable(config, header, HEADER_BYTES + dtype.itemsize * sum(entry.elements for entry in maps))
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(path) as (temporary,), temporary.open("wb") as file:
        file.write(header)
        for entry in maps:
            tensor = entry.to_file(model.get_parameter(entry.parameter), dtype)
            file.write(tensor.view(torch.uint8).numpy().data)


def _require_readable(config: ModelConfig, header: bytes, size_bytes: int) -> None:
    back = parse_header(INTEGERS.unpack(header), size_bytes).config
    if isinstance(back, Llama3Config) and isinstance(config, Llama3Config):
        back = replace(back, tied=config.tied)  # told by the numbers, not by the header
    for name, read, meant in differing_fields(back, config):
        raise ValueError(f"{name} is {meant!r}; llm.c's header cannot hold it (it would be read as {read!r})")
