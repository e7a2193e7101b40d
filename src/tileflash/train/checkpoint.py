"""Checkpoints that a kill at any moment cannot spoil: written aside, made durable, sealed by a manifest, then renamed.

A checkpoint is a directory `checkpoint_step_000100`:
    tensors/        weights, optimizer moments, random states, by torch.distributed.checkpoint
    state.json      everything else: step, data position, settings, the model's configuration
    manifest.json   size and SHA-256 of each file above; written last
A directory without a manifest, or whose files do not match it, is not complete and is never read. Like every PyTorch
checkpoint, `tensors/` holds pickled metadata: load only what you trust.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tileflash.files import flush
from tileflash.train.errors import CheckpointError

_MANIFEST = "manifest.json"
_STATE = "state.json"
_TENSORS = "tensors"
_ASIDE = ".tmp-"
_NAME = re.compile(r"checkpoint_step_(\d+)")
_FORMAT = 1


def save_checkpoint(
    output: Path, step: int, tensors: dict[str, torch.Tensor], state: dict[str, Any], keep: int
) -> Path:
    """Write a checkpoint of `step` to `output` and remove all but the last `keep`; return where it lies.

    `tensors` may lie on any device and are written one after the other. CheckpointError if the disk does not take it:
    what was there before is untouched.
    """
    final = output / f"checkpoint_step_{step:06d}"
    aside = output / f"{_ASIDE}{final.name}"
    try:
        aside.mkdir(parents=True)
        _write(aside, tensors, {"format": _FORMAT, "step": step, **state})
        _remove(final)  # there only if it is not complete, or of a past that was resumed before it
        os.rename(aside, final)
        flush(output)
    except BaseException as error:  # torch.distributed.checkpoint's own is no Exception
        shutil.rmtree(aside, ignore_errors=True)  # a full disk has room again for the run's log
        cause = next((cause for cause in _causes(error) if isinstance(cause, OSError | KeyboardInterrupt)), None)
        if not isinstance(cause, OSError):
            raise cause or error from None
        raise CheckpointError(
            f"could not save the checkpoint of step {step} to {output}: {cause.strerror or cause}. Earlier checkpoints "
            f"are untouched; it needs {_size_bytes(tensors) / 1e9:.2f} GB, "
            f"{shutil.disk_usage(output).free / 1e9:.2f} GB are free"
        ) from error
    for _, old in checkpoints(output)[:-keep]:
        _remove(old)
    return final


def load_checkpoint(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Read the checkpoint at `path` into `tensors`, in place; return its state.

    CheckpointError unless all their names and shapes are in it.
    """
    from torch.distributed import checkpoint as distributed_checkpoint
    from torch.distributed.checkpoint.api import CheckpointException

    reader = distributed_checkpoint.FileSystemReader(path / _TENSORS)
    try:
        with _quiet():
            distributed_checkpoint.load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        causes = "; ".join(f"{type(cause).__name__}: {cause}" for cause in _causes(error) if cause is not error)
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
    for name, (size_bytes, digest) in expected.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size_bytes:
            return f"{name} has {file.stat().st_size} bytes instead of {size_bytes}"
        if _sha256(file) != digest:
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


def _write(aside: Path, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
    from torch.distributed import checkpoint as distributed_checkpoint

    writer = distributed_checkpoint.FileSystemWriter(aside / _TENSORS, sync_files=True)
    with _quiet():
        distributed_checkpoint.save(tensors, storage_writer=writer, no_dist=True)
    _write_json(aside / _STATE, state)
    files = sorted(path for path in aside.rglob("*") if path.is_file())
    entries = {str(path.relative_to(aside)): {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files}
    flush(aside / _TENSORS)
    _write_json(aside / _MANIFEST, {"format": _FORMAT, "files": entries})
    flush(aside)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without PyTorch's warning that there is one process: `no_dist` says so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


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


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _size_bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _causes(error: BaseException) -> Iterator[BaseException]:
    """`error` and all that led to it; torch.distributed.checkpoint and torch.save wrap errors in their own."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        failures: Iterable[Any] = getattr(current, "failures", {}).values()  # of each rank: (error, its traceback)
        pending += [current.__cause__, current.__context__, *(failure[0] for failure in failures)]
