"""Parameters and floating-point operations, counted from a configuration alone."""

from __future__ import annotations

from .build import empty_model
from .config import ModelConfig

_VOCABULARY = ("embedding.weight", "head.weight")


def parameter_count(config: ModelConfig) -> int:
    """Number of parameters without the padding rows of the vocabulary, a tied head counted once: the published one."""
    padding = (config.padded_vocab_size - config.vocab_size) * config.n_embd
    model = empty_model(config, device="meta")
    return sum(
        parameter.numel() - (padding if name in _VOCABULARY else 0) for name, parameter in model.named_parameters()
    )


def matmul_parameter_count(config: ModelConfig) -> int:
    """Number of parameters that take part in a matrix product: the projections, and the head once, tied or not.

    Looked-up tables (embedding, positions), norms and biases do not count; nor do the padding rows.
    """
    model = empty_model(config, device="meta")
    weights = (parameter.numel() for name, parameter in model.layers.named_parameters() if parameter.dim() == 2)
    return sum(weights) + config.vocab_size * config.n_embd


def flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """FLOPs of one training token, forward and backward: 6 N + 6 L C T.

    N = matmul_parameter_count (2 FLOPs a parameter forward, 4 backward). L layers, C = n_head * head_dim, T the
    sequence length: the two products of full attention take 4 C T forward and 8 C T backward in each layer, and a
    causal mask leaves half. Recomputation, the softmax and all element-wise work are not counted. Raises ValueError
    when T is not positive.
    """
    if sequence_length < 1:
        raise ValueError(f"sequence_length is {sequence_length}; it must be positive")
    attention = 6 * config.n_layer * config.n_head * config.head_dim * sequence_length
    return float(6 * matmul_parameter_count(config) + attention)
