"""The step that a plan counts, by true ranks on true memory."""

from __future__ import annotations

import json
from pathlib import Path

from tileflash.models import build_model, unfused_attention
from tileflash.parallel.layout import Layout
from tileflash.parallel.model import ParallelModel
from tileflash.parallel.pieces import Pieces
from tileflash.parallel.ranks import Ranks
from tileflash.plan.count import StepShape
from tileflash.plan.count_ranks import count_step_of
from tileflash.plan.tracker import StepTracker
from tileflash.train.step import IGNORED_TARGET, token_loss_sum


def count(rank: int, jobs: list[tuple[StepShape, Layout]], path: Path) -> None:
    """Write the peak of each job, and the bytes that it sends, as rank 0 has them."""
    found = []
    for shape, layout in jobs:
        with Ranks(layout, "cpu", 60.0) as ranks:
            whole = build_model(shape.model, unfused_attention, seed=1)
            shapes = {name: parameter.shape for name, parameter in whole.named_parameters()}
            model = ParallelModel(whole, ranks, loss_sum=token_loss_sum, ignored=IGNORED_TARGET, dtype=shape.dtype)
            del whole
            pieces = Pieces(model, ranks, shapes)
            tracker = StepTracker(rounded=False)
            with tracker:
                counted = count_step_of(shape, layout, model, pieces, tracker, ranks)
            found.append((counted.peak_bytes, {axis: sent.nbytes for axis, sent in counted.messages.items()}))
    if rank == 0:
        path.write_text(json.dumps(found))
