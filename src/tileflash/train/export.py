"""A trained model out of its checkpoint, for export and for use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tileflash.models import GPT2Config, Llama3Config, Model, ModelConfig, RopeScaling, empty_model
from tileflash.train.checkpoint import checkpoints, find_checkpoint, load_checkpoint, read_state


def holds_checkpoints(path: Path) -> bool:
    """Whether `path` is a checkpoint of `tileflash train`, or a run's output directory with some."""
    return path.is_dir() and (bool(checkpoints(path)) or any(found == path for _, found in checkpoints(path.parent)))


def load_trained(path: Path, say: Callable[[str], None]) -> tuple[Model, Path]:
    """The model at `path` (a checkpoint, or a run's output directory: its last complete one), fp32 on the CPU, and
    the checkpoint that it is from. What is passed over is told to `say`. CheckpointError when none is complete."""
    found = find_checkpoint(path, say)
    assert found is not None  # `holds_checkpoints` saw to it
    model = empty_model(_config(read_state(found)["model"]))
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    load_checkpoint(found, tensors)
    return model, found


def _config(facts: dict[str, Any]) -> ModelConfig:
    """The configuration whose `model_facts` these are."""
    kind = {"gpt2": GPT2Config, "llama3": Llama3Config}[facts["family"]]
    values = {field.name: facts[field.name] for field in dataclasses.fields(kind)}
    if isinstance(values.get("rope_scaling"), dict):
        values["rope_scaling"] = RopeScaling(**values["rope_scaling"])
    return kind(**values)
