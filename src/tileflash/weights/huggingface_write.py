"""Writing Hugging Face model directories that transformers loads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..files import written_aside
from ..models import Model
from .huggingface_config import CONFIG_NAME, values_from_config
from .huggingface_maps import HEAD_NAME, INDEX_NAME, PREFIXES, SINGLE_NAME, huggingface_maps
from .tensor_map import TensorMap

_WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def save_huggingface(
    model: Model, directory: Path | str, *, dtype: torch.dtype | None = None, max_shard_bytes: int = 5_000_000_000
) -> None:
    """Write config.json and the weights, in shards of at most `max_shard_bytes` (a larger tensor has one for itself).

    `dtype` None keeps the parameters'. At most one shard is held in memory beside the model. The files are written
    aside; then config.json goes, the weights take their names, stale weight files go, and config.json comes last: a
    kill in between leaves a directory that does not load, never one that mixes two models.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes}; it must be positive")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    dtype = dtype or model.embedding.weight.dtype
    shards = _plan_shards(huggingface_maps(model.config), dtype.itemsize, max_shard_bytes)
    prefix = PREFIXES[model.config.family]
    contents = {path: {_stored_name(entry, prefix): entry for entry in maps} for path, maps in shards.items()}
    files = [directory / name for name in contents]
    sharded = len(contents) > 1
    with written_aside(*files, *([directory / INDEX_NAME] if sharded else [])) as temporary:
        for path, entries in zip(temporary, contents.values(), strict=False):
            _write_shard(model, path, entries, dtype)
        if sharded:
            temporary[-1].write_text(_index_text(contents, dtype.itemsize), encoding="utf-8")
        (directory / CONFIG_NAME).unlink(missing_ok=True)
    for path in replaced_by_huggingface(directory):
        if path not in files and not (sharded and path.name == INDEX_NAME):
            path.unlink()
    with written_aside(directory / CONFIG_NAME) as (path,):
        text = json.dumps(values_from_config(model.config, dtype), indent=2, sort_keys=True)
        path.write_text(text + "\n", encoding="utf-8")


def replaced_by_huggingface(directory: Path) -> list[Path]:
    """The files in `directory` that `save_huggingface` would write anew or remove: those of a model that is there."""
    if not directory.is_dir():
        return []
    return sorted(p for p in directory.iterdir() if p.name == CONFIG_NAME or _WEIGHT_FILE.fullmatch(p.name))


def _write_shard(model: Model, path: Path, entries: Mapping[str, TensorMap], dtype: torch.dtype) -> None:
    # A function of its own so that one shard's copies are gone before the next one's are made.
    tensors = {name: entry.to_file(model.get_parameter(entry.parameter), dtype) for name, entry in entries.items()}
    save_file(tensors, path, metadata={"format": "pt"})


def _stored_name(entry: TensorMap, prefix: str) -> str:
    return entry.name if entry.name == HEAD_NAME else prefix + entry.name


def _plan_shards(maps: Iterable[TensorMap], itemsize: int, max_shard_bytes: int) -> dict[str, list[TensorMap]]:
    shards: list[list[TensorMap]] = [[]]
    used = 0
    for entry in maps:
        size = entry.elements * itemsize
        if shards[-1] and used + size > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(entry)
        used += size
    if len(shards) == 1:
        return {SINGLE_NAME: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}


def _index_text(contents: Mapping[str, Mapping[str, TensorMap]], itemsize: int) -> str:
    total = sum(entry.elements for entries in contents.values() for entry in entries.values()) * itemsize
    weight_map = {name: path for path, entries in contents.items() for name in entries}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
