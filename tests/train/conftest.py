"""A model of 30,000 weights and a small token file: a run of ten steps takes a fraction of a second."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tileflash.data import write_token_file
from tileflash.train import TrainConfig

TINY = {"vocab_size": 257, "n_layer": 1, "n_head": 2, "n_embd": 32, "max_sequence_length": 32}
TOKENS = 3000


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # the machine is shared, and sums in one order are the same in every process


@pytest.fixture(scope="session")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens with something to learn: each is the one before plus 0 to 3, modulo 64."""
    path = tmp_path_factory.mktemp("tokens") / "train.bin"
    steps = np.random.default_rng(1).integers(0, 4, TOKENS)
    write_token_file(path, np.cumsum(steps) % 64, vocab_size=257)
    return path


@pytest.fixture
def tiny(token_file: Path) -> Callable[..., TrainConfig]:
    """A TrainConfig of the tiny model on the token file, with what is given changed."""

    def make(**changes: Any) -> TrainConfig:
        settings: dict[str, Any] = {
            "model": "gpt2-tiny",
            "model_overrides": TINY,
            "input_bin": str(token_file),
            "batch_size": 2,
            "sequence_length": 16,
            "num_iteration": 6,
            "learning_rate": 1e-2,
            "device": "cpu",
            "tensorboard": False,
        }
        return TrainConfig(**{**settings, **changes})

    return make


def _read_events(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    events = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    return [event for event in events if kind is None or event["event"] == kind]


@pytest.fixture
def read_events() -> Callable[..., list[dict[str, Any]]]:
    """The events of a JSON-lines log, of one kind or all; every line must be JSON without NaN."""
    return _read_events


@pytest.fixture
def numbers() -> Callable[[Path], list[tuple[int, float, float, float]]]:
    """(step, loss, learning rate, gradient norm) of every step in a log, to be compared bit for bit."""

    def read(path: Path) -> list[tuple[int, float, float, float]]:
        names = ("step", "train_loss", "learning_rate", "gradient_norm")
        return [tuple(event[name] for name in names) for event in _read_events(path, "step")]  # type: ignore[misc]

    return read
