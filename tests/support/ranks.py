"""Several ranks on this machine's CPU: tiny models trained by processes that agree over gloo, as torchrun starts them."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch.distributed.checkpoint import FileSystemReader

from tileflash.train import TrainConfig, train
from tileflash.train.checkpoint import checkpoints, load_checkpoint

ROOT = Path(__file__).parents[2]

# 257 rows of the vocabulary divide by no number of ranks; with padding some rank has rows that must not count.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2-tiny", {"vocab_size": 257, "vocab_multiple": 4}),
    "gpt2-odd-vocabulary": ("gpt2-tiny", {"vocab_size": 257, "vocab_multiple": 1}),
    "gpt2-50257": ("gpt2-tiny", {"vocab_size": 50257, "vocab_multiple": 1, "n_layer": 1, "n_embd": 8}),
    "gpt2-4-layers": ("gpt2-tiny", {"vocab_size": 257, "vocab_multiple": 4, "n_layer": 4}),
    "llama3-5-layers": ("llama3-tiny", {"vocab_size": 257, "n_kv_head": 2, "intermediate_size": 48, "n_layer": 5}),
    "llama3": ("llama3-tiny", {"vocab_size": 257, "n_kv_head": 2, "intermediate_size": 48}),
    "llama3-untied": ("llama3-tiny", {"vocab_size": 257, "n_kv_head": 4, "intermediate_size": 48, "tied": False}),
}
FLASH: dict[str, Any] = {"flash": True, "attention_backend": "tiled"}  # Triton's interpreter would take minutes
DOCUMENTS: dict[str, Any] = {**FLASH, "separate_documents": True, "tokenizer": "bytes"}
_SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 32, "max_sequence_length": 32}

Job = tuple[str, TrainConfig]


def config(model: str, tokens: Path, **changes: Any) -> TrainConfig:
    """A run of a tiny model; 8 samples a step in 2 micro-batches, however many data ranks share them.

    "..., documents" are runs in which documents do not see each other.
    """
    name, _, documents = model.partition(", ")
    preset, overrides = MODELS[name]
    samples = 4 // changes.get("data_parallel", 1)
    settings: dict[str, Any] = {
        "model": preset,
        "model_overrides": {**_SIZES, **overrides},
        "input_bin": str(tokens),
        "batch_size": samples,
        "sequence_length": 16,
        "total_batch_size": 8 * 16,
        "num_iteration": 20,
        "learning_rate": 5e-3,  # at 1e-2 rounding alone changes what deeper models do
        "device": "cpu",
        "tensorboard": False,
    }
    return TrainConfig(**{**settings, **(DOCUMENTS if documents else {}), **changes})


def model_arguments(tokens: Path, *more: object) -> list[object]:
    """The command line's arguments for a run of one layer on `tokens`."""
    sizes = ["n_layer=1", "n_head=2", "n_embd=32"]
    model = ["gpt2-tiny", *(word for size in sizes for word in ("--model-override", size))]
    return [*model, "--input-bin", tokens, "--device", "cpu", "--sequence-length", 16, "--no-tensorboard", *more]


def free_port() -> int:
    """A TCP port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in numbers.items()}}


def run_ranks(world: int, jobs: Sequence[Job], prepare: Callable[[int], None] | None = None) -> None:
    """Do `jobs`, one after the other, in `world` processes that keep one process group for all of them.

    `prepare` (a function of a module, for it is sent to the processes) is called in each with its rank.
    """
    in_ranks(world, _train, list(jobs), prepare)


def in_ranks(world: int, work: Callable[..., None], *arguments: Any) -> None:
    """`work(rank, *arguments)` in `world` processes with a process group; `work` is a function of a module."""
    _server()
    torch.multiprocessing.start_processes(
        _rank, (world, free_port(), work, arguments), nprocs=world, start_method="forkserver"
    )


def _train(rank: int, jobs: list[Job], prepare: Callable[[int], None] | None) -> None:
    if prepare is not None:
        prepare(rank)
    for name, job in jobs:
        try:
            assert train(job).status == "finished"
        except BaseException:
            traceback.print_exc()
            raise RuntimeError(f"rank {rank}: {name}") from None


def _rank(rank: int, world: int, port: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    import torch.distributed as dist

    os.environ.update(environment(rank, world, port))
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    gc.unfreeze = lambda: None  # a run would thaw what the server froze, and the next look through it all
    dist.init_process_group("gloo")
    work(rank, *arguments)
    dist.barrier()
    # The processes end here: a process group's threads may not outlive the interpreter.
    dist.destroy_process_group()
    os._exit(0)


class CommandLine:
    """`tileflash train ARGUMENTS` as one rank, in a process of its own."""

    def __init__(self, rank: int, world: int, port: int, arguments: list[str], script: str, directory: Path) -> None:
        self._outputs = [directory / f"{rank}.{name}" for name in ("stdout", "stderr")]
        self._process = _server().Process(
            target=_command_line, args=(rank, world, port, arguments, script, self._outputs)
        )
        self._process.start()

    def kill(self) -> None:
        """By SIGKILL."""
        self._process.kill()

    def end(self, timeout_s: float) -> tuple[int | None, str, str]:
        """(exit status, that of a signal negative, stdout, stderr); None where it has not ended by then, and is killed."""
        self._process.join(timeout_s)
        status = self._process.exitcode
        self._process.kill()
        self._process.join()
        out, error = (path.read_text() for path in self._outputs)
        return status, out, error


def start_ranks(world: int, arguments: Sequence[object], directory: Path, script: str = "") -> list[CommandLine]:
    """`tileflash train ARGUMENTS` as `world` processes, without torchrun's agent, which would end them itself.

    `script` is Python that each of them runs before; what they print goes to files in `directory`.
    """
    port = free_port()
    return [CommandLine(rank, world, port, [*map(str, arguments)], script, directory) for rank in range(world)]


def _command_line(rank: int, world: int, port: int, arguments: list[str], script: str, outputs: list[Path]) -> None:
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.update(environment(rank, world, port))
    torch.set_num_threads(1)
    sys.argv = ["tileflash", "train", *arguments]
    exec(script, {})
    from tileflash.cli import main

    main()


def _server() -> Any:
    """Where processes come from: forks of one that has imported what all of them need, which would take each of them seconds."""
    multiprocessing.set_forkserver_preload(["torch", "tileflash.train.parallel_trainer", "support.preloaded"])
    return multiprocessing.get_context("forkserver")


def steps(log: Path) -> list[dict[str, Any]]:
    """The events `step` of a log."""
    return [event for event in map(json.loads, log.read_text().splitlines()) if event["event"] == "step"]


def tensors_of(output: Path, step: int) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint of `step` but the random states."""
    path = dict(checkpoints(output))[step]
    stored = FileSystemReader(path / "tensors").read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)  # type: ignore[union-attr]
        for name, entry in stored.items()
    }
    load_checkpoint(path, tensors)
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("random.")}
