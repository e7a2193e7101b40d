"""The training loop of one rank among several: the same steps, of which each rank does its part."""

from __future__ import annotations

import uuid
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from tileflash.models import AttentionFunction
from tileflash.parallel.attention import ContextAttention
from tileflash.parallel.box import Box
from tileflash.parallel.model import ParallelModel
from tileflash.parallel.pieces import Pieces
from tileflash.parallel.ranks import Ranks, is_loss_of_rank
from tileflash.train.checkpoint import load_checkpoint, read_state
from tileflash.train.config import TrainConfig
from tileflash.train.data_source import DataSource, StepBatch, validation_batches
from tileflash.train.interrupt import Interrupt
from tileflash.train.logs import Logs
from tileflash.train.looking import sample_text
from tileflash.train.optimizer import optimizer_of, set_learning_rate
from tileflash.train.saving import Saver
from tileflash.train.setup import Setup
from tileflash.train.state import MOMENTS, apply_random_states, random_states
from tileflash.train.step import IGNORED_TARGET, apply_gradients, token_loss_sum
from tileflash.train.trainer import Trainer, TrainResult

_SEALED_WITHIN_S = 2.0


class ParallelTrainer(Trainer):
    """A `Trainer` whose model, samples and optimizer are shared by `ranks`; all of them must make the same calls.

    `output` and `checkpoint` are the same on all ranks: each writes and reads its part there.
    """

    model: ParallelModel

    def __init__(
        self,
        config: TrainConfig,
        setup: Setup,
        logs: Logs,
        output: Path | None,
        checkpoint: Path | None,
        ranks: Ranks,
    ) -> None:
        self.ranks = ranks
        self.pieces: Pieces
        super().__init__(config, setup, logs, output, checkpoint)

    def _build(self, *, from_start: bool) -> None:
        model = self._whole_model(from_start=from_start)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.model = ParallelModel(
            model,
            self.ranks,
            loss_sum=token_loss_sum,
            ignored=IGNORED_TARGET,
            dtype=self.setup.dtype,
            documents=self.documents,
        )
        self.pieces = Pieces(self.model, self.ranks, shapes)
        parameters = [piece.local for piece in self.pieces]
        self.optimizer = optimizer_of(parameters, self.config.learning_rate, self.config.weight_decay)

    def _attention(self) -> AttentionFunction:
        layout, whole = self.ranks.layout, self.setup.attention
        if layout.context == 1:
            return whole
        mesh = self.ranks.token_mesh["context"]
        return ContextAttention(mesh, layout.context_kind, whole, self.config.attention_backend)

    def _open_data(self) -> DataSource:
        return DataSource(
            self.setup.training,
            self.config,
            self.setup.device,
            self.sample,
            data_rank=self.ranks.data_rank,
            data_sum=self.ranks.data_sum,
        )

    def run(self, interrupt: Interrupt) -> TrainResult:
        with warnings.catch_warnings():
            # A layer gives a view; what FSDP2 warns of would be to change it in place, which nothing here does.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
            return super().run(interrupt)

    def _interrupted(self, interrupt: Interrupt) -> bool:
        requested = self.ranks.any(interrupt.requested)
        if requested and not interrupt.requested:
            self.logs.say("another rank was told to end: so do all")
        return requested

    def _compute(self, batch: StepBatch, rate: float) -> torch.Tensor:
        set_learning_rate(self.optimizer, rate)
        loss = self.model.step(batch.tokens, batch.targets, max(batch.valid_tokens, 1))
        self.pieces.take_gradients()
        norm, loss = self.pieces.gradient_norm_and_loss(loss)
        return apply_gradients(
            [piece.local for piece in self.pieces if piece.local.grad is not None],
            self.optimizer,
            loss,
            norm,
            gradient_clip=self.config.gradient_clip,
            limits=self.guard.limits(),
        )

    @torch.no_grad()
    def _validate(self) -> None:
        """The same batches as one rank would look at, dealt out among the data ranks."""
        assert self.setup.validation is not None  # `open_data` saw to it
        device, ranks = self.setup.device, self.ranks
        sums = torch.zeros(2, dtype=torch.float64, device=device)  # losses, valid tokens
        batches = list(validation_batches(self.setup.validation, self.config, torch.device("cpu")))
        data = ranks.layout.data
        for start in range(0, len(batches), data):
            index = start + ranks.data_rank
            counts = index < len(batches)
            # All ranks must make the same calls: one with no batch left looks at the last again, for nothing.
            tokens, targets = (part.to(device) for part in batches[index if counts else -1])
            loss = self.model(tokens, targets)
            if counts:
                # Of a sequence that several ranks share each has a part of the loss; its tokens are counted once.
                valid = (targets != IGNORED_TARGET).sum().double() / ranks.layout.context
                sums += torch.stack([loss.double(), valid])
        dist.all_reduce(sums, group=ranks.replica_group)
        self.logs.validation(self.step, float(sums[0] / sums[1]))

    def _write_sample(self) -> None:
        # Every rank draws the same text, from generators in the same state: the model is in use on all of them.
        text, error = sample_text(self.model, self.setup, self.config, self.step)
        self.logs.sample(self.step, text, error)

    def _weights_are_finite(self) -> bool:
        return not self.ranks.any(any(not bool(piece.local.isfinite().all()) for piece in self.pieces))

    def _saver(self, output: Path) -> Saver:
        run = self.ranks.share(uuid.uuid4().hex[:8])
        return Saver(output, self.config.keep, group=self.ranks.new_group(), run=run)

    def _wait_after_s(self, error: Exception) -> float:
        # Without a rank that is gone no save can be ended but one that was just being sealed; others may wait for this one to go.
        return _SEALED_WITHIN_S if is_loss_of_rank(error) else super()._wait_after_s(error)

    def _stored(self) -> dict[str, list[Box]]:
        stored = self._boxes(to_write=True)
        if self.ranks.is_first:
            states = random_states(self.setup.device)
            stored |= {name: [Box.whole(state)] for name, state in states.items()}
        return stored

    def _boxes(self, *, to_write: bool) -> dict[str, list[Box]]:
        """Of weights and moments what this rank has, or what of it this rank writes. Moments are made if there are none."""
        pieces = self.pieces
        boxes_of = pieces.boxes_to_write if to_write else pieces.boxes
        boxes: dict[str, list[Box]] = {}
        for piece in pieces:
            moments = self.optimizer.state[piece.local]
            if not moments:
                moments["step"] = torch.zeros((), dtype=torch.float32, device=piece.local.device)
                moments.update({moment: torch.zeros_like(piece.local.detach()) for moment in MOMENTS})
            boxes[f"model.{piece.name}"] = boxes_of(piece, piece.local)
            for moment in MOMENTS:
                boxes[f"optimizer.{piece.name}.{moment}"] = boxes_of(piece, moments[moment])
            if not to_write or pieces.writes_once(piece):
                boxes[f"optimizer.{piece.name}.step"] = [Box.whole(moments["step"])]
        return boxes

    @torch.no_grad()
    def _restore(self, checkpoint: Path) -> None:
        device = self.setup.device
        boxes = self._boxes(to_write=False)
        same_device = read_state(checkpoint)["device"] == device.type
        random = random_states(device) if same_device else {}
        stored = boxes | {name: [Box.whole(state)] for name, state in random.items()}
        state = self.ranks.together(lambda: load_checkpoint(checkpoint, stored))
        if random:
            apply_random_states(random, device)
        self._go_on(checkpoint, state)
