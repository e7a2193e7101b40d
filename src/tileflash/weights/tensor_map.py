"""How one tensor of a file and one parameter of a model (or some rows of it) are the same numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import nn

from ..models import ModelConfig

# What may differ between a file and the model it is loaded into: neither changes what the model computes.
_ADJUSTABLE = ("max_sequence_length", "vocab_multiple")


@dataclass(frozen=True)
class TensorMap:
    """A tensor `name` of `shape` in a file is rows `start` to `stop` (None: all) of the model's `parameter`.

    `transposed`: the file holds [in, out], as GPT-2's Conv1D does. `paired_heads`: the file holds the rows of that many
    heads in Meta's order, in which RoPE rotates neighbours, the model in Hugging Face's, in which it rotates halves.
    `padding_rows`: that many rows of zeros follow in the file (counted in `shape`).
    """

    name: str
    parameter: str
    shape: tuple[int, ...]
    start: int | None = None
    stop: int | None = None
    transposed: bool = False
    paired_heads: int = 0
    padding_rows: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def rows(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter[self.start : self.stop]

    def from_file(self, tensor: torch.Tensor) -> torch.Tensor:
        """The file's tensor in the model's layout; a view wherever it can be one."""
        if self.padding_rows:
            tensor = tensor[: -self.padding_rows]
        if self.paired_heads:
            tensor = tensor.unflatten(0, (self.paired_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return tensor.t() if self.transposed else tensor

    def to_file(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The model's parameter as the file holds it: a contiguous copy of its own on the CPU."""
        tensor = self.rows(parameter.detach())
        if self.transposed:
            tensor = tensor.t()
        if self.paired_heads:
            tensor = tensor.unflatten(0, (self.paired_heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        if self.padding_rows:
            tensor = torch.cat((tensor, tensor.new_zeros(self.padding_rows, *tensor.shape[1:])))
        return torch.empty(self.shape, dtype=dtype).copy_(tensor)


@dataclass(frozen=True)
class WeightSource:
    """An open file or directory of weights. `read(name)` gives a tensor of it, memory-mapped."""

    path: Path
    kind: str  # "huggingface" or "llmc"
    config: ModelConfig
    dtype: torch.dtype
    maps: Sequence[TensorMap]
    read: Callable[[str], torch.Tensor]


@torch.no_grad()
def fill(model: nn.Module, source: WeightSource) -> None:
    """Copy every tensor of the source into the model, one at a time; the vocabulary's padding rows become zero.

    When the model has more positions than the source its further ones keep their values; when it has fewer it takes the
    first ones. Raises ValueError naming the source when the two are not the same model otherwise.
    """
    config: ModelConfig = model.config  # type: ignore[assignment]
    require_same_model(config, source)
    for tensor_map in source.maps:
        target = tensor_map.rows(model.get_parameter(tensor_map.parameter))
        tensor = tensor_map.from_file(source.read(tensor_map.name))
        if tensor_map.parameter == "positions":
            length = min(len(target), len(tensor))
            target, tensor = target[:length], tensor[:length]
        target.copy_(tensor)
    for name, parameter in model.named_parameters():
        if name in ("embedding.weight", "head.weight"):
            parameter[config.vocab_size :] = 0.0


def require_same_model(config: ModelConfig, source: WeightSource) -> None:
    """ValueError, naming each field, when the source's weights mean another model than `config`."""
    if type(config) is not type(source.config):
        raise ValueError(f"{source.path}: holds a {source.config.family} model; the model to fill is {config.family}")
    differences = differing_fields(source.config, config)
    if differences:
        told = "; ".join(f"{name} is {ours!r}, the model has {theirs!r}" for name, ours, theirs in differences)
        raise ValueError(f"{source.path}: {told}")


def differing_fields(one: ModelConfig, other: ModelConfig) -> list[tuple[str, object, object]]:
    """(field, its value in one, in the other) for fields that change what a model of the same family computes."""
    names = [field.name for field in fields(one) if field.name not in _ADJUSTABLE]
    pairs = [(name, getattr(one, name), getattr(other, name)) for name in names]
    return [pair for pair in pairs if pair[1] != pair[2]]
