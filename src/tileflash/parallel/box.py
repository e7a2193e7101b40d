"""A part of a tensor and its place in the whole: what a rank writes of a checkpoint, and what it reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Box:
    """`tensor` is what begins at `offsets`, one number a dimension, in a whole of `shape`."""

    tensor: torch.Tensor
    offsets: tuple[int, ...]
    shape: torch.Size

    @staticmethod
    def whole(tensor: torch.Tensor) -> Box:
        """All of `tensor`."""
        return Box(tensor, (0,) * tensor.dim(), tensor.shape)
