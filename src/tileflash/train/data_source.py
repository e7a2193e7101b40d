"""What a step trains on. The position is counted in samples, so that a resumed run may have other batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tileflash.data import BatchLoader, TokenFiles, Tokenizer, prepare_demo
from tileflash.train.config import TrainConfig
from tileflash.train.step import IGNORED_TARGET


@dataclass(frozen=True)
class StepBatch:
    """One step's data on the device: `tokens`, `targets` int64 [M, B, S], and how many targets are not -100.

    Where several data ranks share a step, tokens and targets are this rank's, `valid_tokens` are of all of them.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    valid_tokens: int


class DataSource:
    """The steps' data as a pure function of the position, from `first_sample` on in strides of `step_samples`.

    In each micro-batch the data ranks take `batch_size` samples one after the other, so that all of them together see
    the samples that one rank would, in its order. `data_rank` is which of them this is; `data_sum` adds a number up
    over them.
    """

    def __init__(
        self,
        files: TokenFiles,
        config: TrainConfig,
        device: torch.device,
        first_sample: int = 0,
        *,
        data_rank: int = 0,
        data_sum: Callable[[int], int] = lambda number: number,
    ) -> None:
        # Batches are numbered from sample 0. After a change of batch size the position may lie inside one: read in
        # pieces that divide both, so that no sample is left out or seen twice.
        piece = math.gcd(first_sample, config.batch_size)
        self._loader = BatchLoader(
            files, piece, config.sequence_length, shuffle_seed=config.seed if config.shuffle else None
        )
        self._shape = (config.micro_batches, config.batch_size, config.sequence_length)
        self._data_rank, self._data_ranks, self._data_sum = data_rank, config.data_parallel, data_sum
        self._device = device
        self.samples_per_epoch = self._loader.samples_per_epoch

    def at(self, sample: int) -> StepBatch:
        """The data of the step that begins at `sample`. The copy to a GPU runs beside whatever the GPU is doing."""
        piece, (micro_batches, batch_size, _) = self._loader.batch_size, self._shape
        starts = [
            sample + (micro_batch * self._data_ranks + self._data_rank) * batch_size
            for micro_batch in range(micro_batches)
        ]
        indices = [index for start in starts for index in range(start // piece, (start + batch_size) // piece)]
        pieces = [self._loader.batch(index) for index in indices]
        tokens, targets = (torch.cat(parts).view(self._shape) for parts in zip(*pieces, strict=True))
        valid_tokens = self._data_sum(int((targets != IGNORED_TARGET).sum()))  # on the CPU: no wait for the GPU
        if self._device.type == "cuda":
            tokens, targets = (part.pin_memory().to(self._device, non_blocking=True) for part in (tokens, targets))
        return StepBatch(tokens, targets, valid_tokens)


def validation_batches(
    files: TokenFiles, config: TrainConfig, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same (tokens, targets) int64 [B, S] each time: from the file's beginning, no sample twice."""
    # A short validation file is no reason to fail: it is read in the batches it has.
    samples = (len(files) - 1) // config.sequence_length
    loader = BatchLoader(files, min(config.batch_size, max(samples, 1)), config.sequence_length)
    for index in range(min(config.val_max_batches * config.data_parallel, loader.batches_per_epoch)):
        tokens, targets = loader.batch(index)
        yield tokens.to(device), targets.to(device)


def open_data(
    config: TrainConfig, tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[TokenFiles, TokenFiles | None]:
    """The files of training and of validation (None: not asked for). Without --input-bin, those of the demo corpus."""
    training, validation = config.input_bin, config.input_val_bin
    if training is None:
        if tokenizer is None:
            raise ValueError(
                f"input_bin is not set: a vocabulary of {vocab_size} is too small for the demo corpus (257)"
            )
        directory = Path(config.data_directory or Path.home() / ".cache" / "tileflash") / f"demo-{tokenizer.name}"
        path = None if config.tokenizer_path is None else Path(config.tokenizer_path)
        demo = prepare_demo(directory, tokenizer.name, path)
        training = str(demo[0])
        validation = validation or str(demo[1])
    files = TokenFiles(training, vocab_size)
    if not config.val_loss_every:
        return files, None
    if validation is None:
        raise ValueError("val_loss_every is set and input_val_bin is not: it must name the validation tokens")
    return files, TokenFiles(validation, vocab_size)
