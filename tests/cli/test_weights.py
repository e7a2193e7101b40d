"""`tileflash weights`."""

import json

import pytest
import torch
from typer.testing import CliRunner

from tileflash.cli import app
from tileflash.models import build_model, model_config
from tileflash.weights import load_weights, save_huggingface, save_llmc


def run(*arguments):
    result = CliRunner().invoke(app, ["weights", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture(params=["gpt2", "llama3"])
def model(request):
    return build_model(model_config(f"{request.param}-tiny", n_layer=1), seed=0)


def equal(one, other):
    return one.config == other.config and all(
        torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items()
    )


def test_there_and_back(model, tmp_path):
    save_huggingface(model, tmp_path / "hf")
    there = run("convert", tmp_path / "hf", tmp_path / "m.bin", "--to", "llmc")
    assert there.exit_code == 0
    assert "m.bin (llmc, float32)" in there.stdout
    assert run("convert", tmp_path / "m.bin", tmp_path / "back", "--to", "huggingface").exit_code == 0
    assert equal(load_weights(tmp_path / "back"), model)


def test_dtype_is_the_sources_unless_asked(model, tmp_path):
    save_llmc(model, tmp_path / "m.bin", torch.bfloat16)
    assert run("convert", tmp_path / "m.bin", tmp_path / "kept", "--to", "huggingface").exit_code == 0
    assert json.loads((tmp_path / "kept" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    wide = run("convert", tmp_path / "m.bin", tmp_path / "wide", "--to", "huggingface", "--dtype", "float32")
    assert wide.exit_code == 0
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["torch_dtype"] == "float32"
    assert equal(load_weights(tmp_path / "kept"), load_weights(tmp_path / "wide"))


def test_shards(model, tmp_path):
    save_llmc(model, tmp_path / "m.bin")
    result = run("convert", tmp_path / "m.bin", tmp_path / "hf", "--to", "huggingface", "--max-shard-bytes", 200_000)
    assert result.exit_code == 0
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists()
    assert equal(load_weights(tmp_path / "hf"), model)


def test_show(model, tmp_path):
    save_huggingface(model, tmp_path)
    shown = dict(line.split(None, 1) for line in run("show", tmp_path).stdout.splitlines())
    assert shown["format"] == "huggingface"
    assert shown["dtype"] == "float32"
    assert shown["family"] == model.config.family
    assert shown["n_layer"] == "1"
    assert int(shown["parameters"].replace(",", "")) > 100_000


def test_bad_input_is_one_line_and_status_2(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"\0" * 2000)
    for source in (tmp_path / "x.bin", tmp_path / "none.bin", tmp_path):
        result = run("convert", source, tmp_path / "out", "--to", "huggingface")
        assert result.exit_code == 2
        assert str(source) in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
        assert run("show", source).exit_code == 2
    assert not (tmp_path / "out").exists()


def test_what_the_format_cannot_hold_is_told(tmp_path):
    save_huggingface(build_model(model_config("gpt2-tiny", n_layer=1, tied=False), seed=0), tmp_path / "hf")
    result = run("convert", tmp_path / "hf", tmp_path / "m.bin", "--to", "llmc")
    assert result.exit_code == 2
    assert "tied is False; llm.c's header cannot hold it" in result.stderr


@pytest.mark.parametrize("to", ["llmc", "huggingface"])
def test_what_is_there_is_replaced_only_when_asked(to, tmp_path):
    kept, new = (build_model(model_config("gpt2-tiny", n_layer=1), seed=seed) for seed in (0, 1))
    save_llmc(new, tmp_path / "new.bin")
    there = tmp_path / "there"
    if to == "llmc":
        save_llmc(kept, there)
    else:
        save_huggingface(kept, there, max_shard_bytes=200_000)
    arguments = ("convert", tmp_path / "new.bin", there, "--to", to)
    refused = run(*arguments)
    assert refused.exit_code == 2
    assert len(refused.stderr.strip().splitlines()) == 1
    assert "there already " in refused.stderr
    assert "choose another name, or pass `--overwrite`" in refused.stderr
    assert equal(load_weights(there), kept)
    assert run(*arguments, "--overwrite").exit_code == 0
    assert equal(load_weights(there), new)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model-00001-of-00002.safetensors"])
def test_half_of_a_model_is_not_replaced_either(name, model, tmp_path):
    save_llmc(model, tmp_path / "m.bin")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / name).write_text("{}")
    refused = run("convert", tmp_path / "m.bin", tmp_path / "hf", "--to", "huggingface")
    assert refused.exit_code == 2
    assert f"hf already holds {name}; " in refused.stderr
    assert (tmp_path / "hf" / name).read_text() == "{}"


def test_other_files_in_the_directory_are_no_obstacle_and_stay(model, tmp_path):
    save_llmc(model, tmp_path / "m.bin")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "README.md").write_text("mine")
    assert run("convert", tmp_path / "m.bin", tmp_path / "hf", "--to", "huggingface").exit_code == 0
    assert (tmp_path / "hf" / "README.md").read_text() == "mine"


def test_weights_may_be_converted_in_place_when_asked(model, tmp_path):
    """The source is the destination: it is read whole before it is replaced."""
    save_llmc(model, tmp_path / "m.bin")
    arguments = ("convert", tmp_path / "m.bin", tmp_path / "m.bin", "--to", "llmc", "--dtype", "bfloat16")
    assert run(*arguments).exit_code == 2
    assert equal(load_weights(tmp_path / "m.bin"), model)
    assert run(*arguments, "--overwrite").exit_code == 0
    assert "bfloat16" in run("show", tmp_path / "m.bin").stdout


@pytest.mark.parametrize("more", [[], ["--overwrite"]])
def test_a_destination_of_the_other_kind_is_told(more, model, tmp_path):
    save_llmc(model, tmp_path / "m.bin")
    (tmp_path / "directory").mkdir()
    for destination, to, told in (("directory", "llmc", "is a directory"), ("m.bin", "huggingface", "is a file")):
        result = run("convert", tmp_path / "m.bin", tmp_path / destination, "--to", to, *more)
        assert result.exit_code == 2
        assert f"{destination} {told}; --to {to} must have the name of" in result.stderr
    assert equal(load_weights(tmp_path / "m.bin"), model)
