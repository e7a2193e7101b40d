"""Suite `model-memory`: what a whole model needs by context, counted from its shape. Nothing is measured, so no GPU is needed.

Counted is the least that must be there at once; allocators, workspaces and the framework come on top. For inference (weights and cache
in 16 bits): the weights, K and V of every position in every layer, and the widest moment of one layer of the prompt's pass: residual
stream, gate, up and their product. For training (bf16 compute over fp32 master weights, AdamW, no recomputation): 16 bytes a parameter
(weight, gradient, two moments in fp32), what the layers keep for the backward pass, and the logits in fp32. The standard attention adds
the S x S matrices: two of one layer at once in inference (scores and weights), one in every layer in training (the weights are kept).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tileflash.bench.ledger import CaseValue, Line
from tileflash.bench.model_shapes import model_shape
from tileflash.bench.sitting import Sitting
from tileflash.bench.statistic import Statistic
from tileflash.models import GPT2Config, ModelConfig, parameter_count

SUITE = "model-memory"
STANDARD, FLASH = "standard", "flash"
INFERENCE, TRAINING = "inference", "training"
_HALF, _SINGLE = 2, 4  # bytes of a number
_MASTER_BYTES = 4 * _SINGLE  # weight, gradient and AdamW's two moments


@dataclass(frozen=True)
class ModelMemorySuite:
    """A model, the contexts of inference and of training, and their batches. ValueError names what does not fit."""

    model: str = "llama2-7b"
    inference_lengths: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768)
    training_lengths: tuple[int, ...] = (2048, 4096, 8192)
    inference_batch: int = 1
    training_batch: int = 4

    def __post_init__(self) -> None:
        model_shape(self.model)
        for name in ("inference_lengths", "training_lengths"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ValueError(f"`{name}` was {getattr(self, name)}; each must be at least 1")
        for name in ("inference_batch", "training_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` was {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True)
class ModelBytes:
    """Counted bytes by what they are of; `total` is their sum."""

    weights: int
    states: int  # the K/V cache of inference; gradients and optimizer of training
    activations: int
    attention_matrices: int

    @property
    def total(self) -> int:
        return self.weights + self.states + self.activations + self.attention_matrices


def inference_bytes(config: ModelConfig, batch: int, length: int, attention: str) -> ModelBytes:
    """Of a prompt of `length` positions whose K and V are kept."""
    positions = batch * length
    wide = _mlp_width(config)
    return ModelBytes(
        weights=_HALF * parameter_count(config),
        states=_HALF * 2 * config.n_layer * config.n_kv_head * config.head_dim * positions,
        activations=_HALF * positions * (config.n_embd + wide),
        attention_matrices=2 * _HALF * _matrix(config, batch, length) if attention == STANDARD else 0,
    )


def training_bytes(config: ModelConfig, batch: int, length: int, attention: str) -> ModelBytes:
    """Of one step of AdamW."""
    positions, parameters = batch * length, parameter_count(config)
    # Kept by a layer: what both norms take and give (4 C), q, k, v, the attention's output (2 C and the K/V heads), and the MLP's parts.
    kept = 6 * config.n_embd + 2 * config.n_kv_head * config.head_dim + _mlp_width(config)
    statistics = 0 if attention == STANDARD else _SINGLE * config.n_head  # the log-sum-exp
    return ModelBytes(
        weights=_SINGLE * parameters,
        states=(_MASTER_BYTES - _SINGLE) * parameters,
        activations=positions * (config.n_layer * (_HALF * kept + statistics) + _SINGLE * config.vocab_size),
        attention_matrices=_HALF * config.n_layer * _matrix(config, batch, length) if attention == STANDARD else 0,
    )


def model_memory_lines(suite: ModelMemorySuite, sitting: Sitting) -> Iterator[Line]:
    """Ledger lines: `counted_bytes` of both attentions, and their parts."""
    config = model_shape(suite.model)
    for use, count, lengths, batch in (
        (INFERENCE, inference_bytes, suite.inference_lengths, suite.inference_batch),
        (TRAINING, training_bytes, suite.training_lengths, suite.training_batch),
    ):
        for length in lengths:
            for attention in (STANDARD, FLASH):
                counted = count(config, batch, length, attention)
                parts = {
                    "counted_bytes": counted.total, "weights_bytes": counted.weights, "states_bytes": counted.states,
                    "activations_bytes": counted.activations, "attention_matrices_bytes": counted.attention_matrices,
                }  # fmt: skip
                for metric, value in parts.items():
                    figure = Statistic(float(value), float(value), float(value), 1)
                    case: dict[str, CaseValue] = {"use": use, "model": suite.model, "batch": batch, "seq": length}
                    yield sitting.line(SUITE, case, attention, metric, figure)


def _matrix(config: ModelConfig, batch: int, length: int) -> int:
    return batch * config.n_head * length * length


def _mlp_width(config: ModelConfig) -> int:
    """Numbers a position that the MLP holds at once: before and after GELU, or gate, up and their product."""
    return 8 * config.n_embd if isinstance(config, GPT2Config) else 3 * config.intermediate_size
