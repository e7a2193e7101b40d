"""LLaMA-3, plainly: it knows nothing of parallelism, precision or compilation, which act on it from outside.

No dropout, as in LLaMA's own training.
"""

from __future__ import annotations

import torch
from torch import nn

from .config import Llama3Config
from .layers import AttentionFunction, RMSNorm, RotaryEmbedding, require_length, vocabulary_logits
from .operators import PLAIN, LayerOperators


class SelfAttention(nn.Module):
    """Grouped-query attention; one projection gives the heads of q, then of k, then of v."""

    def __init__(self, config: Llama3Config, attention: AttentionFunction, operators: LayerOperators) -> None:
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.n_kv_head, config.head_dim
        self.attention, self.operators = attention, operators
        self.qkv = nn.Linear(config.n_embd, (config.n_head + 2 * config.n_kv_head) * config.head_dim, bias=False)
        self.output = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:  # x [B, S, C]
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))  # [B, S, Hq + 2 Hkv, D]
        qk, v = qkv.split([self.n_head + self.n_kv_head, self.n_kv_head], dim=2)
        q, k = self.operators.rotary(qk, self.n_head, cos, sin)
        return self.output(self.attention(q, k, v, causal=True, scale=None).flatten(2))


class MLP(nn.Module):
    """SwiGLU (Shazeer, 2020)."""

    def __init__(self, config: Llama3Config, operators: LayerOperators) -> None:
        super().__init__()
        self.operators = operators
        self.gate = nn.Linear(config.n_embd, config.intermediate_size, bias=False)
        self.up = nn.Linear(config.n_embd, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.n_embd, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.operators.swiglu(self.gate(x), self.up(x)))


class Layer(nn.Module):
    """(residual stream, what is still to be added to it or None) [B, S, C] -> the same: each norm has the add before it."""

    def __init__(self, config: Llama3Config, attention: AttentionFunction, operators: LayerOperators) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.n_embd, config.norm_epsilon, operators)
        self.attention = SelfAttention(config, attention, operators)
        self.mlp_norm = RMSNorm(config.n_embd, config.norm_epsilon, operators)
        self.mlp = MLP(config, operators)

    def forward(
        self, x: torch.Tensor, update: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, normed = self.attention_norm(x, update)
        x, normed = self.mlp_norm(x, self.attention(normed, cos, sin))
        return x, self.mlp(normed)


class Llama3(nn.Module):
    """tokens int64 [B, S] -> logits [B, S, vocab_size]. `attention` computes attention (see AttentionFunction),
    `operators` what lies between the matrix products."""

    def __init__(self, config: Llama3Config, attention: AttentionFunction, operators: LayerOperators = PLAIN) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.rotary = RotaryEmbedding(config.head_dim, config.rope_theta, config.rope_scaling)
        self.layers = nn.ModuleList(Layer(config, attention, operators) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, config.norm_epsilon, operators)
        self.head = None if config.tied else nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)

    @property
    def head_weight(self) -> torch.Tensor:
        """[padded_vocab_size, n_embd]: what a fused or chunked loss multiplies the features with."""
        return self.embedding.weight if self.head is None else self.head.weight

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """tokens int64 [B, S] at `positions` -> what goes into the first layer [B, S, n_embd]; see `features`."""
        require_length(tokens.shape[1], self.config.max_sequence_length)
        return self.embedding(tokens)

    def layer_inputs(self, length: int, positions: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """What every layer takes beside the residual stream: cosines and sines of `length` positions."""
        return self.rotary(length, positions)

    def features(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """tokens int64 [B, S] -> the normed output of the last layer [B, S, n_embd].

        `positions`: int64 [S], where in their sequence the tokens stand; None: 0, 1, 2, ... Raises ValueError when S is above
        max_sequence_length.
        """
        inputs = self.layer_inputs(tokens.shape[1], positions)
        x = self.embed(tokens, positions)
        update = None
        for layer in self.layers:
            x, update = layer(x, update, *inputs)
        return self.norm(x, update)[1]

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        return vocabulary_logits(self.features(tokens, positions), self.head_weight, self.config.vocab_size)
