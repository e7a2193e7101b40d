"""Makes one run: a `tileflash train` process of its own, its log, and its end whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tileflash.compare.plan import CompareConfig, Run, train_arguments
from tileflash.compare.results import Record, RunResult, count_steps, read_run

TRAIN_COMMAND = (sys.executable, "-m", "tileflash", "train")
_POLL_S = 0.05
_PROGRESS_EVERY_S = 1.0  # reading the log more often would take time from the run that is being measured
_GRACE_S = 5.0
_TAIL_LINES, _TAIL_BYTES = 15, 8192


def log_path(config: CompareConfig, run: Run) -> Path:
    """OUTPUT/runs/NAME.jsonl, the run's log; what the process printed lies beside it as NAME.txt."""
    return config.output / "runs" / f"{run.name}.jsonl"


def execute(
    config: CompareConfig,
    run: Run,
    *,
    command: Sequence[str] = TRAIN_COMMAND,
    limit_s: float | None = None,
    on_progress: Callable[[int], None] = lambda steps: None,
    keep_open: Sequence[int] = (),
) -> RunResult:
    """Run the process to its end and read its log.

    Args:
        command: what `tileflash train` is called as.
        limit_s: kill the process after this many seconds; by default `config.timeout_seconds`.
        on_progress: called about once a second with the steps that were logged so far.
        keep_open: files that the process holds open as long as it lives.

    Raises:
        KeyboardInterrupt: on Ctrl-C, after the process has been killed; the run then has no record and does not count.
    """
    log = log_path(config, run)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    printed = log.with_suffix(".txt")
    arguments = train_arguments(config, run)
    limit_s = config.timeout_seconds if limit_s is None else limit_s
    started = time.monotonic()
    with printed.open("wb") as sink:
        # A session of its own: a Ctrl-C on the terminal reaches the comparison alone, which then ends the process and
        # everything that it started.
        process = subprocess.Popen(
            [*command, *arguments, "--log-json", str(log)],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=tuple(keep_open),
        )
        try:
            timed_out = not _wait(process, started + limit_s, lambda: on_progress(count_steps(log)))
        finally:
            _end(process)
    record = Record(
        arguments=tuple(arguments),
        exit_status=process.returncode,
        duration_s=round(time.monotonic() - started, 3),
        timed_out=timed_out,
        tail=_tail(printed),
    )
    return _add_record(run, log, record)


def _wait(process: subprocess.Popen[bytes], deadline: float, on_progress: Callable[[], None]) -> bool:
    """Whether the process ended by itself before `deadline` (of `time.monotonic`)."""
    next_progress = time.monotonic() + _PROGRESS_EVERY_S
    while True:
        try:
            process.wait(timeout=_POLL_S)
            return True
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        if now >= deadline:
            return False
        if now >= next_progress:
            on_progress()
            next_progress = now + _PROGRESS_EVERY_S


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process if it still runs, and whatever else is in its group."""
    if process.poll() is None:
        _signal_group(process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_GRACE_S)
    _signal_group(process, signal.SIGKILL)
    process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _tail(printed: Path) -> str:
    with printed.open("rb") as stream:
        stream.seek(max(0, printed.stat().st_size - _TAIL_BYTES))
        text = stream.read().decode("utf-8", errors="replace")
    return "\n".join(text.splitlines()[-_TAIL_LINES:]).strip()


def _add_record(run: Run, log: Path, record: Record) -> RunResult:
    with log.open("ab") as stream:
        # A killed process may have left half a line.
        stream.write(b"\n" + record.as_line().encode())
    result = read_run(run, log)
    assert result is not None, "the record was just written"
    return result
