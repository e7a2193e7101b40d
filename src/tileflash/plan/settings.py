"""From the settings of `tileflash train` to what is planned: nothing is read, and no device is asked for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from tileflash.models import model_config
from tileflash.parallel.layout import Layout
from tileflash.plan.count import StepShape
from tileflash.plan.layouts import layouts_for
from tileflash.train.config import TrainConfig
from tileflash.train.run import layout_of

_PARALLEL = ("data_parallel", "tensor_parallel", "context_parallel", "pipeline_parallel")


@dataclass(frozen=True)
class Request:
    """What to plan: layouts, each with the step of one of its data ranks. `named`: the one that the settings name, no choice."""

    layouts: tuple[tuple[StepShape, Layout], ...]
    named: bool


def request_of(config: TrainConfig, world: int | None, gpus_per_host: int) -> Request:
    """The layout that `config` names; with a `world` and none named, all that `world` ranks can have, each with the same step.

    That step has `total_batch_size` tokens; where that is not set, `batch_size` samples a rank. ValueError names what does not fit.
    """
    overrides = dict(config.model_overrides)
    model = model_config(config.model, **overrides)
    if config.init_from is not None:
        raise ValueError(
            "init_from is set: a plan reads no weights; name the preset, with --model-override where it differs"
        )
    if config.sequence_length > model.max_sequence_length:
        if "max_sequence_length" in overrides:
            raise ValueError(
                f"sequence_length is {config.sequence_length} and max_sequence_length {model.max_sequence_length}"
            )
        model = dataclasses.replace(model, max_sequence_length=config.sequence_length)
    shape = StepShape(
        model, config.batch_size, config.sequence_length, config.micro_batches, config.flash, config.fused_operators,
        torch.float32 if config.dtype == "float32" else torch.bfloat16,
    )  # fmt: skip
    layout = layout_of(config)
    named = world is None or any(getattr(config, name) > 1 for name in _PARALLEL)
    if named:
        if world is not None:
            layout.check_world(world)
        return Request(((shape, layout),), True)
    assert world is not None
    if world < 1:
        raise ValueError(f"`--world` was {world}; it must be at least 1")
    samples = config.batch_size * world
    if config.total_batch_size is not None:
        samples = config.total_batch_size // config.sequence_length
    found = tuple(layouts_for(shape, world, gpus_per_host, samples)) if world > 1 else ((shape, layout),)
    if not found:
        raise ValueError(
            f"`--world` was {world}: no layout of so many ranks has whole samples in a step of {samples} of them; another "
            "--total-batch-size or --batch-size would do"
        )
    return Request(found, False)
