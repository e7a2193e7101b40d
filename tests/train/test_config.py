"""Settings: what is wrong is refused with its name, value and what it must be."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tileflash.train import TrainConfig
from tileflash.train.config import load_toml, parse_override


def test_a_step_is_one_batch_unless_told_otherwise() -> None:
    config = TrainConfig(model="gpt2", batch_size=4, sequence_length=64)
    assert (config.step_tokens, config.micro_batches, config.step_samples) == (256, 1, 4)
    config = TrainConfig(model="gpt2", batch_size=4, sequence_length=64, total_batch_size=1024)
    assert (config.step_tokens, config.micro_batches, config.step_samples) == (1024, 4, 16)
    assert config.as_dict()["total_batch_size"] == 1024


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"total_batch_size": 300}, r"total_batch_size is 300 .* 4 \* 64 = 256 \(for example 512\)"),
        ({"total_batch_size": 128}, "must be a multiple"),
        ({"batch_size": 0}, "batch_size is 0: it must be at least 1"),
        ({"batch_size": True}, "batch_size is True: it must be int"),
        ({"batch_size": "4"}, "batch_size is '4': it must be int"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0: it must be positive"),
        ({"learning_rate": float("nan")}, "learning_rate is nan: it must be finite"),
        ({"learning_rate": -1}, "learning_rate is -1"),
        ({"final_learning_rate_fraction": 1.5}, "at most 1"),
        ({"dtype": "float16"}, 'dtype is "float16": it must be one of auto, float32, bfloat16'),
        ({"flash": 1}, "flash is 1: it must be bool"),
        ({"output": 3}, "output is 3: it must be str or nothing"),
        ({"resume": True}, "output must name the directory"),
        ({"resume": True, "output": "o", "load": "p"}, "give one of them"),
        ({"save_every": 5}, "save_every is 5 and output is not set"),
        ({"init_from": "w", "model_overrides": {"n_layer": 1}}, "give one of them"),
        ({"tokenizer": "llama3"}, "tokenizer_path"),
        ({"seed": 2**64}, "seed is 18446744073709551616: it must be at most"),
        ({"attention_backend": "tiled"}, 'attention_backend is "tiled" and flash is off'),
    ],
)
def test_bad_settings_are_refused(settings: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        TrainConfig(model="gpt2", **settings)


def test_it_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig(model="gpt2").batch_size = 8  # type: ignore[misc]


def test_toml_has_the_same_keys_with_dashes_or_underscores(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('model = "gpt2-tiny"\nbatch-size = 8\nlearning_rate = 1\nmodel_overrides = { n_layer = 2 }\n')
    config = TrainConfig(**load_toml(path))
    assert (config.batch_size, config.learning_rate, config.model_overrides) == (8, 1, {"n_layer": 2})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('model = "gpt2"\nbatchsize = 8\n', r'run.toml has unknown keys: "batchsize" \(did you mean "batch_size"\?\)'),
        ('model = "gpt2"\nzzz = 8\n', 'unknown keys: "zzz"; there are: model, '),
        ("batch_size = 8\n", 'no key "model"'),
        ("model = \n", "no valid TOML"),
    ],
)
def test_bad_toml_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=told):
        load_toml(path)


def test_model_overrides_are_written_as_in_toml() -> None:
    assert parse_override("n_layer=2") == ("n_layer", 2)
    assert parse_override("tied=false") == ("tied", False)
    assert parse_override("rope_scaling={factor = 8.0}") == ("rope_scaling", {"factor": 8.0})
    with pytest.raises(ValueError, match="FIELD=VALUE"):
        parse_override("n_layer")


def test_every_setting_has_a_help_text() -> None:
    for setting in dataclasses.fields(TrainConfig):
        assert setting.name == "model" or setting.metadata["help"], setting.name


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"run\.toml is no valid TOML: .*utf-8"):
        load_toml(tmp_path / "run.toml")
