"""A run from its settings to its end, whatever the end is: what is opened is closed, and the log says how it ended."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from tileflash.environment import environment
from tileflash.models import parameter_count
from tileflash.train.checkpoint import read_state
from tileflash.train.config import TrainConfig
from tileflash.train.errors import TrainingOutOfMemoryError, is_out_of_memory, out_of_memory_message
from tileflash.train.interrupt import Interrupt
from tileflash.train.logs import JsonLog, Logs, TensorBoardLog, Terminal
from tileflash.train.output import Output
from tileflash.train.setup import Setup, prepare_setup
from tileflash.train.state import check_same_model, differences, model_facts
from tileflash.train.trainer import Trainer, TrainResult


def run(config: TrainConfig) -> TrainResult:
    """See `tileflash.train.train`."""
    terminal = Terminal(config.num_iteration)
    with ExitStack() as stack:
        stack.enter_context(_deterministic(config.deterministic))
        output = stack.enter_context(Output(config, terminal.say))
        setup = prepare_setup(config)
        resumed_step = (
            None if output.checkpoint is None else _check_checkpoint(output.checkpoint, config, setup, terminal)
        )
        logs = Logs(
            terminal,
            JsonLog(output.log_path, say=terminal.say, resumed_step=resumed_step),
            TensorBoardLog(output.tensorboard_path, say=terminal.say, resumed_step=resumed_step),
        )
        stack.callback(logs.close)
        interrupt = stack.enter_context(Interrupt(terminal, saves=output.path is not None))
        logs.start({**_facts(config, setup), "resumed_step": resumed_step})
        _introduce(config, setup, logs)
        try:
            trainer = Trainer(config, setup, logs, output.path, output.checkpoint)
            terminal.start(trainer.step)
            with _settled_objects():
                result = trainer.run(interrupt)
        except BaseException as error:
            status, told = _ending(error, config, setup)
            logs.end(status, str(told) or type(told).__name__)
            if told is error:
                raise
            raise told from error
        logs.end(result.status, result.message)
        logs.say(result.message)
        return result


def _check_checkpoint(checkpoint: Path, config: TrainConfig, setup: Setup, terminal: Terminal) -> int:
    """The step of the checkpoint to go on from; ValueError if it is of another model. Changed settings are told."""
    state = read_state(checkpoint)
    check_same_model(state["model"], model_facts(setup.model), checkpoint)
    places = ("output", "resume", "load", "log_json")
    before, now = (
        {name: value for name, value in settings.items() if name not in places}
        for settings in (state["config"], config.as_dict())
    )
    changed = differences(before, now)
    if changed:
        terminal.say(f"changed since {checkpoint.name}: {'; '.join(changed)}")
    return int(state["step"])


def _ending(error: BaseException, config: TrainConfig, setup: Setup) -> tuple[str, BaseException]:
    """The status of a run that `error` ended, and the error to raise."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", KeyboardInterrupt("ended at once, nothing saved since the last checkpoint")
    if is_out_of_memory(error):
        return "out_of_memory", TrainingOutOfMemoryError(out_of_memory_message(error, config, setup.device))
    return "failed", error


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


def _introduce(config: TrainConfig, setup: Setup, logs: Logs) -> None:
    dtype = str(setup.dtype).removeprefix("torch.")
    where = torch.cuda.get_device_name(setup.device) if setup.device.type == "cuda" else "CPU"
    logs.say(f"model: {config.model}, {parameter_count(setup.model):,} parameters, {dtype} on {where}")
    logs.say(f"attention: {setup.attention_name}")
    if config.fused_operators:
        logs.say("operators: fused, and logits never whole (docs/operators.md)")
    logs.say(
        f"data: {setup.training.name}, {len(setup.training):,} tokens; a step takes {config.step_tokens:,} "
        f"({config.micro_batches} x {config.batch_size} x {config.sequence_length})"
    )
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
