"""Starting from stored weights: the first loss is theirs, and what does not fit is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tileflash.data import BatchLoader, TokenFiles
from tileflash.models import PRESETS, build_model
from tileflash.train import TrainConfig, train
from tileflash.train.step import token_loss_sum
from tileflash.weights import save_huggingface, save_llmc

Make = Callable[..., TrainConfig]


def stored(tmp_path: Path, kind: str):
    """gpt2-tiny with seed 5, on disk, and the model itself."""
    model = build_model(PRESETS["gpt2-tiny"], seed=5)
    path = tmp_path / ("model.bin" if kind == "llmc" else "model")
    (save_llmc if kind == "llmc" else save_huggingface)(model, path)
    return path, model


@pytest.mark.parametrize("kind", ["llmc", "huggingface"])
def test_the_first_loss_is_that_of_the_stored_weights(
    tmp_path: Path, tiny: Make, numbers, token_file: Path, kind: str
) -> None:
    path, model = stored(tmp_path, kind)
    train(tiny(model_overrides={}, init_from=str(path), num_iteration=2, log_json=str(tmp_path / "log")))
    tokens, targets = BatchLoader(TokenFiles(token_file), 2, 16).batch(0)
    with torch.no_grad():
        expected = float(token_loss_sum(model(tokens), targets) / targets.numel())
    assert numbers(tmp_path / "log")[0][1] == pytest.approx(expected, rel=1e-5)


def test_resuming_wins_over_the_stored_weights(tmp_path: Path, tiny: Make, numbers) -> None:
    path, _ = stored(tmp_path, "llmc")
    config = {"model_overrides": {}, "init_from": str(path), "num_iteration": 6}
    train(tiny(**config, output=str(tmp_path / "whole"), save_every=3))
    whole = numbers(tmp_path / "whole" / "log.jsonl")
    train(tiny(**config, output=str(tmp_path / "part"), load=str(tmp_path / "whole" / "checkpoint_step_000003")))
    assert numbers(tmp_path / "part" / "log.jsonl") == whole[3:]


def test_weights_of_another_size_or_too_few_positions_are_refused(tmp_path: Path, tiny: Make) -> None:
    path, _ = stored(tmp_path, "llmc")
    with pytest.raises(
        ValueError, match=r"model is gpt2, but init_from is .* another model \(n_layer: 12 -> 4; n_head: 12 -> 4"
    ):
        train(tiny(model="gpt2", model_overrides={}, init_from=str(path)))
    with pytest.raises(ValueError, match="have learned 1024 positions; it must be at most that"):
        train(tiny(model_overrides={}, init_from=str(path), sequence_length=1025))
    with pytest.raises((ValueError, OSError), match="nowhere"):
        train(tiny(model_overrides={}, init_from=str(tmp_path / "nowhere")))
