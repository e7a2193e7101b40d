"""Whole models by name: the trainer's presets, and the shapes of models that published tables are about."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tileflash.models import PRESETS, GPT2Config, Llama3Config, ModelConfig


def _llama2(n_layer: int, n_embd: int, intermediate_size: int, n_head: int, n_kv_head: int) -> Llama3Config:
    """LLaMA 2 (Touvron et al., 2023, arXiv:2307.09288): LLaMA-3's layers with another vocabulary and rotary base."""
    return Llama3Config(
        vocab_size=32000, max_sequence_length=32768, n_layer=n_layer, n_head=n_head, n_kv_head=n_kv_head, n_embd=n_embd,
        intermediate_size=intermediate_size, rope_theta=10_000.0,
    )  # fmt: skip


# GPT-J and GPT-NeoX have GPT-2's widths of matrices but rotary positions and attention beside the MLP: here they are GPT-2's layers at
# their sizes, with as many parameters and as much attention.
SHAPES: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "llama2-7b": _llama2(32, 4096, 11008, 32, 32),
        "llama2-13b": _llama2(40, 5120, 13824, 40, 40),
        "llama2-70b": _llama2(80, 8192, 28672, 64, 8),
        "gpt-j-6b-shape": GPT2Config(
            vocab_size=50400, max_sequence_length=2048, n_layer=28, n_head=16, n_embd=4096, tied=False
        ),
        "gpt-neox-20b-shape": GPT2Config(
            vocab_size=50432, max_sequence_length=2048, n_layer=44, n_head=64, n_embd=6144, tied=False
        ),
        **PRESETS,
    }
)


def model_shape(name: str) -> ModelConfig:
    """The configuration of a name; ValueError for another."""
    if name not in SHAPES:
        raise ValueError(f"`model` was {name!r}; it must be one of {', '.join(SHAPES)}")
    return SHAPES[name]
