"""A whole optimizer step captured in one CUDA graph: the host starts a step with a single launch."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from tileflash.train.data_source import StepBatch
from tileflash.train.step import Limits, train_step

_NOTHING_PASSES = Limits(float("-inf"), float("-inf"))


class CapturedStep:
    """`train_step` for batches of one shape, recorded once and replayed: forward, backward, clipping, optimizer.

    At small batches the GPU finishes each kernel before the host has started the next; a replay leaves no gaps. The
    kernels are the same, so the numbers are, but for the last bit of a division that has its divisor on the device.
    What changes from step to step (data, learning rate, limits, number of valid tokens) lies in tensors that a replay
    reads anew.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.AdamW,
        batch: StepBatch,
        *,
        dtype: torch.dtype,
        gradient_clip: float,
    ) -> None:
        """`batch` is any step's data; nothing of model or optimizer is changed by it."""
        device = batch.tokens.device
        self.tokens, self.targets = batch.tokens.clone(), batch.targets.clone()
        self.numbers = torch.zeros(4, device=device)  # one copy to the device a step carries them all
        valid_tokens, loss_limit, gradient_limit, rate = self.numbers.unbind()
        for group in optimizer.param_groups:
            group.update(lr=rate, capturable=True)

        def step() -> torch.Tensor:
            limits = Limits(cast(float, loss_limit), cast(float, gradient_limit))  # compared on the device all the same
            return train_step(
                model, optimizer, self.tokens, self.targets, valid_tokens,
                dtype=dtype, gradient_clip=gradient_clip, limits=limits,
            )  # fmt: skip

        self._write(batch.valid_tokens, _NOTHING_PASSES, 0.0)
        # Steps that are skipped change nothing, but make what may not be made during a capture: moments, cuBLAS's
        # workspace, compiled kernels. They run on the stream of the capture: cuBLAS keeps a workspace for each stream
        # and thread it has been called from (32 MiB each on Hopper) for as long as the process lives.
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
        torch.cuda.current_stream(device).wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.result = step()

    def __call__(self, batch: StepBatch, learning_rate: float, limits: Limits) -> torch.Tensor:
        """Do one step with `batch`; return what `train_step` does. The tensor is written anew by the next call."""
        self.tokens.copy_(batch.tokens)
        self.targets.copy_(batch.targets)
        self._write(batch.valid_tokens, limits, learning_rate)
        self.graph.replay()
        return self.result

    def _write(self, valid_tokens: int, limits: Limits, learning_rate: float) -> None:
        numbers = [float(max(valid_tokens, 1)), limits.loss, limits.gradient_norm, learning_rate]
        self.numbers.copy_(torch.tensor(numbers))
