"""Every kind of damage to a Hugging Face directory is told with the file and the tensor."""

import json

import pytest
import safetensors.torch
import torch

from tileflash.weights import load_into, load_weights, save_huggingface


@pytest.fixture
def directory(small, tmp_path):
    save_huggingface(small("llama3", tied=False), tmp_path)
    return tmp_path


@pytest.fixture
def sharded(small, tmp_path):
    save_huggingface(small("llama3", tied=False), tmp_path, max_shard_bytes=20_000)
    return tmp_path


def edit(directory, change):
    path = directory / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file(tensors, path)


def rejects(path, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_weights(path)
    assert "\n" not in str(caught.value)


Q = "model.layers.1.self_attn.q_proj.weight"


def test_missing_tensors(directory):
    edit(directory, lambda tensors: (tensors.pop(Q), tensors.pop("lm_head.weight")))
    rejects(directory, r"2 tensors are missing, the first is layers\.1\.self_attn\.q_proj\.weight")


def test_a_damaged_number_of_layers(directory):
    """Listing the tensors of two billion layers took all memory before the files were looked at."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 2**31 - 1}))
    rejects(directory, "config.json says 2147483647 layers, but there are .* tensors")


def test_surplus_tensor(directory):
    edit(directory, lambda tensors: tensors.update({"model.layers.1.self_attn.q_proj.bias": torch.zeros(32)}))
    rejects(
        directory, r"model\.safetensors: 1 tensors are not of this model, the first is .*1\.self_attn\.q_proj\.bias"
    )


def test_tensor_of_a_further_layer(directory):
    edit(directory, lambda tensors: tensors.update({"model.layers.3.mlp.up_proj.weight": torch.zeros(80, 32)}))
    rejects(directory, r"not of this model, the first is model\.layers\.3\.mlp\.up_proj\.weight")


def test_wrong_shape(directory, small):
    edit(directory, lambda tensors: tensors.update({Q: torch.zeros(32, 31)}))
    rejects(directory, rf"model\.safetensors: tensor {Q} is \[32, 31\]; it must be \[32, 32\]")
    model = small("llama3", tied=False, seed=3)
    before = model.embedding.weight.clone()
    with pytest.raises(ValueError, match="must be"):
        load_into(model, directory)
    assert torch.equal(model.embedding.weight, before)  # nothing was copied


def test_integer_tensor(directory):
    edit(directory, lambda tensors: tensors.update({Q: torch.zeros(32, 32, dtype=torch.int8)}))
    rejects(directory, rf"tensor {Q} is I8; it must be F32, BF16, F16 or F64")


def test_the_same_tensor_under_two_names(directory):
    edit(directory, lambda tensors: tensors.update({Q.removeprefix("model."): torch.zeros(32, 32)}))
    rejects(directory, "tensor .*q_proj.weight is also in")


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_file(directory, keep):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    rejects(directory, r"model\.safetensors: is damaged or no safetensors file")


def test_not_safetensors(directory):
    (directory / "model.safetensors").write_bytes(b"PK\x03\x04" * 1000)
    rejects(directory, r"model\.safetensors: is damaged or no safetensors file")


def test_missing_shard(sharded):
    sorted(sharded.glob("*.safetensors"))[1].unlink()
    rejects(sharded, r"model-00002-of-\d{5}\.safetensors: is missing; model\.safetensors\.index\.json names it")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {"a": 3}}', '{"weight_map": [1]}', "\xff"])
def test_damaged_index(sharded, text):
    (sharded / "model.safetensors.index.json").write_text(text, encoding="latin-1")
    rejects(sharded, r"index\.json: must be an object whose weight_map gives each tensor's file")


def test_index_that_lies(sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = sorted(sharded.glob("*.safetensors"))[0].name
    path.write_text(json.dumps(index))
    rejects(sharded, r"model-00001-of-\d{5}\.safetensors: has no tensor lm_head\.weight; .*index\.json says")


def test_index_that_leads_out_of_the_directory(sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = "../other/model.safetensors"
    path.write_text(json.dumps(index))
    rejects(sharded, r"names the file '\.\./other/model\.safetensors'; it must be in the same directory")


def test_no_weights_at_all(directory):
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(b"x")
    rejects(
        directory, r"has neither model\.safetensors nor model\.safetensors\.index\.json; weights must be safetensors"
    )


def test_not_a_model_directory(tmp_path):
    rejects(tmp_path, r"has no config\.json; it must be a Hugging Face model directory")


def test_a_file_of_the_directory_instead_of_the_directory(directory):
    rejects(directory / "model.safetensors", "is one file of a Hugging Face model; give its directory")
    rejects(directory / "config.json", "is one file of a Hugging Face model; give its directory")


def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_weights(tmp_path / "none.bin")
