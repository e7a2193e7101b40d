"""Tokens for the ranks, the same for all tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tileflash.data import write_token_file
from tileflash.data.tokenizers import ByteTokenizer


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens with something to learn: each is the one before plus 0 to 3, modulo 64; some begin documents."""
    path = tmp_path_factory.mktemp("tokens") / "train.bin"
    random = np.random.default_rng(1)
    numbers = np.cumsum(random.integers(0, 4, 3000)) % 64
    numbers[random.random(3000) < 0.08] = ByteTokenizer.begin_of_text
    write_token_file(path, numbers, vocab_size=257)
    return path
