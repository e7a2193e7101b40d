"""Weights into models, whatever they are stored in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ..attention.api import attention as default_attention
from ..models import AttentionFunction, Model, ModelConfig, empty_model
from .huggingface_read import open_huggingface
from .llmc import open_llmc
from .tensor_map import WeightSource, fill


@contextmanager
def open_weights(path: Path | str) -> Iterator[WeightSource]:
    """Open a Hugging Face directory or an llm.c file, checked whole (names, shapes, sizes) before a number is read.

    Raises ValueError naming the file and the tensor for what is damaged, missing, surplus or of another shape;
    FileNotFoundError when there is nothing at `path`.
    """
    path = Path(path)
    if path.is_dir():
        with open_huggingface(path) as source:
            yield source
    elif path.suffix in (".safetensors", ".json"):
        raise ValueError(f"{path}: is one file of a Hugging Face model; give its directory, {path.parent}")
    else:
        with open_llmc(path) as source:
            yield source


def config_from_path(path: Path | str) -> ModelConfig:
    """The configuration of the model stored at `path`. Raises as `open_weights`."""
    with open_weights(path) as source:
        return source.config


def load_weights(
    path: Path | str,
    *,
    attention: AttentionFunction = default_attention,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Model:
    """A model with the weights at `path`, its parameters in `dtype` on `device` (default: the CPU).

    Goes tensor by tensor from a memory map, so the model is in memory once. Raises as `open_weights`.
    """
    with open_weights(path) as source:
        model = empty_model(source.config, attention, device, dtype)
        fill(model, source)
    return model


def load_into(model: Model, path: Path | str) -> None:
    """Copy the weights at `path` into a model that is there already, in its dtype and on its device.

    A GPT-2 with more positions than the file keeps its own values for the further ones, one with fewer takes the first.
    Raises ValueError when model and file differ in anything else that matters, else as `open_weights`. Nothing is
    copied unless every name and shape fits.
    """
    with open_weights(path) as source:
        fill(model, source)
