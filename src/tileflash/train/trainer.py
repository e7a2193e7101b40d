"""The training loop."""

from __future__ import annotations

import math
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tileflash.models import AttentionFunction, Model, build_model
from tileflash.parallel.attention import DocumentAttention
from tileflash.train.checkpoint import Stored, as_one_process, load_checkpoint, read_state
from tileflash.train.config import TrainConfig
from tileflash.train.data_source import DataSource, StepBatch
from tileflash.train.errors import CheckpointError, GraphCaptureError, TrainingStoppedError, is_out_of_memory
from tileflash.train.fused import fuse_embedding
from tileflash.train.graph import CapturedStep
from tileflash.train.guard import SpikeGuard
from tileflash.train.interrupt import Interrupt
from tileflash.train.layers import RECOMPUTE, Recomputation, choose_recompute, compile_layers, layers_as_written
from tileflash.train.logs import Logs
from tileflash.train.looking import sample_text, validation_loss
from tileflash.train.masters import widen_stream
from tileflash.train.metrics import StepMetrics, peak_memory
from tileflash.train.optimizer import build_fused_optimizer, build_optimizer, set_learning_rate
from tileflash.train.saving import Saver
from tileflash.train.schedule import learning_rate
from tileflash.train.setup import Setup
from tileflash.train.state import (
    apply_random_states,
    gather_tensors,
    model_facts,
    random_states,
    resume_sample,
    take_tensors,
    weights_are_finite,
)
from tileflash.train.step import NOTHING_PASSES, Limits, train_step


@dataclass(frozen=True)
class TrainResult:
    """How a run ended: `status` "finished" or "interrupted", the steps done, the last step's loss (None: no step was
    done), the last checkpoint written or loaded, and the message that was shown."""

    status: str
    step: int
    train_loss: float | None
    checkpoint: Path | None
    message: str


