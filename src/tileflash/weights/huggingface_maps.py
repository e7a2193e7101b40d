"""The tensors of Hugging Face's GPT-2 and LLaMA checkpoints, by name."""

from __future__ import annotations

from collections.abc import Iterator

from ..models import GPT2Config, Llama3Config, ModelConfig
from .tensor_map import TensorMap

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
HEAD_NAME = "lm_head.weight"
# What transformers puts before every name but the head's; checkpoints of the bare model lack it.
PREFIXES = {"gpt2": "transformer.", "llama3": "model."}


def huggingface_maps(config: ModelConfig) -> list[TensorMap]:
    """Every tensor of the checkpoint, by its name without the prefix `transformer.` or `model.`."""
    vocabulary = (config.vocab_size, config.n_embd)
    maps = list(_gpt2_maps(config)) if isinstance(config, GPT2Config) else list(_llama_maps(config))
    if not config.tied:
        maps.append(TensorMap(HEAD_NAME, "head.weight", vocabulary, 0, config.vocab_size))
    return maps


def _gpt2_maps(config: GPT2Config) -> Iterator[TensorMap]:
    width = config.n_embd
    yield TensorMap("wte.weight", "embedding.weight", (config.vocab_size, width), 0, config.vocab_size)
    yield TensorMap("wpe.weight", "positions", (config.max_sequence_length, width))
    linear = [
        ("attn.c_attn", "attention.qkv", width, 3 * width),
        ("attn.c_proj", "attention.output", width, width),
        ("mlp.c_fc", "mlp.up", width, 4 * width),
        ("mlp.c_proj", "mlp.down", 4 * width, width),
    ]
    for i in range(config.n_layer):
        for theirs, ours in (("ln_1", "attention_norm"), ("ln_2", "mlp_norm")):
            yield TensorMap(f"h.{i}.{theirs}.weight", f"layers.{i}.{ours}.weight", (width,))
            yield TensorMap(f"h.{i}.{theirs}.bias", f"layers.{i}.{ours}.bias", (width,))
        for theirs, ours, inputs, outputs in linear:
            shape = (inputs, outputs)
            yield TensorMap(f"h.{i}.{theirs}.weight", f"layers.{i}.{ours}.weight", shape, transposed=True)
            yield TensorMap(f"h.{i}.{theirs}.bias", f"layers.{i}.{ours}.bias", (outputs,))
    yield TensorMap("ln_f.weight", "norm.weight", (width,))
    yield TensorMap("ln_f.bias", "norm.bias", (width,))


def _llama_maps(config: Llama3Config) -> Iterator[TensorMap]:
    width, inner = config.n_embd, config.intermediate_size
    rows, kv_rows = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
    qkv = [("q", 0, rows), ("k", rows, rows + kv_rows), ("v", rows + kv_rows, rows + 2 * kv_rows)]
    yield TensorMap("embed_tokens.weight", "embedding.weight", (config.vocab_size, width), 0, config.vocab_size)
    for i in range(config.n_layer):
        theirs, ours = f"layers.{i}", f"layers.{i}"
        yield TensorMap(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm.weight", (width,))
        for name, start, stop in qkv:
            shape = (stop - start, width)
            stored = f"{theirs}.self_attn.{name}_proj.weight"
            yield TensorMap(stored, f"{ours}.attention.qkv.weight", shape, start, stop)
        yield TensorMap(f"{theirs}.self_attn.o_proj.weight", f"{ours}.attention.output.weight", (width, rows))
        yield TensorMap(f"{theirs}.post_attention_layernorm.weight", f"{ours}.mlp_norm.weight", (width,))
        yield TensorMap(f"{theirs}.mlp.gate_proj.weight", f"{ours}.mlp.gate.weight", (inner, width))
        yield TensorMap(f"{theirs}.mlp.up_proj.weight", f"{ours}.mlp.up.weight", (inner, width))
        yield TensorMap(f"{theirs}.mlp.down_proj.weight", f"{ours}.mlp.down.weight", (width, inner))
    yield TensorMap("norm.weight", "norm.weight", (width,))
