"""Hugging Face directories: round trips, transformers as reader and as writer, shards, replacement."""

import json
import os

import pytest
import safetensors.torch
import torch

from tileflash.models import build_model
from tileflash.weights import config_from_path, load_into, load_weights, save_huggingface
from tileflash.weights.tensor_map import TensorMap

FAMILIES = [("gpt2", True), ("gpt2", False), ("llama3", True), ("llama3", False)]


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_export_then_import_is_bit_equal(family, tied, max_shard_bytes, small, bit_equal, tmp_path):
    model = small(family, tied=tied)
    save_huggingface(model, tmp_path, max_shard_bytes=max_shard_bytes)
    assert (tmp_path / "model.safetensors").exists() == (max_shard_bytes == 10**9)
    bit_equal(load_weights(tmp_path), model)
    assert config_from_path(tmp_path) == model.config
    into = build_model(model.config, seed=9)
    load_into(into, tmp_path)
    bit_equal(into, model)


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_bfloat16_is_kept(family, tied, small, bit_equal, tmp_path):
    model = small(family, tied=tied).bfloat16()
    save_huggingface(model, tmp_path)
    bit_equal(load_weights(tmp_path, dtype=torch.bfloat16), model)
    bit_equal(load_weights(tmp_path), model.float())


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
@torch.no_grad()
def test_transformers_reads_what_we_write(family, tied, max_shard_bytes, small, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = small(family, tied=tied)
    save_huggingface(model, tmp_path, max_shard_bytes=max_shard_bytes)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokens = torch.randint(0, 131, (2, 20), generator=torch.Generator().manual_seed(0))
    assert (theirs.eval()(tokens).logits - model.double()(tokens)).abs().max() < 1e-9


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
def test_we_read_what_transformers_writes_back(family, tied, max_shard_size, small, bit_equal, tmp_path):
    """Ours -> transformers -> ours, to the last bit, through transformers' own save_pretrained."""
    transformers = pytest.importorskip("transformers")
    model = small(family, tied=tied)
    save_huggingface(model, tmp_path / "ours")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=max_shard_size)
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists() == (max_shard_size == "20KB")
    bit_equal(load_weights(tmp_path / "theirs"), model)


