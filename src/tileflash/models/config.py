"""What a model is: frozen configurations, validated once when made."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Literal


def _require_positive_integers(config: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be a positive integer")


def _require_positive(config: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ValueError(f"{name} is {value!r}; it must be a positive number")


def _require_bool(value: object, name: str) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be true or false")


def _require_divides(value: int, name: str, by: int, by_name: str) -> None:
    if value % by:
        raise ValueError(f"{name} is {value}; it must be a multiple of {by_name}, {by}")


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class RopeScaling:
    """How LLaMA-3.1 stretches its rotary embedding to long contexts (rope type `llama3` of Hugging Face).

    Wavelengths (in positions) above `original_max_sequence_length / low_frequency_factor` are stretched by `factor`,
    those below `original_max_sequence_length / high_frequency_factor` are kept, those between are interpolated.
    """

    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_max_sequence_length: int = 8192

    def __post_init__(self) -> None:
        _require_positive(self, ("factor", "low_frequency_factor", "high_frequency_factor"))
        _require_positive_integers(self, ("original_max_sequence_length",))
        if self.high_frequency_factor <= self.low_frequency_factor:
            raise ValueError(
                f"high_frequency_factor is {self.high_frequency_factor}; "
                f"it must be above low_frequency_factor, {self.low_frequency_factor}"
            )


@dataclass(frozen=True)
class GPT2Config:
    """GPT-2 (Radford et al., 2019): learned positions, LayerNorm before each sub-layer, GELU (tanh), biases.

    `vocab_multiple`: the embedding has `padded_vocab_size` rows, the next multiple of it, so that the matrix product of
    the head meets the alignment that tensor cores want. The rows above `vocab_size` are zero and never give a logit.
    `tied`: the head is the embedding. Raises ValueError for a field out of range.
    """

    family: ClassVar[Literal["gpt2"]] = "gpt2"
    vocab_size: int
    max_sequence_length: int
    n_layer: int
    n_head: int
    n_embd: int
    norm_epsilon: float = 1e-5
    tied: bool = True
    vocab_multiple: int = 128

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "max_sequence_length", "n_layer", "n_head", "n_embd", "vocab_multiple")
        _require_positive_integers(self, sizes)
        _require_positive(self, ("norm_epsilon",))
        _require_bool(self.tied, "tied")
        _require_divides(self.n_embd, "n_embd", self.n_head, "n_head")

    @property
    def n_kv_head(self) -> int:
        return self.n_head

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def padded_vocab_size(self) -> int:
        return _round_up(self.vocab_size, self.vocab_multiple)


@dataclass(frozen=True)
class Llama3Config:
    """LLaMA-3 (Dubey et al., 2024): rotary positions, grouped-query attention, SwiGLU, RMSNorm, no biases.

    `intermediate_size` is the width of the SwiGLU; `rope_scaling` None is plain LLaMA-3, else LLaMA-3.1's and later.
    `vocab_multiple` and `tied` as in GPT2Config. Raises ValueError for a field out of range.
    """

    family: ClassVar[Literal["llama3"]] = "llama3"
    vocab_size: int
    max_sequence_length: int
    n_layer: int
    n_head: int
    n_kv_head: int
    n_embd: int
    intermediate_size: int
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    norm_epsilon: float = 1e-5
    tied: bool = False
    vocab_multiple: int = 1

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "max_sequence_length", "n_layer", "n_head", "n_kv_head", "n_embd", "intermediate_size")
        _require_positive_integers(self, (*sizes, "vocab_multiple"))
        _require_positive(self, ("norm_epsilon", "rope_theta"))
        _require_bool(self.tied, "tied")
        _require_divides(self.n_embd, "n_embd", self.n_head, "n_head")
        _require_divides(self.n_head, "n_head", self.n_kv_head, "n_kv_head")
        _require_divides(self.head_dim, "head_dim (n_embd / n_head)", 2, "the two halves that RoPE rotates")
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, RopeScaling):
            names = ", ".join(field.name for field in fields(RopeScaling))
            raise ValueError(f"rope_scaling is {self.rope_scaling!r}; it must be None or a RopeScaling ({names})")

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def padded_vocab_size(self) -> int:
        return _round_up(self.vocab_size, self.vocab_multiple)


ModelConfig = GPT2Config | Llama3Config
