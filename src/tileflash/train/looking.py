"""Looks at the model while it trains, which change nothing of the training: the validation loss and samples of text."""

from __future__ import annotations

import torch
from torch import nn

from tileflash.data import TokenFiles
from tileflash.train.config import TrainConfig
from tileflash.train.data_source import validation_batches
from tileflash.train.generate import generate
from tileflash.train.setup import Setup
from tileflash.train.step import IGNORED_TARGET


@torch.no_grad()
def validation_loss(model: nn.Module, files: TokenFiles, config: TrainConfig, setup: Setup) -> float:
    """Mean loss of a token over the first `val_max_batches` batches of `files`; the same data each time."""
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=setup.device)
    valid = torch.zeros((), dtype=torch.int64, device=setup.device)
    for tokens, targets in validation_batches(files, config, setup.device):
        total += setup.loss_function(model, tokens, targets, 1, setup.dtype)
        valid += (targets != IGNORED_TARGET).sum()
    model.train()
    return float(total / valid)


def sample_text(model: nn.Module, setup: Setup, config: TrainConfig, step: int) -> tuple[str | None, str | None]:
    """(text, None), or (None, what went wrong): a sample is never worth a run.

    Its randomness is of (seed, step) alone, so a resumed run writes the same samples.
    """
    if setup.tokenizer is None:
        return None, "there is no tokenizer (name it with --tokenizer)"
    generator = torch.Generator(setup.device).manual_seed((config.seed * 1_000_003 + step) % 2**63)
    try:
        prompt = setup.tokenizer.encode(config.prompt) or [setup.tokenizer.end_of_text]
        ids = generate(
            model,
            prompt,
            length=max(config.text_length, len(prompt)),
            vocabulary=min(setup.model.vocab_size, setup.tokenizer.vocab_size),
            context=config.sequence_length,  # learned positions beyond it have not been trained
            generator=generator,
            dtype=setup.dtype,
            temperature=config.temperature,
            top_k=config.top_k,
        )
        return setup.tokenizer.decode(ids), None
    except Exception as error:  # any at all: see above; it is told in the log
        model.train()
        return None, f"{type(error).__name__}: {error}"
