"""Training: `train(TrainConfig(model="gpt2", flash=True))` is `tileflash train gpt2 --flash`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tileflash.environment import environment
from tileflash.train.config import TrainConfig
from tileflash.train.errors import (
    CheckpointError,
    GraphCaptureError,
    RankLostError,
    TrainingOutOfMemoryError,
    TrainingStoppedError,
)

if TYPE_CHECKING:
    from tileflash.train.trainer import TrainResult

__all__ = [
    "CheckpointError",
    "GraphCaptureError",
    "RankLostError",
    "TrainConfig",
    "TrainingOutOfMemoryError",
    "TrainingStoppedError",
    "environment",
    "train",
]


def train(config: TrainConfig) -> TrainResult:
    """Train as `config` says; lines go to stdout, logs and checkpoints to `config.output`.

    Ctrl-C (SIGINT) and SIGTERM end the run after the step at hand, saved (the result's status is "interrupted"); a
    second one raises KeyboardInterrupt. Raises ValueError for what does not fit together (settings, data, checkpoint),
    TrainingOutOfMemoryError with what to lower, TrainingStoppedError after too many skipped steps, CheckpointError if
    none could be written or read, GraphCaptureError if `cuda_graph` is set and the step cannot be captured, RankLostError if
    another rank has ended or does not answer.

    In a process that torchrun started it is one rank of several: all of them must be given the same `config`.
    """
    from tileflash.train.run import run  # PyTorch is loaded when it is needed, not for `--help`

    return run(config)
