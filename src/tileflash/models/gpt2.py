"""GPT-2, plainly: it knows nothing of parallelism, precision or compilation, which act on it from outside.

No dropout: current pretraining uses none, and a rate of 0 is the only one that is the same in every attention kernel.
"""

from __future__ import annotations

import torch
from torch import nn

from .config import GPT2Config
from .layers import AttentionFunction, LayerNorm, require_length, vocabulary_logits
from .operators import PLAIN, LayerOperators, Update


class SelfAttention(nn.Module):
    def __init__(self, config: GPT2Config, attention: AttentionFunction, operators: LayerOperators) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.attention, self.operators = attention, operators
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.output = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: torch.Tensor) -> Update:  # [B, S, C]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_head, -1)).unbind(2)  # each [B, S, H, D]
        return self.operators.project(self.output, self.attention(q, k, v, causal=True, scale=None).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: GPT2Config, operators: LayerOperators) -> None:
        super().__init__()
        self.operators = operators
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.activation = nn.GELU(approximate="tanh")
        self.down = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: torch.Tensor) -> Update:
        return self.operators.project(self.down, self.activation(self.up(x)))


class Layer(nn.Module):
    """(residual stream, what is still to be added to it or None) [B, S, C] -> the same: each norm has the add before it."""

    def __init__(self, config: GPT2Config, attention: AttentionFunction, operators: LayerOperators) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(config.n_embd, config.norm_epsilon, operators)
        self.attention = SelfAttention(config, attention, operators)
        self.mlp_norm = LayerNorm(config.n_embd, config.norm_epsilon, operators)
        self.mlp = MLP(config, operators)

    def forward(self, x: torch.Tensor, update: Update | None) -> tuple[torch.Tensor, Update]:
        x, normed = self.attention_norm(x, update)
        x, normed = self.mlp_norm(x, self.attention(normed))
        return x, self.mlp(normed)


class GPT2(nn.Module):
    """tokens int64 [B, S] -> logits [B, S, vocab_size]. `attention` computes attention (see AttentionFunction),
    `operators` the norms with their residual adds, and the projections before them."""

    def __init__(self, config: GPT2Config, attention: AttentionFunction, operators: LayerOperators = PLAIN) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.positions = nn.Parameter(torch.empty(config.max_sequence_length, config.n_embd))
        self.layers = nn.ModuleList(Layer(config, attention, operators) for _ in range(config.n_layer))
        self.norm = LayerNorm(config.n_embd, config.norm_epsilon, operators)
        self.head = None if config.tied else nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)

    @property
    def head_weight(self) -> torch.Tensor:
        """[padded_vocab_size, n_embd]: what a fused or chunked loss multiplies the features with."""
        return self.embedding.weight if self.head is None else self.head.weight

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """tokens int64 [B, S] at `positions` -> what goes into the first layer [B, S, n_embd]; see `features`."""
        require_length(tokens.shape[1], self.config.max_sequence_length)
        return self.embedding(tokens) + (
            self.positions[: tokens.shape[1]] if positions is None else self.positions[positions]
        )

    def layer_inputs(self, length: int, positions: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """What every layer takes beside the residual stream."""
        return ()

    def features(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """tokens int64 [B, S] -> the normed output of the last layer [B, S, n_embd].

        `positions`: int64 [S], where in their sequence the tokens stand; None: 0, 1, 2, ... Raises ValueError when S is above
        max_sequence_length.
        """
        inputs = self.layer_inputs(tokens.shape[1], positions)
        x = self.embed(tokens, positions)
        update: Update | None = None
        for layer in self.layers:
            x, update = layer(x, update, *inputs)
        return self.norm(x, update)[1]

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        return vocabulary_logits(self.features(tokens, positions), self.head_weight, self.config.vocab_size)
