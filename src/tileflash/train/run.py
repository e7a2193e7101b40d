"""A run from its settings to its end, whatever the end is: what is opened is closed, and the log says how it ended."""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from tileflash.environment import environment
from tileflash.models import parameter_count
from tileflash.parallel.layout import Layout
from tileflash.parallel.ranks import Alone, Ranks, join, restarts_from_environment
from tileflash.train.checkpoint import read_state
from tileflash.train.config import TrainConfig
from tileflash.train.errors import RankLostError, TrainingOutOfMemoryError, is_out_of_memory, out_of_memory_message
from tileflash.train.interrupt import Interrupt
from tileflash.train.logs import JsonLog, Logs, Silence, TensorBoardLog, Terminal
from tileflash.train.output import Output
from tileflash.train.setup import Setup, prepare_setup, rank_device
from tileflash.train.state import check_same_model, differences, model_facts
from tileflash.train.trainer import Trainer, TrainResult

_DEFAULTS = {
    # Settings that are younger than a checkpoint were as they are by default.
    setting.name: setting.default
    for setting in dataclasses.fields(TrainConfig)
    if setting.default is not dataclasses.MISSING
}


def layout_of(config: TrainConfig) -> Layout:
    """How the ranks of a run share the work."""
    return Layout(
        data=config.data_parallel,
        tensor=config.tensor_parallel,
        sequence_parallel=config.sequence_parallel,
        zero_stage=config.zero_stage,
        context=config.context_parallel,
        context_kind=config.context_parallel_kind,
        pipeline=config.pipeline_parallel,
        schedule=config.pipeline_schedule,
    )


def run(config: TrainConfig) -> TrainResult:
    """See `tileflash.train.train`."""
    layout = layout_of(config)
    layout.check_micro_batches(config.micro_batches)
    ranks = join(layout, functools.partial(rank_device, config.device), config.rank_timeout)
    try:
        return _run(config, ranks)
    except RankLostError:
        raise
    except Exception as error:  # this rank's own, or of what stands around the training
        lost = ranks.loss_of_rank(error)
        if lost is None:
            raise
        raise RankLostError(lost) from error


def _run(config: TrainConfig, ranks: Alone | Ranks) -> TrainResult:
    layout = ranks.layout
    terminal = (Terminal if ranks.is_first else Silence)(config.num_iteration, layout.label)
    with ExitStack() as stack:
        stack.enter_context(_deterministic(config.deterministic))
        stack.enter_context(ranks)
        output = Output(config, terminal.say, restarted=restarts_from_environment() > 0)
        ranks.first(lambda: stack.enter_context(output))
        setup = ranks.in_turn(lambda: prepare_setup(config, layout, ranks.local_rank))
        output.checkpoint = ranks.share(output.checkpoint)
        output.check_seen(ranks)
        logs = stack.enter_context(_logs(config, setup, output, terminal, ranks))
        interrupt = stack.enter_context(Interrupt(terminal, saves=output.path is not None))
        _introduce(config, setup, logs, ranks)
        try:
            trainer = _trainer(config, setup, logs, output.path, output.checkpoint, ranks)
            terminal.start(trainer.step)
            with _settled_objects():
                result = trainer.run(interrupt)
        except BaseException as error:
            status, told = _ending(error, config, setup, ranks)
            logs.end(status, str(told) or type(told).__name__)
            if told is error:
                raise
            raise told from error
        logs.end(result.status, result.message)
        logs.say(result.message)
        return result


@contextmanager
def _logs(
    config: TrainConfig, setup: Setup, output: Output, terminal: Terminal, ranks: Alone | Ranks
) -> Iterator[Logs]:
    """The run's logs, begun; those of other ranks than the first write nothing."""

    def begin() -> Logs:
        at = output.checkpoint
        resumed_step = None if at is None else _check_checkpoint(at, config, setup, terminal)
        begun = Logs(
            terminal,
            JsonLog(output.log_path, say=terminal.say, resumed_step=resumed_step),
            TensorBoardLog(output.tensorboard_path, say=terminal.say, resumed_step=resumed_step),
        )
        begun.start({**_facts(config, setup), "resumed_step": resumed_step})
        return begun

    logs = ranks.first(begin) or Logs(terminal, JsonLog(None), TensorBoardLog(None, say=terminal.say))
    try:
        yield logs
    finally:
        logs.close()


