"""Files that are either whole or not there."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple


@contextmanager
def written_aside(*paths: Path) -> Iterator[list[Path]]:
    """Gives one temporary path beside each of `paths`; when the block ends well, all take their names.

    Each file is on the disk before any is renamed, so a kill or a full disk leaves what was there before. When the
    block raises, the temporary files are removed.
    """
    temporary = [path.with_name(f".{path.name}.{os.getpid()}.partial") for path in paths]
    try:
        yield temporary
        for path in temporary:
            flush(path)
        for path, final in zip(temporary, paths, strict=True):
            os.replace(path, final)
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Have what is written to `path` on the disk; of a directory: the names in it, which a rename alone does not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Seal(NamedTuple):
    """A file as it was written: its name, its size, the SHA-256 of its bytes in hexadecimal."""

    name: str
    size_bytes: int
    sha256: str

    @staticmethod
    def of(file: Path) -> Seal:
        """That of `file`, which is read."""
        return Seal(file.name, file.stat().st_size, sha256(file))


def sha256(file: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()