class Trainer:
    """One run: built at the step it starts from, then `run`."""

    def __init__(
        self, config: TrainConfig, setup: Setup, logs: Logs, output: Path | None, checkpoint: Path | None
    ) -> None:
        self.config, self.setup, self.logs = config, setup, logs
        self.step = 0  # steps done
        self.sample = 0  # samples seen
        self.loss: float | None = None
        self.saved: Path | None = None
        self.saved_step: int | None = None
        self.guard = SpikeGuard(
            loss_z=config.skip_loss_z,
            gradient_z=config.skip_gradient_z,
            window=config.skip_window,
            max_skips_in_a_row=config.max_skips_in_a_row,
        )
        # Nothing here draws from the global generators; whatever the model may contain is then reproducible too.
        torch.manual_seed(config.seed)
        self.model: nn.Module
        self.optimizer: torch.optim.Optimizer
        self.documents: DocumentAttention | None = None
        self.recomputation: Recomputation | None = None
        self._build(from_start=checkpoint is None)
        if checkpoint is not None:
            self._restore(checkpoint)
        self.data = self._open_data()
        self.saver = None if output is None else self._saver(output)
        self.captures = setup.cuda_graph
        # Until the first step has chosen what is recomputed.
        self._budget_bytes = None if config.memory_budget is None else config.memory_budget * 1e9
        self.captured: CapturedStep | None = None  # where it captures, from the first step on

    def _build(self, *, from_start: bool) -> None:
        """Make model and optimizer."""
        self.model = model = self._whole_model(from_start=from_start)
        if self.documents is not None:
            # Whatever calls the model, its tokens go through here.
            model.embedding.register_forward_pre_hook(self.documents.look_at)
        config = self.config
        numbers = (model, config.learning_rate, config.weight_decay)
        split = config.master_weights == "split"
        if split or config.fused_operators:
            self.optimizer = build_fused_optimizer(
                *numbers, split=split, sum_in_fp32=config.gradient_dtype == "float32"
            )
        else:
            self.optimizer = build_optimizer(*numbers)
        if split:
            widen_stream(model)
        if config.fused_operators:
            fuse_embedding(model)
        if config.compile:
            compile_layers(model)
        if config.recompute != "none" or config.memory_budget is not None:
            self.recomputation = Recomputation(model, config.recompute)

    def _whole_model(self, *, from_start: bool) -> Model:
        """The model with the weights that a run starts with; if not `from_start`, with some that are replaced."""
        setup, config = self.setup, self.config
        attention = self._attention()
        if setup.document_start is not None:
            attention = self.documents = DocumentAttention(attention, setup.document_start)
        model = build_model(setup.model, attention, setup.device, seed=config.seed, operators=setup.operators)
        if config.init_from is not None and from_start:
            from tileflash.weights import load_into

            load_into(model, config.init_from)
        return model

    def _attention(self) -> AttentionFunction:
        return self.setup.attention

    def _open_data(self) -> DataSource:
        return DataSource(self.setup.training, self.config, self.setup.device, self.sample)

    def _saver(self, output: Path) -> Saver:
        return Saver(output, self.config.keep, run=uuid.uuid4().hex[:8])

    def _interrupted(self, interrupt: Interrupt) -> bool:
        return interrupt.requested

    def run(self, interrupt: Interrupt) -> TrainResult:
        """Train to the last step, or to the first signal."""
        with as_one_process():
            try:
                self._train(interrupt)
            except Exception as error:
                # Whatever has gone wrong, what is being saved is of before it. A second signal does not wait for it.
                self._end_save(final=False, wait_s=self._wait_after_s(error), give_up=True)
                raise
        return self._result("finished" if self.step >= self.config.num_iteration else "interrupted")

    def _train(self, interrupt: Interrupt) -> None:
        last_step, start = self.config.num_iteration, self.step
        batch = None
        while self.step < last_step and not self._interrupted(interrupt):
            batch = self._step(batch)
            self._end_save(final=False, wait_s=0)
            last = self.step == last_step
            if self._due(self.config.val_loss_every, last):
                self._validate()
            if last or self._due(self.config.save_every, last):
                self._save(final=last)
            # After saving: whatever goes wrong in it, the run is safe. It draws from a generator of its own.
            if self._due(self.config.sample_every, last):
                self._write_sample()
        self._end_save(final=False)
        if start < self.step < last_step and self.saved_step != self.step:  # interrupted
            self._save(final=True)

    def _step(self, batch: StepBatch | None) -> StepBatch | None:
        """Do one step with `batch` (None: load it); return the next step's data, None after the last."""
        config = self.config
        started = time.perf_counter()
        step = self.step + 1
        rate = learning_rate(
            step,
            highest=config.learning_rate,
            warmup_steps=config.warmup_iterations,
            last_step=config.num_iteration,
            final_fraction=config.final_learning_rate_fraction,
        )
        batch = self.data.at(self.sample) if batch is None else batch
        result = self._compute(batch, rate)
        self.step, self.sample = step, self.sample + config.step_samples
        # Read while the GPU still computes.
        following = self.data.at(self.sample) if step < config.num_iteration else None
        # The step's one wait for the device. The result is last in its queue: with it, the whole step is done.
        loss, gradient_norm, skipped = result.tolist()
        step_s = time.perf_counter() - started
        self._record(step_s, rate, loss, gradient_norm, bool(skipped))
        return following

    def _compute(self, batch: StepBatch, rate: float) -> torch.Tensor:
        """Start the step on the device; the result is `train_step`'s."""
        limits = self.guard.limits()
        if budget_bytes := self._budget_bytes:
            self._budget_bytes = None
            self._choose_recompute(batch, budget_bytes)
        if self.captures and self.captured is None:
            self._capture(batch)
        if self.captured is not None:
            return self.captured(batch, rate, limits)
        set_learning_rate(self.optimizer, rate)
        return self._eager_step(batch, limits)

    def _eager_step(self, batch: StepBatch, limits: Limits) -> torch.Tensor:
        return train_step(
            self.model,
            self.optimizer,
            batch.tokens,
            batch.targets,
            batch.valid_tokens,
            dtype=self.setup.dtype,
            gradient_clip=self.config.gradient_clip,
            limits=limits,
            loss_function=self.setup.loss_function,
        )

    def _choose_recompute(self, batch: StepBatch, budget_bytes: float) -> None:
        """Recompute as little as the budget allows, judged by steps that are skipped and so change nothing."""
        recomputation = self.recomputation
        assert recomputation is not None

        def step_bytes(kind: str) -> int | None:
            recomputation.kind = kind
            return self._step_bytes(batch)

        kinds = [kind for kind in RECOMPUTE if not (self.config.compile and kind == "selective")]
        kind, needed = choose_recompute(kinds, step_bytes, budget_bytes)
        self.logs.say(f"recompute: {kind} (a step uses {needed / 1e9:.2f} of {budget_bytes / 1e9:g} GB)")

    def _step_bytes(self, batch: StepBatch) -> int | None:
        """The most that a skipped step has in use; None: memory ran out. The process's peaks begin anew with it."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.setup.device)
        try:
            self._eager_step(batch, NOTHING_PASSES)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.optimizer.zero_grad(set_to_none=True)
            return None
        return peak_memory(self.setup.device)[0]

    def _capture(self, batch: StepBatch) -> None:
        """Capture the step. Where that fails and was not asked for, this is told and the run goes on eagerly."""
        dtype, clip = self.setup.dtype, self.config.gradient_clip
        try:
            self.captured = CapturedStep(
                self.model,
                self.optimizer,
                batch,
                dtype=dtype,
                gradient_clip=clip,
                loss_function=self.setup.loss_function,
            )
        except GraphCaptureError as error:
            if self.config.cuda_graph:
                raise GraphCaptureError(
                    f"cuda_graph is set and the step could not be captured ({error}): --no-cuda-graph trains without"
                ) from error
            self.captures = False
            self.logs.not_captured(self.step + 1, str(error))

    def _record(self, step_s: float, rate: float, loss: float, gradient_norm: float, skipped: bool) -> None:
        self.loss = loss
        stop: TrainingStoppedError | None = None
        try:
            reason = self.guard.record(self.step, loss, gradient_norm, skipped)
        except TrainingStoppedError as error:  # told after the step itself is
            stop, reason = error, "the run stops here"
        used, reserved = peak_memory(self.setup.device)
        metrics = StepMetrics(
            step=self.step,
            train_loss=loss,
            learning_rate=rate,
            gradient_norm=gradient_norm,
            step_ms=step_s * 1e3,
            tokens_per_s=self.config.step_tokens / step_s,
            peak_used_bytes=used,
            peak_reserved_bytes=reserved,
            skipped=self.guard.skipped,
            skip_reason=reason,
        )
        self.logs.step(metrics)
        if stop is not None:
            raise stop

    def _due(self, every: int, last: bool) -> bool:
        return every > 0 and (self.step % every == 0 or last)

    def _validate(self) -> None:
        assert self.setup.validation is not None  # `open_data` saw to it
        with layers_as_written(self.config.compile):
            loss = validation_loss(self.model, self.setup.validation, self.config, self.setup)
        self.logs.validation(self.step, loss)

    def _write_sample(self) -> None:
        with layers_as_written(self.config.compile):
            text, error = sample_text(self.model, self.setup, self.config, self.step)
        self.logs.sample(self.step, text, error)

    def _save(self, *, final: bool) -> None:
        """Begin to write a checkpoint, after the one before is written; see the `final` one to its end."""
        if self.saver is None:
            return
        self._end_save(final=False)
        if not self._weights_are_finite():
            raise TrainingStoppedError(f"stopped at step {self.step}: weights are NaN or Inf; they were not saved")
        state: dict[str, Any] = {
            "sample": self.sample,
            "device": self.setup.device.type,
            "guard": self.guard.state_dict(),
            "config": self.config.as_dict(),
            "model": model_facts(self.setup.model),
        }
        self.logs.flush()  # of no step that a checkpoint has behind it may the line be lost
        self.saver.start(self.step, self._stored(), state)
        if final:
            self._end_save(final=True)

    def _end_save(self, *, final: bool, wait_s: float = math.inf, give_up: bool = False) -> None:
        """Tell how a save that was begun has ended, if it has or does so within `wait_s`.

        Where the disk does not take it, an earlier save than the `final` one is told and tried again at the next. With
        `give_up` the run has failed already: nothing of the save is raised.
        """
        save = None if self.saver is None else self.saver.result(wait_s=wait_s)
        if save is None:
            return
        if save.path is not None:
            self.saved, self.saved_step = save.path, save.step
            self.logs.say(f"saved {save.path}")
        elif give_up:
            self.logs.say(f"warning: the checkpoint of step {save.step} was not written: {save.error}")
        elif isinstance(save.error, CheckpointError) and not final:
            self.logs.say(f"warning: {save.error}. Training goes on")
        else:
            assert save.error is not None
            raise save.error

    def _wait_after_s(self, error: Exception) -> float:
        """How long a run that ends by `error` waits for its last save."""
        return math.inf

    def _weights_are_finite(self) -> bool:
        return weights_are_finite(self.model)

    def _stored(self) -> Stored:
        """What this process writes of a checkpoint."""
        return gather_tensors(self.model, self.optimizer) | random_states(self.setup.device)

    def _restore(self, checkpoint: Path) -> None:
        device = self.setup.device
        tensors = gather_tensors(self.model, self.optimizer)
        same_device = read_state(checkpoint)["device"] == device.type
        random = random_states(device) if same_device else {}
        state = load_checkpoint(checkpoint, tensors | random)
        take_tensors(tensors, self.model, self.optimizer)
        if random:  # the states of a GPU's generator mean nothing to a CPU's
            apply_random_states(random, device)
        self._go_on(checkpoint, state)

    def _go_on(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Take up what a checkpoint holds beside tensors."""
        self.guard.load_state_dict(state["guard"])
        self.step, self.sample = state["step"], resume_sample(state, self.config.sequence_length)
        self.saved = checkpoint
        self.logs.say(f"going on from {checkpoint} (step {self.step})")

    def _result(self, status: str) -> TrainResult:
        where = (
            f"nothing was saved{'' if self.saver else ' (no --output)'}"
            if self.saved is None
            else f"the last checkpoint is {self.saved}"
        )
        message = f"{status} at step {self.step}/{self.config.num_iteration}; {where}"
        if status == "finished" and self.loss is None:
            message += "; there was nothing left to do (a higher --num-iteration goes on)"
        return TrainResult(status, self.step, self.loss, self.saved, message)
