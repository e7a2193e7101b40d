"""Checkpoints that a kill at any moment cannot spoil: written aside, made durable, sealed by a manifest, then renamed.

A checkpoint is a directory `checkpoint_step_000100`:
    tensors/        weights, optimizer moments, random states, by torch.distributed.checkpoint: a file of each rank, and
                    `.metadata`, which says what lies where
    state.json      everything else: step, data position, settings, the model's configuration
    manifest.json   size and SHA-256 of each file above; written last
Tensors have their names in the whole model and their whole shapes, so any layout reads what any other has written.

A directory without a manifest, or whose files do not match it, is not complete and is never read. Like every PyTorch
checkpoint, `tensors/` holds pickled metadata: load only what you trust.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tileflash.files import Seal, flush, sha256
from tileflash.parallel.box import Box
from tileflash.train.errors import CheckpointError, causes_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Stored = Mapping[str, "torch.Tensor | list[Box]"]  # a tensor alone is all of what it is called

_MANIFEST = "manifest.json"
_STATE = "state.json"
_TENSORS = "tensors"
_ASIDE = ".tmp-"
_NAME = re.compile(r"checkpoint_step_(\d+)")
_FORMAT = 1


def save_checkpoint(
    output: Path,
    step: int,
    stored: Stored,
    state: dict[str, Any],
    keep: int,
    *,
    group: ProcessGroup | None = None,
    run: str = "",
) -> Path:
    """Write a checkpoint of `step` to `output` and remove all but the last `keep`; return where it lies.

    With a `group` (of gloo) all of its ranks call, each with the boxes that it writes: together every tensor once. They
    must see `output` all. `state` is the first rank's; `run`, the same on all, sets what they write apart from what is
    left of another run. `stored` may lie on any device.

    CheckpointError, on all ranks, if the disk of any does not take it: what was there before is untouched.
    """
    from torch.distributed import checkpoint as distributed_checkpoint

    from tileflash.train.checkpoint_format import BoxSavePlanner, SealingWriter

    final = output / f"checkpoint_step_{step:06d}"
    aside = output / f"{_ASIDE}{final.name}{run and '-'}{run}"
    coordinates = group is None or group.rank() == 0

    def seal(seals: list[Seal]) -> None:
        _seal(aside, seals, {"format": _FORMAT, "step": step, **state})
        _remove(final)  # there only if it is not complete, or of a past that was resumed before it
        os.rename(aside, final)
        flush(output)

    boxes = _as_boxes(stored)
    try:
        distributed_checkpoint.save(
            boxes,
            storage_writer=SealingWriter(aside / _TENSORS, seal),
            planner=BoxSavePlanner(),
            process_group=group,
            no_dist=group is None,
        )
    except BaseException as error:  # torch.distributed.checkpoint's own is no Exception
        if coordinates:
            shutil.rmtree(aside, ignore_errors=True)  # a full disk has room again for the run's log
        causes = list(causes_of(error))
        refused = next((cause for _, cause in causes if isinstance(cause, OSError)), None)
        if refused is None:
            of_ranks = [failure[0] for failure in getattr(error, "failures", {}).values()]
            raise next(iter(of_ranks), error) from None
        ranks = sorted({rank for rank, cause in causes if isinstance(cause, OSError) and rank is not None})
        where = f"rank {', '.join(map(str, ranks))}: " if group is not None and ranks else ""
        part = "it needs" if group is None else "this rank's part is"
        raise CheckpointError(
            f"could not save the checkpoint of step {step} to {output}: {where}{refused.strerror or refused}. Earlier "
            f"checkpoints are untouched; {part} {_size_bytes(boxes) / 1e9:.2f} GB, "
            f"{shutil.disk_usage(output).free / 1e9:.2f} GB are free"
        ) from error
    if coordinates:
        for _, old in checkpoints(output)[:-keep]:
            _remove(old)
    return final


def load_checkpoint(path: Path, stored: Stored) -> dict[str, Any]:
    """Read the checkpoint at `path` into `stored`, in place; return its state.

    Every rank reads for itself. CheckpointError unless all names and shapes are in it.
    """
    from torch.distributed import checkpoint as distributed_checkpoint
    from torch.distributed.checkpoint.api import CheckpointException

    from tileflash.train.checkpoint_format import BoxLoadPlanner

    reader = distributed_checkpoint.FileSystemReader(path / _TENSORS)
    try:
        with as_one_process():
            distributed_checkpoint.load(
                _as_boxes(stored), storage_reader=reader, planner=BoxLoadPlanner(), no_dist=True
            )
    except CheckpointException as error:
        causes = "; ".join(f"{type(cause).__name__}: {cause}" for _, cause in causes_of(error) if cause is not error)
        raise CheckpointError(f"{path} cannot be read: {causes}") from error
    return read_state(path)


def read_state(path: Path) -> dict[str, Any]:
    """The part of a checkpoint that is no tensors."""
    return json.loads((path / _STATE).read_text(encoding="utf-8"))


def find_checkpoint(path: Path, say: Callable[[str], None]) -> Path | None:
    """The checkpoint to go on from: `path` itself, or the last complete one in it; None if it holds none at all.

    What is not complete is told to `say` and passed over. CheckpointError if there are some and none is complete, or if
    `path` itself is one and is not.
    """
    if _NAME.fullmatch(path.name):
        fault = find_fault(path)
        if fault is not None:
            raise CheckpointError(f"{path} is not a complete checkpoint: {fault}")
        return path
    candidates = checkpoints(path)
    for _, candidate in reversed(candidates):
        fault = find_fault(candidate)
        if fault is None:
            return candidate
        say(f"warning: {candidate} is not a complete checkpoint and is not used: {fault}")
    if candidates:
        raise CheckpointError(f"none of the {len(candidates)} checkpoints in {path} is complete")
    return None


def find_fault(path: Path) -> str | None:
    """What is wrong with the checkpoint at `path`; None if every file is there, as long as it was and unchanged."""
    if not path.is_dir():
        return "there is no such directory"
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        expected = {name: (int(facts["bytes"]), str(facts["sha256"])) for name, facts in manifest["files"].items()}
        version = manifest["format"]
    except FileNotFoundError:
        return f"it has no {_MANIFEST} (it was being written when the run ended)"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{_MANIFEST} is damaged ({error})"
    if version != _FORMAT:
        return f"it is of format {version}; this version of tileflash reads format {_FORMAT}"
    for name, (size_bytes, _) in expected.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size_bytes:
            return f"{name} has {file.stat().st_size} bytes instead of {size_bytes}"
    with ThreadPoolExecutor(max_workers=8) as pool:  # a file of each rank, and hashing lets other threads run
        digests = pool.map(lambda name: sha256(path / name), expected)
        for (name, (_, digest)), found in zip(expected.items(), digests, strict=True):
            if found != digest:
                return f"{name} has changed since it was written (its SHA-256 differs)"
    return None


def checkpoints(output: Path) -> list[tuple[int, Path]]:
    """(step, directory) of each checkpoint in `output`, complete or not, by rising step."""
    if not output.is_dir():
        return []
    found = [(match, path) for path in output.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    return sorted((int(match.group(1)), path) for match, path in found)


def remove_leftovers(output: Path) -> None:
    """Delete what a killed run was writing or deleting in `output`."""
    for path in output.glob(f"{_ASIDE}*"):
        shutil.rmtree(path)


def remove_after(output: Path, step: int) -> None:
    """Delete checkpoints of steps after `step`: they belong to a past that a run resumed at `step` writes anew."""
    for later, path in checkpoints(output):
        if later > step:
            _remove(path)


@contextmanager
def as_one_process() -> Iterator[None]:
    """Without PyTorch's warning, at each checkpoint, that there is one process: `no_dist` says so. Not for threads but the first."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _seal(aside: Path, seals: list[Seal], state: dict[str, Any]) -> None:
    """Write what stands beside the ranks' files, whose seals are given, and the manifest of all."""
    _write_json(aside / _STATE, state)
    entries = {f"{_TENSORS}/{seal.name}": seal for seal in [*seals, Seal.of(aside / _TENSORS / ".metadata")]}
    entries[_STATE] = Seal.of(aside / _STATE)
    files = {name: {"bytes": seal.size_bytes, "sha256": seal.sha256} for name, seal in sorted(entries.items())}
    flush(aside / _TENSORS)
    _write_json(aside / _MANIFEST, {"format": _FORMAT, "files": files})
    flush(aside)


def _as_boxes(stored: Stored) -> dict[str, list[Box]]:
    return {name: value if isinstance(value, list) else [Box.whole(value)] for name, value in stored.items()}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    """Delete a checkpoint; it loses its name first, so that a kill amid this leaves no half of one under it."""
    if not path.exists():
        return
    doomed = path.with_name(f"{_ASIDE}deleted-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def _size_bytes(boxes: Mapping[str, list[Box]]) -> int:
    return sum(box.tensor.numel() * box.tensor.element_size() for of_name in boxes.values() for box in of_name)
