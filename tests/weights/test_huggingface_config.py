"""config.json: what is honoured, and that everything else is refused."""

import json

import pytest
import torch

from tileflash.models import PRESETS, RopeScaling, model_config
from tileflash.weights.huggingface_config import config_from_values, read_config, values_from_config

# config.json of openai-community/gpt2 as published.
GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
# config.json of meta-llama/Llama-3.2-1B as published (transformers 4: rope_theta and rope_scaling apart).
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
NEW_ROPE = LLAMA["rope_scaling"] | {"rope_theta": 500000.0}


def without(values, *names):
    return {name: value for name, value in values.items() if name not in names}


def test_published_configurations_are_the_presets():
    assert config_from_values(GPT2) == PRESETS["gpt2"]
    assert config_from_values(LLAMA) == PRESETS["llama3-1b"]


def test_the_new_form_of_rope_means_the_same_as_the_old():
    new = without(LLAMA, "rope_scaling", "rope_theta") | {"rope_parameters": NEW_ROPE}
    assert config_from_values(new) == config_from_values(LLAMA)
    assert config_from_values(LLAMA | {"rope_parameters": NEW_ROPE}) == config_from_values(LLAMA)
    with pytest.raises(ValueError, match=r"rope_parameters mean .* rope_scaling .*; they must mean the same"):
        config_from_values(LLAMA | {"rope_parameters": NEW_ROPE | {"factor": 8.0}})


def test_rope_details():
    assert config_from_values(LLAMA | {"rope_scaling": None}).rope_scaling is None
    plain = without(LLAMA, "rope_scaling", "rope_theta")
    assert config_from_values(plain).rope_theta == 10000.0  # transformers' default
    assert config_from_values(plain | {"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}).rope_theta == 7
    old = without(LLAMA["rope_scaling"], "rope_type", "original_max_position_embeddings") | {"type": "llama3"}
    got = config_from_values(LLAMA | {"rope_scaling": old})
    assert got.rope_scaling == RopeScaling(32.0, 1.0, 4.0, 131072)  # transformers' rule: the model's own length


def test_defaults_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    gpt2 = transformers.GPT2Config()
    assert config_from_values({"model_type": "gpt2"}) == config_from_values(without(gpt2.to_dict()))
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    given = {"model_type": "llama"} | {name: LLAMA[name] for name in sizes}
    theirs = transformers.LlamaConfig(**{name: LLAMA[name] for name in sizes})
    assert config_from_values(given) == config_from_values(theirs.to_dict())


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("tied", [True, False])
def test_written_values_are_read_back_by_us_and_by_transformers(name, tied):
    transformers = pytest.importorskip("transformers")
    config = model_config(name, tied=tied, norm_epsilon=3e-6)
    values = json.loads(json.dumps(values_from_config(config, torch.bfloat16)))
    assert config_from_values(values) == config
    kind = transformers.GPT2Config if config.family == "gpt2" else transformers.LlamaConfig
    theirs = kind.from_dict(values).to_dict()
    assert config_from_values(theirs) == config


@pytest.mark.parametrize("rope_theta", [10000.0, 500000.0])
def test_plain_rope_is_written_for_both_versions_of_transformers(rope_theta):
    config = model_config("llama3-8b", rope_scaling=None, rope_theta=rope_theta)
    values = values_from_config(config, torch.float32)
    assert config_from_values(values) == config
    assert config_from_values(without(values, "rope_parameters")) == config
    assert config_from_values(without(values, "rope_theta", "rope_scaling")) == config


@pytest.mark.parametrize(
    ("values", "changes", "message"),
    [
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        (GPT2, {"scale_attn_weights": False}, "scale_attn_weights is False.*it must be True"),
        (GPT2, {"activation_function": "relu"}, "activation_function is 'relu'.*'gelu_new' or 'gelu_pytorch_tanh'"),
        (GPT2, {"activation_function": "gelu"}, "activation_function is 'gelu'"),
        (GPT2, {"n_inner": 100}, "n_inner is 100.*it must be None or 3072"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention is True"),
        (GPT2, {"pruned_heads": {"0": [1]}}, "pruned_heads is"),
        (GPT2, {"quantization_config": {"bits": 4}}, "unknown key quantization_config"),
        (GPT2, {"n_layer": "12"}, "n_layer is '12'; it must be a positive integer"),
        (LLAMA, {"attention_bias": True}, "attention_bias is True"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias is True"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (LLAMA, {"head_dim": 128}, "head_dim is 128.*it must be 64"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (LLAMA, {"sliding_window": 4096}, "unknown key sliding_window"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type is 'yarn'"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_scaling.rope_type is 'linear'"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "rope_scaling.low_freq_factor is missing"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3", "mscale": 1}}, "rope_scaling has an unknown key mscale"),
        (LLAMA, {"rope_scaling": 4.0}, "rope_scaling is 4.0; it must be an object"),
        (LLAMA, {"rope_parameters": NEW_ROPE | {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor is 0\.5"),
        (LLAMA, {"num_key_value_heads": 5}, "n_head is 32; it must be a multiple of n_kv_head, 5"),
        (LLAMA, {"model_type": "mistral"}, "model_type is 'mistral'; it must be 'gpt2' or 'llama'"),
    ],
)
def test_what_would_change_the_logits_is_refused(values, changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_values(values | changes)


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match="hidden_size is missing"):
        config_from_values(without(LLAMA, "hidden_size"))


@pytest.mark.parametrize("text", ["{", "[1]", "\xff\xfe", '{"model_type": "bert"}'])
def test_errors_name_the_file(text, tmp_path):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"config\.json: "):
        read_config(tmp_path)
