"""Which weights dropout drops is what docs/semantics.md says, on every backend, in a batch and packed."""

from __future__ import annotations

import pytest
import torch

import tileflash
from tileflash.attention.tutorial.dropout import philox

BACKENDS = ("triton", "tiled", "reference")
BATCH, HEADS, QUERIES, KEYS, P = 2, 2, 35, 37, 0.3
WORD = 2**32


def kept_by_the_page(seed: int, offset: int) -> torch.Tensor:
    """bool [B, H, Sq, Sk] by docs/semantics.md, with the tutorial's Philox, in Python's integers."""
    key = (seed ^ (offset >> 32 << 32)) % 2**64
    below = round(P * 2**31)
    rows = [
        [
            (philox(j // 4, i, stream, offset % WORD, (key % WORD, key // WORD))[j % 4] >> 1) >= below
            for j in range(KEYS)
        ]
        for stream in range(BATCH * HEADS)
        for i in range(QUERIES)
    ]
    return torch.tensor(rows).view(BATCH, HEADS, QUERIES, KEYS)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("seed", "offset"), [(0, 0), (-5, (7 << 32) + 3), (2**63 - 1, -1)])
def test_what_is_dropped(backend: str, seed: int, offset: int, device: str) -> None:
    q, k = (torch.zeros(BATCH, length, HEADS, KEYS, device=device) for length in (QUERIES, KEYS))
    v = torch.eye(KEYS, device=device)[None, :, None].expand(BATCH, KEYS, HEADS, KEYS)  # out is the weights
    expected = kept_by_the_page(seed, offset).transpose(1, 2) / (KEYS * (1 - P))  # [B, Sq, H, Sk]
    dropping = {"dropout_p": P, "dropout_seed": (seed, offset), "backend": backend}
    torch.testing.assert_close(tileflash.attention(q, k, v, **dropping).cpu(), expected)
    cu_seqlens = [torch.tensor([0, n, 2 * n], dtype=torch.int32, device=device) for n in (QUERIES, KEYS)]
    packed = tileflash.attention_varlen(*(t.flatten(0, 1) for t in (q, k, v)), *cu_seqlens, **dropping)
    torch.testing.assert_close(packed.cpu(), expected.flatten(0, 1))
    as_tensor = torch.tensor([seed, offset], device=device)
    torch.testing.assert_close(
        tileflash.attention(q, k, v, dropout_p=P, dropout_seed=as_tensor, backend=backend).cpu(), expected
    )


def test_a_drawn_seed_is_repeated_by_the_generator(device: str) -> None:
    q = torch.randn(1, 20, 2, 16, device=device)
    generator = torch.Generator(device)
    first, again, other = (
        tileflash.attention(q, q, q, dropout_p=0.5, generator=generator.manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
