"""What the runs of tests/parallel have that others do not: targets of which some take no part, a different number in every sample, as
packed or padded data would give; and a checkpoint of the first step beside the last one."""

from __future__ import annotations

import pytest
import torch

from tileflash.data import BatchLoader
from tileflash.train.trainer import Trainer

AFTER_THE_FIRST = 10**6  # --save-every
_batch = BatchLoader.batch


def sparse_batch(self: BatchLoader, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The loader's batch; sample number s keeps its first 5 s mod 17 targets, and some samples none at all."""
    tokens, targets = _batch(self, index)
    targets = targets.clone()  # of a single sample both are views of the same memory
    for row, sample in zip(targets, self.sample_numbers(index), strict=True):
        row[int(sample) * 5 % 17 :] = -100
    return tokens, targets


def prepare(rank: int, patch: pytest.MonkeyPatch | None = None) -> None:
    """For this process and its life, or that of `patch`."""
    patch = pytest.MonkeyPatch() if patch is None else patch
    patch.setattr(BatchLoader, "batch", sparse_batch)
    patch.setattr(Trainer, "_due", _due_after_the_first)


_due = Trainer._due


def _due_after_the_first(self: Trainer, every: int, last: bool) -> bool:
    """Runs that save never but at their end, by this number, save after their first step, too."""
    return _due(self, every, last) or (every == AFTER_THE_FIRST and self.step == 1)
