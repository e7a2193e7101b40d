"""The run's directory: whose it is, what a killed run left there, and where to go on from."""

from __future__ import annotations

import fcntl
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import IO

from tileflash.parallel.ranks import Alone, Ranks
from tileflash.train.checkpoint import checkpoints, find_checkpoint, remove_after, remove_leftovers
from tileflash.train.config import TrainConfig

_LOCK = ".lock"
_SEEN_WITHIN_S = 10.0  # a network's file system may show a new file late


class Output(AbstractContextManager["Output"]):
    """The directory of `--output` (None: nothing is saved), held by one run at a time while in force.

    `checkpoint` is the one to go on from (by --resume or --load), None to begin at step 0. ValueError if another run
    holds the directory, or if it has checkpoints that this run, not resuming them, would mix with its own.
    """

    def __init__(self, config: TrainConfig, say: Callable[[str], None], *, restarted: bool = False) -> None:
        """`restarted`: this is the same run, started again after a fault: it resumes its own checkpoints unasked."""
        self.path = None if config.output is None else Path(config.output)
        self.checkpoint: Path | None = None
        self._config, self._restarted = config, restarted
        self._say = say
        self._lock: IO[str] | None = None
        self.mark: str | None = None

    @property
    def log_path(self) -> Path | None:
        """Where the JSON-lines log goes."""
        if self._config.log_json is not None:
            return Path(self._config.log_json)
        return None if self.path is None else self.path / "log.jsonl"

    @property
    def tensorboard_path(self) -> Path | None:
        """Where TensorBoard's files go."""
        return None if self.path is None or not self._config.tensorboard else self.path / "tensorboard"

    def __enter__(self) -> Output:
        try:
            if self.path is not None:
                self._hold(self.path)
            self.checkpoint = self._find()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._release()

    def _hold(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        # Without this a second run would take the first one's unfinished checkpoint for a leftover and delete it. The
        # kernel releases the lock however the process ends.
        self._lock = (path / _LOCK).open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"output is {path}: another run is writing to it; it must be a directory of its own"
            ) from None
        remove_leftovers(path)
        self.mark = uuid.uuid4().hex
        self._lock.write(self.mark)
        self._lock.flush()

    def check_seen(self, ranks: Alone | Ranks) -> None:
        """ValueError, on all ranks, unless all of them see this directory and the checkpoint to go on from.

        All call, with `checkpoint` being the same; the first one holds the directory.
        """
        mark, path, checkpoint = ranks.share(self.mark), self.path, self.checkpoint

        def look() -> None:
            if path is not None:
                _see(lambda: (path / _LOCK).read_text() == mark, f"output is {path}", ranks.rank)
            if checkpoint is not None:
                _see(checkpoint.is_dir, f"the checkpoint to go on from is {checkpoint}", ranks.rank)

        ranks.together(look)

    def _find(self) -> Path | None:
        there = checkpoints(self.path) if self.path is not None else []
        if self.path is not None and (self._config.resume or (self._restarted and there)):
            found = find_checkpoint(self.path, self._say)
            if found is None:
                self._say(f"{self.path} has no checkpoint yet: starting at step 0")
            else:
                remove_after(self.path, int(found.name.rpartition("_")[2]))
            return found
        if there:
            raise ValueError(
                f"output is {self.path}: it has checkpoints (the last of step {there[-1][0]}); add --resume to go on "
                "from them, or choose another directory"
            )
        if self._config.load is None:
            return None
        found = find_checkpoint(Path(self._config.load), self._say)
        if found is None:
            raise ValueError(f"load is {self._config.load}: it must be a checkpoint or a directory with checkpoints")
        return found

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _see(sees: Callable[[], bool], what: str, rank: int) -> None:
    end = time.monotonic() + _SEEN_WITHIN_S
    while True:
        try:
            if sees():
                return
        except OSError:  # it is not there, or not yet
            pass
        if time.monotonic() > end:
            raise ValueError(
                f"{what}: rank {rank} on host {socket.gethostname()} does not see there what rank 0 does. Every rank writes "
                "its part of a checkpoint: the directory must be on a file system that all hosts share"
            )
        time.sleep(0.1)
