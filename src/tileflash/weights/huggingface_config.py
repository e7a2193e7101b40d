"""config.json of Hugging Face's GPT-2 and LLaMA, in and out.

A key that tileflash does not honour is an error, unless it is known to leave the logits alone: a model that loads and
computes something else is worse than one that does not load.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..models import GPT2Config, Llama3Config, ModelConfig, RopeScaling

CONFIG_NAME = "config.json"

# Keys that say how a model was made, is trained, sampled from or stored, not what it computes.
# fmt: off
_NEUTRAL = frozenset({
    "_attn_implementation_autoset", "_name_or_path", "architectures", "attention_dropout", "attn_pdrop",
    "bos_token_id", "chunk_size_feed_forward", "dtype", "embd_pdrop", "eos_token_id", "finetuning_task",
    "gradient_checkpointing", "id2label", "initializer_range", "is_decoder", "label2id", "model_type", "n_ctx",
    "name_or_path", "output_attentions", "output_hidden_states", "output_past", "pad_token_id", "prefix",
    "pretraining_tp", "problem_type", "reorder_and_upcast_attn", "resid_pdrop", "return_dict",
    "return_dict_in_generate", "sep_token_id", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params", "tf_legacy_loss",
    "tokenizer_class", "torch_dtype", "torchscript", "transformers_version", "use_bfloat16", "use_cache",
})
# fmt: on
# Keys that change what a model computes, with the values under which it computes what ours does.
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "cross_attention_hidden_size": (None,),
    "is_encoder_decoder": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "pruned_heads": ({}, None),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
}
# fmt: off
_ROPE_KEYS = frozenset({
    "factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings", "partial_rotary_factor",
    "rope_theta", "rope_type", "type",
})
# fmt: on
_ABSENT = object()


class _Fields:
    """The keys of a config.json, taken one by one; what is left at the end must be neutral."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)

    def take(self, name: str, default: Any = _ABSENT) -> Any:
        value = self.values.pop(name, default)
        if value is _ABSENT:
            raise ValueError(f"{name} is missing; it must be given")
        return value

    def require(self, name: str, allowed: tuple[Any, ...]) -> None:
        value = self.values.pop(name, allowed[0])
        if value not in allowed:
            choices = " or ".join(repr(choice) for choice in allowed)
            raise ValueError(f"{name} is {value!r}, which tileflash does not support; it must be {choices}")

    def finish(self) -> None:
        for name, allowed in _REQUIRED.items():
            self.require(name, allowed)
        unknown = sorted(set(self.values) - _NEUTRAL)
        if unknown:
            raise ValueError(
                f"unknown key {', '.join(unknown)}: it may change what the model computes; "
                "remove it from the file if you know that it does not"
            )


def read_config(directory: Path) -> ModelConfig:
    """The configuration in DIRECTORY/config.json.

    Raises ValueError naming the file and the key for anything that is missing, unknown or not supported.
    """
    path = directory / CONFIG_NAME
    if not path.is_file():
        raise ValueError(f"{directory}: has no {CONFIG_NAME}; it must be a Hugging Face model directory")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("it must be a JSON object")
        return config_from_values(values)
    except ValueError as error:  # json's and Unicode's own errors are ValueErrors too
        raise ValueError(f"{path}: {error}") from error


def config_from_values(values: Mapping[str, Any]) -> ModelConfig:
    """As `read_config`, from the parsed JSON object."""
    kind = values.get("model_type")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"model_type is {kind!r}; it must be 'gpt2' or 'llama'")
    fields = _Fields(values)
    config = _gpt2(fields) if kind == "gpt2" else _llama(fields)
    fields.finish()
    return config


def _gpt2(fields: _Fields) -> GPT2Config:
    config = GPT2Config(
        vocab_size=fields.take("vocab_size", 50257),
        max_sequence_length=fields.take("n_positions", 1024),
        n_layer=fields.take("n_layer", 12),
        n_head=fields.take("n_head", 12),
        n_embd=fields.take("n_embd", 768),
        norm_epsilon=fields.take("layer_norm_epsilon", 1e-5),
        tied=fields.take("tie_word_embeddings", True),
    )
    fields.require("n_inner", (None, 4 * config.n_embd))
    fields.require("activation_function", ("gelu_new", "gelu_pytorch_tanh"))
    return config


