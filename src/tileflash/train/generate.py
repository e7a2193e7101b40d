"""Text from a model: one token after another, each drawn from the model's own distribution."""

from __future__ import annotations

import torch
from torch import nn

from tileflash.train.step import compute


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: list[int],
    *,
    length: int,
    vocabulary: int,
    context: int,
    generator: torch.Generator,
    dtype: torch.dtype,
    temperature: float = 1.0,
    top_k: int = 0,
) -> list[int]:
    """`prompt` and what the model adds to it, `length` token ids in all.

    Only ids below `vocabulary` are drawn (a model's vocabulary is often padded); the model sees the last `context`
    tokens. `temperature` 0 takes the most likely token; `top_k` 0 draws among all. Random numbers come from `generator`
    alone, so sampling amid training changes none of training's. ValueError: an empty prompt.
    """
    if not prompt:
        raise ValueError("prompt is empty: it must hold at least one token (for example the end-of-text token)")
    device = next(model.parameters()).device
    tokens = torch.tensor([prompt], device=device)  # [1, S]
    was_training = model.training
    model.eval()
    try:
        while tokens.shape[1] < length:
            logits = compute(model, tokens[:, -context:], dtype)[0, -1, :vocabulary].float()  # [V]
            tokens = torch.cat([tokens, _draw(logits, temperature, top_k, generator).view(1, 1)], dim=1)
    finally:
        model.train(was_training)
    ids: list[int] = tokens[0].tolist()
    return ids


def _draw(logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> torch.Tensor:
    """One token id [1] from `logits` [V], fp32."""
    if temperature == 0:
        return logits.argmax().view(1)
    logits = logits / temperature
    if 0 < top_k < logits.numel():
        smallest_kept = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < smallest_kept, float("-inf"))
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
