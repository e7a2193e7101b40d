"""A trained model leaves as what transformers and llm.c read, with the bits it was trained to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tileflash.cli import app
from tileflash.train import TrainConfig, train
from tileflash.train.export import load_trained
from tileflash.weights import load_weights

Make = Callable[..., TrainConfig]


def convert(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["weights", "convert", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("model", ["gpt2-tiny", "llama3-tiny"])
@pytest.mark.parametrize(("kind", "name"), [("huggingface", "exported"), ("llmc", "exported.bin")])
def test_what_was_trained_is_what_comes_out(tmp_path: Path, tiny: Make, model: str, kind: str, name: str) -> None:
    run = tmp_path / "run"
    train(tiny(model=model, model_overrides={}, num_iteration=4, save_every=2, output=str(run)))
    output = convert(run, tmp_path / name, "--to", kind)
    assert "checkpoint_step_000004" in output
    trained, _ = load_trained(run, print)
    exported = dict(load_weights(tmp_path / name).named_parameters())
    for parameter_name, parameter in trained.named_parameters():
        assert torch.equal(parameter, exported[parameter_name]), parameter_name
    convert(run / "checkpoint_step_000002", tmp_path / f"earlier-{name}", "--to", kind)
    earlier = dict(load_weights(tmp_path / f"earlier-{name}").named_parameters())
    assert any(not torch.equal(parameter, exported[key]) for key, parameter in earlier.items())


def test_overrides_of_the_run_are_kept(tmp_path: Path, tiny: Make) -> None:
    overrides = {"n_layer": 1, "n_embd": 32, "n_head": 2}
    train(tiny(model="gpt2-tiny", model_overrides=overrides, num_iteration=1, output=str(tmp_path / "run")))
    convert(tmp_path / "run", tmp_path / "exported", "--to", "huggingface", "--dtype", "bfloat16")
    model = load_weights(tmp_path / "exported")
    assert (model.config.n_layer, model.config.n_embd, model.config.n_head) == (1, 32, 2)


def test_a_damaged_checkpoint_is_passed_over_and_said(tmp_path: Path, tiny: Make) -> None:
    run = tmp_path / "run"
    train(tiny(model_overrides={}, num_iteration=4, save_every=2, output=str(run)))
    next((run / "checkpoint_step_000004").rglob("*.distcp")).write_bytes(b"torn")
    output = convert(run, tmp_path / "exported", "--to", "huggingface")
    assert "not a complete checkpoint" in output
    assert "taking" in output
    assert "checkpoint_step_000002" in output.split("taking")[1]
