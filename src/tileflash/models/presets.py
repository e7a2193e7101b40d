"""The models one can name on the command line.

Sources: GPT-2 from OpenAI's release (the sizes of the paper's table 2), LLaMA from Meta's model cards of 3.1 (8B) and
3.2 (1B, 3B). The tiny ones are for the CPU and for tests; their vocabulary is the `bytes` tokenizer's (256 bytes and
the end of text).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

from .config import GPT2Config, Llama3Config, ModelConfig, RopeScaling

_GPT2: dict[str, Any] = {"vocab_size": 50257, "max_sequence_length": 1024}
_LLAMA3: dict[str, Any] = {"vocab_size": 128256, "max_sequence_length": 131072, "n_kv_head": 8}
_BYTES_VOCABULARY = 257

PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "gpt2-tiny": GPT2Config(
            vocab_size=_BYTES_VOCABULARY, max_sequence_length=1024, n_layer=4, n_head=4, n_embd=128
        ),
        "gpt2": GPT2Config(**_GPT2, n_layer=12, n_head=12, n_embd=768),
        "gpt2-medium": GPT2Config(**_GPT2, n_layer=24, n_head=16, n_embd=1024),
        "gpt2-large": GPT2Config(**_GPT2, n_layer=36, n_head=20, n_embd=1280),
        "gpt2-xl": GPT2Config(**_GPT2, n_layer=48, n_head=25, n_embd=1600),
        "llama3-tiny": Llama3Config(
            vocab_size=_BYTES_VOCABULARY,
            max_sequence_length=131072,
            n_layer=4,
            n_head=4,
            n_kv_head=2,
            n_embd=128,
            intermediate_size=384,
            rope_scaling=RopeScaling(factor=32.0),
            tied=True,
        ),
        "llama3-1b": Llama3Config(
            **_LLAMA3,
            n_layer=16,
            n_head=32,
            n_embd=2048,
            intermediate_size=8192,
            rope_scaling=RopeScaling(factor=32.0),
            tied=True,
        ),
        "llama3-3b": Llama3Config(
            **_LLAMA3,
            n_layer=28,
            n_head=24,
            n_embd=3072,
            intermediate_size=8192,
            rope_scaling=RopeScaling(factor=32.0),
            tied=True,
        ),
        "llama3-8b": Llama3Config(
            **_LLAMA3,
            n_layer=32,
            n_head=32,
            n_embd=4096,
            intermediate_size=14336,
            rope_scaling=RopeScaling(factor=8.0),
        ),
    }
)


def model_config(name: str, **overrides: Any) -> ModelConfig:
    """The preset `name` with some fields replaced; `rope_scaling` may be a mapping of RopeScaling's fields, or None.

    Raises ValueError for an unknown preset or field, naming those there are, and for a value out of range.
    """
    if name not in PRESETS:
        raise ValueError(f"model is {name!r}; it must be one of {', '.join(PRESETS)}")
    preset = PRESETS[name]
    _require_known(overrides, type(preset), f"{name} has no field")
    scaling = overrides.get("rope_scaling")
    if isinstance(scaling, Mapping):
        _require_known(scaling, RopeScaling, "rope_scaling has no field")
        if "factor" not in scaling:
            raise ValueError(f"rope_scaling is {dict(scaling)!r}; it must give a factor")
        overrides["rope_scaling"] = RopeScaling(**scaling)
    return replace(preset, **overrides)


def _require_known(given: Mapping[str, Any], config_class: type, complaint: str) -> None:
    known = [field.name for field in fields(config_class)]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"{complaint} {', '.join(unknown)}; its fields are {', '.join(known)}")