def _trainer(
    config: TrainConfig, setup: Setup, logs: Logs, output: Path | None, checkpoint: Path | None, ranks: Alone | Ranks
) -> Trainer:
    if isinstance(ranks, Alone):
        return Trainer(config, setup, logs, output, checkpoint)
    from tileflash.train.parallel_trainer import ParallelTrainer  # with it come FSDP2 and DTensor, a second of imports

    return ParallelTrainer(config, setup, logs, output, checkpoint, ranks)


def _check_checkpoint(checkpoint: Path, config: TrainConfig, setup: Setup, terminal: Terminal) -> int:
    """The step of the checkpoint to go on from; ValueError if it is of another model. Changed settings are told."""
    state = read_state(checkpoint)
    check_same_model(state["model"], model_facts(setup.model), checkpoint)
    places = ("output", "resume", "load", "log_json")
    before, now = (
        {name: value for name, value in settings.items() if name not in places}
        for settings in ({**_DEFAULTS, **state["config"]}, config.as_dict())
    )
    changed = differences(before, now)
    if changed:
        terminal.say(f"changed since {checkpoint.name}: {'; '.join(changed)}")
    return int(state["step"])


def _ending(error: BaseException, config: TrainConfig, setup: Setup, ranks: Alone | Ranks) -> tuple[str, BaseException]:
    """The status of a run that `error` ended, and the error to raise."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", KeyboardInterrupt("ended at once, nothing saved since the last checkpoint")
    if is_out_of_memory(error):
        return "out_of_memory", TrainingOutOfMemoryError(out_of_memory_message(error, config, setup.device))
    lost = ranks.loss_of_rank(error)
    return "failed", error if lost is None else RankLostError(lost)


def _facts(config: TrainConfig, setup: Setup) -> dict[str, Any]:
    return {
        "model": config.model,
        "config": config.as_dict(),
        "environment": environment(setup.device),
        "parameters": parameter_count(setup.model),
        "device": str(setup.device),
        "dtype": str(setup.dtype).removeprefix("torch."),
        "cuda_graph": setup.cuda_graph,
        "attention": setup.attention_name,
        "tokenizer": None if setup.tokenizer is None else setup.tokenizer.name,
    }


def _introduce(config: TrainConfig, setup: Setup, logs: Logs, ranks: Alone | Ranks) -> None:
    dtype = str(setup.dtype).removeprefix("torch.")
    where = torch.cuda.get_device_name(setup.device) if setup.device.type == "cuda" else "CPU"
    logs.say(f"model: {config.model}, {parameter_count(setup.model):,} parameters, {dtype} on {where}")
    documents = "" if setup.document_start is None else f", of documents that begin at token {setup.document_start}"
    logs.say(f"attention: {setup.attention_name}{documents}")
    if config.fused_operators:
        logs.say("operators: fused, and logits never whole (docs/operators.md)")
    if config.master_weights == "split":
        logs.say(f"weights: bfloat16, their masters in 16 more bits; gradients summed in {config.gradient_dtype}")
    if config.compile:
        logs.say("layers: compiled in the first step, which takes longer")
    layout = ranks.layout
    times_data = f"{layout.data} x " if layout.data > 1 else ""
    logs.say(
        f"data: {setup.training.name}, {len(setup.training):,} tokens; a step takes {config.step_tokens:,} "
        f"({times_data}{config.micro_batches} x {config.batch_size} x {config.sequence_length})"
    )
    if isinstance(ranks, Ranks):
        logs.say(f"ranks: {layout.ranks} ({layout.label})")
        if ranks.tensor_crosses_hosts:
            logs.say("warning: tensor ranks of one group are on several hosts: every layer waits for the network")
    for note in setup.notes:
        logs.say(f"note: {note}")


@contextmanager
def _settled_objects() -> Iterator[None]:
    """Keep what exists by now (modules, the model) out of Python's garbage collections, which otherwise visit it all, mid-step."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Let PyTorch use only operators that give the same bits each time, and fail where there is none."""
    if not wanted:
        yield
        return
    # cuBLAS shares one scratch memory between streams, and then the order of its sums may vary; its manual names two
    # settings that exclude this, and PyTorch demands one of them. It is read when cuBLAS first runs, so it is set here.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
