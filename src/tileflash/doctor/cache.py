"""Triton's cache of compiled kernels: where it is, how large, whether it can be written, how to empty it."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tileflash.doctor.problem import Problem

_LOW_BYTES = 2**30  # a model's kernels take some ten MiB; below this the rest of the machine suffers, too


@dataclass(frozen=True)
class KernelCache:
    """`bytes` and `files` are 0 where the directory does not exist yet; `error` is the system's words where it cannot be written."""

    directory: str
    exists: bool
    bytes: int
    files: int
    writable: bool
    free_bytes: int | None
    empty_command: str
    error: str = ""

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def cache_directory() -> Path:
    """As Triton decides: TRITON_CACHE_DIR, else .triton/cache in TRITON_HOME, else in the home directory."""
    if directory := os.environ.get("TRITON_CACHE_DIR"):
        return Path(directory)
    return Path(os.environ.get("TRITON_HOME") or os.path.expanduser("~/")) / ".triton" / "cache"


def inspect_cache() -> KernelCache:
    """Look at the cache; nothing stays changed."""
    directory = cache_directory()
    total = files = 0
    for place, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
                files += 1
            except OSError:  # another process has removed it
                continue
    # Triton makes the directory when it needs it: what counts is the nearest parent that exists.
    existing = next((place for place in (directory, *directory.absolute().parents) if place.exists()), Path("/"))
    error = ""
    try:
        with tempfile.TemporaryFile(dir=existing, prefix="tileflash-doctor-") as file:
            file.write(b"1")
    except OSError as problem:
        error = f"{type(problem).__name__}: {problem}"
    try:
        free = shutil.disk_usage(existing).free
    except OSError:
        free = None
    command = f"rm -rf {shlex.quote(str(directory))}"
    return KernelCache(str(directory), directory.is_dir(), total, files, not error, free, command, error)


def cache_problems(cache: KernelCache) -> list[Problem]:
    """What is wrong with it."""
    found = []
    if not cache.writable:
        what = f"Triton cannot write compiled kernels to {cache.directory}"
        fix = "export TRITON_CACHE_DIR=/tmp/triton-cache-$USER"
        found.append(Problem("cache.not-writable", "kernel cache", "error", what, fix, cache.error))
    if cache.free_bytes is not None and cache.free_bytes < _LOW_BYTES:
        what = f"only {cache.free_bytes / 2**20:,.0f} MiB are free where kernels are cached ({cache.directory})"
        fix = cache.empty_command if cache.bytes else "export TRITON_CACHE_DIR=/path/on/a/larger/disk"
        found.append(Problem("cache.disk-full", "kernel cache", "warning", what, fix))
    return found
