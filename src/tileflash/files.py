"""Files that are either whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
