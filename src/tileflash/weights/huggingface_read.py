"""Reading Hugging Face model directories: config.json, and safetensors in one file or in shards with an index."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .huggingface_config import read_config
from .huggingface_maps import HEAD_NAME, INDEX_NAME, PREFIXES, SINGLE_NAME, huggingface_maps
from .tensor_map import TensorMap, WeightSource

# Constants that older versions of transformers stored among the weights.
_BUFFER = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


@contextmanager
def open_huggingface(directory: Path) -> Iterator[WeightSource]:
    """Open a directory, with every name, shape and dtype checked before a tensor is read.

    Raises ValueError naming the file and the tensor for a damaged file, a missing or surplus tensor or a wrong shape.
    """
    config = read_config(directory)
    with ExitStack() as stack:
        handles = _open_shards(directory, stack)
        where = _canonical_names(handles, PREFIXES[config.family])
        # Told before they are listed: a damaged number of layers may stand for more tensors than fit the memory.
        if config.n_layer > len(where):
            raise ValueError(
                f"{directory}: config.json says {config.n_layer} layers, but there are {len(where)} tensors"
            )
        maps = huggingface_maps(config)
        _require_tensors(directory, where, handles, maps)

        def read(name: str) -> torch.Tensor:
            path, stored = where[name]
            return handles[path].get_tensor(stored)

        if config.tied and HEAD_NAME in where and not torch.equal(read(HEAD_NAME), read(maps[0].name)):
            raise ValueError(
                f"{where[HEAD_NAME][0]}: {HEAD_NAME} differs from {maps[0].name}, to which tie_word_embeddings ties it"
            )
        dtype = read(maps[0].name).dtype
        yield WeightSource(directory, "huggingface", config, dtype, maps, read)


def _open_shards(directory: Path, stack: ExitStack) -> dict[Path, Any]:
    """Path -> open safetensors file, for the single file or for each shard of the index."""
    index = directory / INDEX_NAME
    weight_map: dict[str, str] = {}
    if (directory / SINGLE_NAME).is_file():
        names = [SINGLE_NAME]
    elif index.is_file():
        weight_map = _read_index(index)
        names = sorted(set(weight_map.values()))
    else:
        raise ValueError(f"{directory}: has neither {SINGLE_NAME} nor {INDEX_NAME}; weights must be safetensors")
    handles = {}
    for name in names:
        path = directory / name
        if not path.is_file():
            raise ValueError(f"{path}: is missing; {INDEX_NAME} names it")
        try:
            handles[path] = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except SafetensorError as error:
            raise ValueError(f"{path}: is damaged or no safetensors file ({error})") from error
    for tensor, name in weight_map.items():
        if tensor not in handles[directory / name].keys():  # noqa: SIM118 - the handle is no mapping
            raise ValueError(f"{directory / name}: has no tensor {tensor}; {INDEX_NAME} says that it is there")
    return handles


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise TypeError("weight_map")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: must be an object whose weight_map gives each tensor's file ({error!r})") from error
    for name in weight_map.values():
        if Path(name).name != name:
            raise ValueError(f"{path}: weight_map names the file {name!r}; it must be in the same directory")
    return weight_map


def _canonical_names(handles: Mapping[Path, Any], prefix: str) -> dict[str, tuple[Path, str]]:
    """Name without prefix -> (file, stored name); the constants that are no weights are left out."""
    where: dict[str, tuple[Path, str]] = {}
    for path, handle in handles.items():
        for stored in handle.keys():  # noqa: SIM118 - the handle is no mapping
            name = stored.removeprefix(prefix)
            if _BUFFER.fullmatch(name):
                continue
            if name in where:
                raise ValueError(f"{path}: tensor {stored} is also in {where[name][0]} as {where[name][1]}")
            where[name] = (path, stored)
    return where


def _require_tensors(
    directory: Path, where: Mapping[str, tuple[Path, str]], handles: Mapping[Path, Any], maps: Iterable[TensorMap]
) -> None:
    expected = {tensor_map.name: tensor_map for tensor_map in maps}
    missing = [name for name in expected if name not in where]
    if missing:
        raise ValueError(f"{directory}: {len(missing)} tensors are missing, the first is {missing[0]}")
    surplus = [name for name in where if name not in expected and name != HEAD_NAME]
    if surplus:
        path, stored = where[surplus[0]]
        raise ValueError(f"{path}: {len(surplus)} tensors are not of this model, the first is {stored}")
    for name, tensor_map in expected.items():
        path, stored = where[name]
        view = handles[path].get_slice(stored)
        shape, dtype = tuple(view.get_shape()), view.get_dtype()
        if shape != tensor_map.shape:
            raise ValueError(f"{path}: tensor {stored} is {list(shape)}; it must be {list(tensor_map.shape)}")
        if dtype not in ("F64", "F32", "F16", "BF16"):
            raise ValueError(f"{path}: tensor {stored} is {dtype}; it must be F32, BF16, F16 or F64")
