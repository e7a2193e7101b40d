"""An optimizer step captured in CUDA graphs: the host starts a whole micro-batch with a single launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import nn

from tileflash.train.data_source import StepBatch
from tileflash.train.recorder import GraphRecorder
from tileflash.train.step import NOTHING_PASSES, Limits, LossFunction, accumulate, finish_step, gatherer, plain_loss


class Recorder(Protocol):
    """What captures work: `GraphRecorder`."""

    def warm_up(self, work: Callable[[], None]) -> None: ...

    def record(self, work: Callable[[], None]) -> Callable[[], None]: ...


class CapturedStep:
    """`train_step` for batches of one shape, recorded once and replayed: forward, backward, clipping, optimizer.

    At small batches the GPU finishes each kernel before the host has started the next; a replay leaves no gaps. The
    kernels are the same, so the numbers are, but for the last bit of a division that has its divisor on the device,
    and of the learning rate, which is in fp32 there. What changes from step to step (data, learning rate, limits,
    number of valid tokens) lies in tensors that a replay reads anew.

    A step of one micro-batch is one graph, in which the gradients come and go. A step of more is two, whatever their
    number: one of a micro-batch, replayed for each, which adds to gradients that stay, and one of the step's end.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: StepBatch,
        *,
        dtype: torch.dtype,
        gradient_clip: float,
        recorder: Recorder | None = None,
        loss_function: LossFunction = plain_loss,
    ) -> None:
        """`batch` is any step's data; no number of model or optimizer is changed by it.

        Where this raises, both can do eager steps as before. GraphCaptureError: the step cannot be captured here.
        """
        device = batch.tokens.device
        self._shape = batch.tokens.shape
        # All that a replay reads or leaves is made here, outside of the graphs' memory.
        self._tokens, self._targets = batch.tokens[0].clone(), batch.targets[0].clone()  # [B, S]
        self._numbers = torch.zeros(4, device=device)  # one copy to the device a step carries them all
        self._loss = torch.zeros((), device=device)
        self._result = torch.zeros(3, device=device)
        valid_tokens, loss_limit, gradient_limit, rate = self._numbers.unbind()
        several = len(batch.tokens) > 1
        gather = gatherer(optimizer, len(batch.tokens))

        def micro_batch() -> None:
            accumulate(model, self._tokens, self._targets, valid_tokens, self._loss, dtype, loss_function)
            if gather is not None:
                gather()

        def end() -> None:
            limits = Limits(cast(float, loss_limit), cast(float, gradient_limit))  # compared on the device all the same
            result = finish_step(
                model, optimizer, self._loss, gradient_clip=gradient_clip, limits=limits, keep_gradients=several
            )
            self._result.copy_(result)
            self._loss.zero_()

        def whole() -> None:
            micro_batch()
            end()

        recorder = GraphRecorder(device) if recorder is None else recorder
        captured = {"lr": rate, "capturable": True}
        before = [{name: group[name] for name in captured if name in group} for group in optimizer.param_groups]
        try:
            for group in optimizer.param_groups:
                group.update({name: value for name, value in captured.items() if name in group})
            self._write(batch.valid_tokens, NOTHING_PASSES, 0.0)
            # Steps that are skipped change nothing. With several micro-batches the first makes the gradients that
            # stay (of those weights that have one; the optimizer passes over the others), the second adds to them.
            for _ in range(2):
                recorder.warm_up(whole)
            self._micro_batch = recorder.record(micro_batch if several else whole)
            self._end = recorder.record(end) if several else None
        except BaseException:
            for group, settings in zip(optimizer.param_groups, before, strict=True):
                group.update(settings)
            optimizer.zero_grad(set_to_none=True)
            raise

    def __call__(self, batch: StepBatch, learning_rate: float, limits: Limits) -> torch.Tensor:
        """Do one step with `batch`; return what `train_step` does. The tensor is written anew by the next call."""
        if batch.tokens.shape != self._shape:
            raise ValueError(f"batch is of {tuple(batch.tokens.shape)}: the captured step's is {tuple(self._shape)}")
        self._write(batch.valid_tokens, limits, learning_rate)
        for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
            self._tokens.copy_(tokens)
            self._targets.copy_(targets)
            self._micro_batch()
        if self._end is not None:
            self._end()
        return self._result

    def _write(self, valid_tokens: int, limits: Limits, learning_rate: float) -> None:
        numbers = [float(max(valid_tokens, 1)), limits.loss, limits.gradient_norm, learning_rate]
        self._numbers.copy_(torch.tensor(numbers))