@pytest.mark.parametrize("family", ["gpt2", "llama3"])
def test_names_without_prefix_and_old_constants(family, small, bit_equal, tmp_path):
    """As openai-community/gpt2 has it: no `transformer.`, and the causal masks stored among the weights."""
    model = small(family)
    save_huggingface(model, tmp_path)
    path = tmp_path / "model.safetensors"
    prefix, constants = {
        "gpt2": ("transformer.", {"h.0.attn.bias": torch.ones(1, 1, 24, 24), "h.1.attn.masked_bias": torch.ones(())}),
        "llama3": ("model.", {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
    }[family]
    tensors = {name.removeprefix(prefix): value for name, value in safetensors.torch.load_file(path).items()}
    safetensors.torch.save_file(tensors | constants, path)
    bit_equal(load_weights(tmp_path), model)


def test_a_tied_head_that_is_stored_too_must_be_the_embedding(small, bit_equal, tmp_path):
    model = small("gpt2")
    save_huggingface(model, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    safetensors.torch.save_file(tensors, path)
    bit_equal(load_weights(tmp_path), model)
    tensors["lm_head.weight"][5, 5] += 1
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(ValueError, match=r"model\.safetensors: lm_head\.weight differs from wte\.weight"):
        load_weights(tmp_path)


def test_no_shard_is_larger_than_asked_and_the_index_adds_up(small, tmp_path):
    save_huggingface(small("llama3"), tmp_path, max_shard_bytes=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    total = 0
    for path in tmp_path.glob("*.safetensors"):
        tensors = safetensors.torch.load_file(path)
        sizes = [tensor.nbytes for tensor in tensors.values()]
        assert sum(sizes) <= 20_000 or len(sizes) == 1
        assert {index["weight_map"][name] for name in tensors} == {path.name}
        total += sum(sizes)
    assert index["metadata"]["total_size"] == total
    with pytest.raises(ValueError, match="max_shard_bytes is 0"):
        save_huggingface(small("llama3"), tmp_path, max_shard_bytes=0)


@pytest.mark.parametrize(("first", "second"), [(20_000, 10**9), (10**9, 20_000), (20_000, 30_000)])
def test_a_second_save_replaces_the_first_whole(first, second, small, bit_equal, tmp_path):
    save_huggingface(small("gpt2", seed=1), tmp_path, max_shard_bytes=first)
    (tmp_path / "tokenizer.json").write_text("{}")
    model = small("gpt2", seed=2)
    save_huggingface(model, tmp_path, max_shard_bytes=second)
    bit_equal(load_weights(tmp_path), model)
    save_huggingface(model, tmp_path / "fresh", max_shard_bytes=second)
    fresh = {path.name for path in (tmp_path / "fresh").iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == fresh | {"fresh", "tokenizer.json"}


def test_a_save_that_fails_leaves_the_old_model(small, bit_equal, tmp_path, monkeypatch):
    model = small("gpt2", seed=1)
    save_huggingface(model, tmp_path)
    original = TensorMap.to_file

    def fail(self, parameter, dtype):
        if self.name == "ln_f.bias":
            raise OSError(28, "No space left on device")
        return original(self, parameter, dtype)

    monkeypatch.setattr(TensorMap, "to_file", fail)
    with pytest.raises(OSError, match="No space left"):
        save_huggingface(small("gpt2", seed=2), tmp_path, max_shard_bytes=20_000)
    bit_equal(load_weights(tmp_path), model)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("renames", [0, 1, 3])
def test_a_kill_between_two_renames_never_leaves_a_mixture_that_loads(renames, small, tmp_path, monkeypatch):
    save_huggingface(small("gpt2", seed=1), tmp_path, max_shard_bytes=20_000)
    original, calls = os.replace, []

    def die(source, destination):
        calls.append(destination)
        if len(calls) > renames:
            raise KeyboardInterrupt
        original(source, destination)

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        save_huggingface(small("gpt2", seed=2), tmp_path, max_shard_bytes=20_000)
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load_weights(tmp_path)


def test_more_positions_keep_their_own_values_and_fewer_take_the_first(small, tmp_path):
    model = small("gpt2")
    save_huggingface(model, tmp_path)
    longer, shorter = small("gpt2", seed=5, max_sequence_length=40), small("gpt2", seed=5, max_sequence_length=10)
    own = longer.positions[24:].clone()
    load_into(longer, tmp_path)
    load_into(shorter, tmp_path)
    assert torch.equal(longer.positions[:24], model.positions)
    assert torch.equal(longer.positions[24:], own)
    assert torch.equal(shorter.positions, model.positions[:10])
    tokens = torch.randint(0, 131, (1, 10))
    assert torch.equal(shorter(tokens), model(tokens))
    assert longer(torch.zeros(1, 40, dtype=torch.int64)).shape == (1, 40, 131)


def test_padding_rows_are_zero_after_a_load(small, tmp_path):
    save_huggingface(small("llama3", tied=False), tmp_path)
    model = small("llama3", tied=False, vocab_multiple=64)
    with torch.no_grad():
        model.embedding.weight[131:] = 7.0
    load_into(model, tmp_path)
    assert model.embedding.weight.shape[0] == 192
    assert (model.embedding.weight[131:] == 0).all()
    assert (model.head.weight[131:] == 0).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_layer": 2}, "n_layer is 3, the model has 2"),
        ({"rope_theta": 1e4}, "rope_theta is 500000.0, the model has 10000.0"),
        ({"rope_scaling": None}, "rope_scaling is RopeScaling.*, the model has None"),
        ({"norm_epsilon": 1e-6}, "norm_epsilon is 1e-05, the model has 1e-06"),
        ({"tied": False}, "tied is True, the model has False"),
        ({"vocab_size": 100}, "vocab_size is 131, the model has 100"),
    ],
)
def test_a_model_that_means_something_else_is_not_filled(fields, message, small, tmp_path):
    save_huggingface(small("llama3"), tmp_path)
    model = small("llama3", seed=4, **fields)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_into(model, tmp_path)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="holds a llama3 model; the model to fill is gpt2"):
        load_into(small("gpt2"), tmp_path)