def _llama(fields: _Fields) -> Llama3Config:
    n_head = fields.take("num_attention_heads")
    n_kv_head = fields.take("num_key_value_heads", None)
    max_sequence_length = fields.take("max_position_embeddings", 2048)
    theta, scaling = _rope(fields, max_sequence_length)
    config = Llama3Config(
        vocab_size=fields.take("vocab_size"),
        max_sequence_length=max_sequence_length,
        n_layer=fields.take("num_hidden_layers"),
        n_head=n_head,
        n_kv_head=n_head if n_kv_head is None else n_kv_head,
        n_embd=fields.take("hidden_size"),
        intermediate_size=fields.take("intermediate_size"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_epsilon=fields.take("rms_norm_eps", 1e-6),
        tied=fields.take("tie_word_embeddings", False),
    )
    fields.require("head_dim", (config.head_dim, None))
    fields.require("hidden_act", ("silu", "swish"))
    return config


def _rope(fields: _Fields, max_sequence_length: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling from `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling` (before)."""
    outer_theta = fields.take("rope_theta", 10_000.0)
    found = [
        _rope_parameters(name, given, outer_theta, max_sequence_length)
        for name in ("rope_parameters", "rope_scaling")
        if (given := fields.take(name, None))
    ]
    if len(found) == 2 and found[0] != found[1]:
        raise ValueError(f"rope_parameters mean {found[0]}, rope_scaling {found[1]}; they must mean the same")
    return found[0] if found else (outer_theta, None)


def _rope_parameters(
    name: str, given: Any, outer_theta: float, max_sequence_length: int
) -> tuple[float, RopeScaling | None]:
    if not isinstance(given, dict):
        raise ValueError(f"{name} is {given!r}; it must be an object")
    unknown = sorted(set(given) - _ROPE_KEYS)
    if unknown:
        raise ValueError(f"{name} has an unknown key {', '.join(unknown)}; it may have {', '.join(sorted(_ROPE_KEYS))}")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{name}.partial_rotary_factor is {given['partial_rotary_factor']!r}; it must be 1.0")
    kind = given.get("rope_type", given.get("type", "default"))
    theta = given.get("rope_theta", outer_theta)
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"{name}.rope_type is {kind!r}; tileflash supports only default and llama3")
    missing = [key for key in ("factor", "low_freq_factor", "high_freq_factor") if key not in given]
    if missing:
        raise ValueError(f"{name}.{missing[0]} is missing; rope type llama3 must have it")
    return theta, RopeScaling(
        factor=given["factor"],
        low_frequency_factor=given["low_freq_factor"],
        high_frequency_factor=given["high_freq_factor"],
        original_max_sequence_length=given.get("original_max_position_embeddings", max_sequence_length),
    )


def values_from_config(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The JSON object that transformers, version 4 or 5, reads as this configuration."""
    name = str(dtype).removeprefix("torch.")
    common = {
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied,
        "initializer_range": 0.02,
        "torch_dtype": name,
        "dtype": name,
        "use_cache": True,
    }
    return common | (_gpt2_values(config) if isinstance(config, GPT2Config) else _llama_values(config))


def _gpt2_values(config: GPT2Config) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "n_positions": config.max_sequence_length,
        "n_ctx": config.max_sequence_length,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
        "layer_norm_epsilon": config.norm_epsilon,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "bos_token_id": config.vocab_size - 1,  # the end of text, in GPT-2's tokenizer and in the bytes tokenizer
        "eos_token_id": config.vocab_size - 1,
    }


def _llama_values(config: Llama3Config) -> dict[str, Any]:
    scaling = config.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_max_sequence_length,
        }
    meta = config.vocab_size == 128256  # Meta's tokenizer: begin and end of text
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.n_embd,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_kv_head,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_sequence_length,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else rope,
        "rope_parameters": rope | {"rope_theta": config.rope_theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "bos_token_id": 128000 if meta else config.vocab_size - 1,
        "eos_token_id": 128001 if meta else config.vocab_size - 1,
    }
