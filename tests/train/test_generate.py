"""Sampling against distributions and against the plain loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tileflash.models import build_model, model_config, unfused_attention
from tileflash.train.generate import generate


class Fixed(nn.Module):
    """Logits that are the same at each position."""

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(*tokens.shape, -1)


def draw(model: nn.Module, length: int, seed: int = 0, **options: float) -> list[int]:
    settings = {"vocabulary": 4, "context": 8, "temperature": 1.0, "top_k": 0} | options
    generator = torch.Generator().manual_seed(seed)
    return generate(model, [0], length=length, generator=generator, dtype=torch.float32, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.1, 0.2, 0.3, 0.4]),
        ({"top_k": 2}, [0, 0, 3 / 7, 4 / 7]),
        ({"temperature": 0.5}, [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
        ({"temperature": 0}, [0, 0, 0, 1]),
        ({"vocabulary": 3}, [1 / 6, 2 / 6, 3 / 6, 0]),
    ],
)
def test_frequencies_are_those_of_the_distribution(options: dict, expected: list[float]) -> None:
    ids = draw(Fixed(torch.tensor([0.1, 0.2, 0.3, 0.4]).log().tolist()), 4001, **options)[1:]
    found = torch.bincount(torch.tensor(ids), minlength=4) / len(ids)
    # Three standard deviations of a frequency over 4000 draws are below 0.024.
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32), rtol=0, atol=0.03)


def test_each_token_follows_from_those_before_it_and_the_model_is_left_as_it_was() -> None:
    config = model_config("gpt2-tiny", vocab_size=67, n_layer=1, n_head=2, n_embd=16, max_sequence_length=8)
    model = build_model(config, attention=unfused_attention, seed=1)
    with torch.no_grad():
        model.embedding.weight.mul_(50)  # so that the likeliest token depends on the context
    model.train()
    state = torch.get_rng_state()
    ids = draw(model, 20, vocabulary=67, temperature=0, context=8)
    expected = [0]
    for _ in range(19):
        logits = model(torch.tensor([expected[-8:]]))
        expected.append(int(logits[0, -1].argmax()))
    assert ids == expected
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


def test_own_randomness() -> None:
    model = Fixed([0.0] * 4)
    state = torch.get_rng_state()
    first, again, other = draw(model, 50, seed=1), draw(model, 50, seed=1), draw(model, 50, seed=2)
    assert first == again != other
    assert torch.equal(torch.get_rng_state(), state)


def test_edges() -> None:
    model = Fixed([0.0] * 4)
    generator = torch.Generator()
    kept = generate(model, [1, 2, 3], length=2, vocabulary=4, context=8, generator=generator, dtype=torch.float32)
    assert kept == [1, 2, 3]
    with pytest.raises(ValueError, match="prompt is empty"):
        generate(model, [], length=2, vocabulary=4, context=8, generator=generator, dtype=torch.float32)
