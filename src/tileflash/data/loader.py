"""Batches as a pure function of their number: nothing to save, nothing to skip, resuming is exact."""

from __future__ import annotations

import numpy as np
import torch

from tileflash.data.shuffle import permute
from tileflash.data.token_files import TokenFiles


class BatchLoader:
    """Cuts the stream of tokens into samples of `sequence_length` and deals them in batches.

    Sample s reads tokens [s * S, s * S + S + 1): inputs and, one further, targets, across document bounds, as llm.c and
    InfiniTrain do. The i-th sample of the run is row i % B of batch i // B; epoch i // samples_per_epoch goes through
    the samples in order or, with `shuffle_seed`, in an order of its own that depends on (seed, epoch) alone. A batch
    that begins in one epoch ends in the next: every sample is seen once an epoch.

    ValueError: sizes below 1, or fewer tokens than one batch needs (B * S + 1).
    """

    def __init__(
        self, files: TokenFiles, batch_size: int, sequence_length: int, shuffle_seed: int | None = None
    ) -> None:
        for name, value in (("batch_size", batch_size), ("sequence_length", sequence_length)):
            if value < 1:
                raise ValueError(f"`{name}` was {value}; it must be at least 1")
        needed = batch_size * sequence_length + 1
        if len(files) < needed:
            raise ValueError(
                f"{files.name}: {len(files)} tokens, but one batch needs batch_size x sequence_length + 1 = "
                f"{batch_size} x {sequence_length} + 1 = {needed}; use more text, or lower one of them"
            )
        self.files = files
        self.batch_size = batch_size
        self.sequence_length = sequence_length
        self.shuffle_seed = shuffle_seed
        self.samples_per_epoch = (len(files) - 1) // sequence_length

    @property
    def batches_per_epoch(self) -> int:
        """Whole batches in an epoch, at least 1: batches 0 .. batches_per_epoch - 1 never see a sample twice."""
        return self.samples_per_epoch // self.batch_size

    def batch(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, targets) number `index` >= 0, both int64 [B, S] on the CPU. The same index gives the same batch."""
        if index < 0:
            raise ValueError(f"`index` was {index}; it must be at least 0")
        rows = np.empty((self.batch_size, self.sequence_length + 1), dtype=np.int64)
        for row, sample in zip(rows, self.sample_numbers(index), strict=True):
            start = int(sample) * self.sequence_length
            row[:] = self.files.read(start, start + self.sequence_length + 1)
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def sample_numbers(self, index: int) -> np.ndarray:
        """[B] int64: which samples of the stream batch `index` holds."""
        first = index * self.batch_size
        numbers = np.arange(first, first + self.batch_size, dtype=np.int64)
        epochs, within = np.divmod(numbers, self.samples_per_epoch)
        if self.shuffle_seed is None:
            return within
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            within[chosen] = permute(within[chosen], self.samples_per_epoch, self.shuffle_seed, int(epoch))
        return within
