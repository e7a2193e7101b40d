"""Where a run is told: lines on the terminal with a progress bar, JSON lines in a file, TensorBoard."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from tileflash.files import written_aside
from tileflash.parallel.layout import SINGLE
from tileflash.train.metrics import StepMetrics

_REDRAW_S = 0.1


class Terminal:
    """Lines on stdout; on a terminal with a progress bar below them, elsewhere (a file, a pipe) just the lines."""

    def __init__(self, last_step: int, layout: str = SINGLE.label) -> None:
        self._layout = layout
        self._progress: Any = None
        self._task: Any = None
        self._last_step = last_step
        self._drawn_at = 0.0

    def start(self, step: int) -> None:
        """Show the bar, at `step`."""
        if not sys.stdout.isatty():
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        # Drawn from the loop, not by rich's own thread, which would take time from launching kernels.
        columns = (TextColumn("training"), BarColumn(bar_width=None), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, auto_refresh=False, transient=True, redirect_stderr=False)
        self._progress.start()
        self._task = self._progress.add_task("training", total=self._last_step, completed=step)

    def say(self, text: str) -> None:
        """One or more lines."""
        if self._progress is None:
            print(text, flush=True)
        else:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def step(self, metrics: StepMetrics) -> None:
        """The step's line, and the bar moved on."""
        self.say(metrics.line(self._last_step, self._layout))
        if metrics.skip_reason is not None:
            self.say(
                f"step {metrics.step} skipped: {metrics.skip_reason}; weights untouched "
                f"({metrics.skipped} skipped so far)"
            )
        if self._progress is not None:
            now = time.monotonic()
            due = now - self._drawn_at >= _REDRAW_S
            self._progress.update(self._task, completed=metrics.step, refresh=due)
            self._drawn_at = now if due else self._drawn_at

    def close(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class Silence(Terminal):
    """What another rank than the first says: nothing, for the first says it."""

    def start(self, step: int) -> None:
        """No bar."""

    def say(self, text: str) -> None:
        """No line."""


class JsonLog:
    """One JSON object a line, written out at once. Values that JSON has no number for (NaN, Inf) are null.

    A line that the disk does not take is told once and left out: a full disk must not end a run.
    """

    def __init__(
        self, path: Path | None, *, say: Callable[[str], None] = print, resumed_step: int | None = None
    ) -> None:
        """Begin the file anew, or, with `resumed_step`, keep what it says of the steps up to that one.

        ValueError for a file that is no such log: it is never written over.
        """
        self._file: IO[bytes] | None = None
        self._say = say
        self._told, self._whole = False, True
        self.is_new = True
        if path is None:
            return
        if not _is_log(path):
            raise ValueError(
                f"log_json is {path}: it holds something else than a log of `tileflash train`; name another"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        if resumed_step is not None and path.is_file():
            kept = _events_until(path, resumed_step)
            self.is_new = not kept
            # Replaced whole: a kill amid this leaves either the old log or the new one.
            with written_aside(path) as (aside,):
                aside.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        # Unbuffered: what the disk did not take is not held back to fail again when the file is closed.
        self._file = path.open("wb" if self.is_new else "ab", buffering=0)

    def write(self, event: dict[str, Any]) -> None:
        """Append `event`."""
        if self._file is None:
            return
        text = json.dumps(_jsonable(event), ensure_ascii=False, allow_nan=False)
        line = f"{'' if self._whole else chr(10)}{text}\n".encode()
        try:
            written = self._file.write(line)
            self._whole = written == len(line)  # else the next line must not go on with this one's half
            if not self._whole:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self._told:
                self._say(f"warning: {self._file.name}: {error.strerror}; the log has gaps from here. Training goes on")
            self._told = True

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class TensorBoardLog:
    """Scalars and texts for TensorBoard; nothing where `directory` is None, and no more once the disk is full (told once)."""

    def __init__(self, directory: Path | None, *, say: Callable[[str], None], resumed_step: int | None = None) -> None:
        self._writer: Any = None
        self._say = say
        if directory is None:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            say(f"no TensorBoard log: {error} (pip install tensorboard, or --no-tensorboard)")
            return
        # What a killed run wrote of later steps is hidden: they come again.
        self._writer = SummaryWriter(str(directory), purge_step=(resumed_step or 0) + 1)

    def step(self, metrics: StepMetrics) -> None:
        """The step's figures."""
        for name in ("train_loss", "learning_rate", "gradient_norm", "step_ms", "tokens_per_s", "skipped"):
            self._write("add_scalar", f"train/{name}", getattr(metrics, name), metrics.step)
        self._write("add_scalar", "memory/peak_used_bytes", metrics.peak_used_bytes, metrics.step)

    def validation(self, step: int, loss: float) -> None:
        """A validation loss."""
        self._write("add_scalar", "validation/loss", loss, step)

    def sample(self, step: int, text: str) -> None:
        """A sample of text."""
        self._write("add_text", "sample", text, step)

    def flush(self) -> None:
        """Write out what is held back."""
        self._write("flush")

    def close(self) -> None:
        """Write out and close."""
        self._write("close")
        self._writer = None

    def _write(self, method: str, *arguments: Any) -> None:
        if self._writer is None:
            return
        try:
            getattr(self._writer, method)(*arguments)
        except (
            OSError
        ) as error:  # of an earlier line, raised again: its thread has ended, so this is the end of the log
            self._writer = None
            self._say(f"warning: TensorBoard's log ends here: {error.strerror or error}. Training goes on")


def _is_log(path: Path) -> bool:
    """Whether `path` may be begun anew: it is not there, is empty, no ordinary file, or begins as a log does."""
    if not path.is_file():
        return True
    with path.open("rb") as file:
        start = file.read(64)
    return not start.strip() or start.lstrip().startswith(b'{"event":')


def _events_until(path: Path, step: int) -> list[str]:
    """The log's lines without those of later steps, ends of earlier sittings, and a last line cut off by a kill."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("event") != "end" and _step_of(event) <= step:
            kept.append(line)
    return kept


def _step_of(event: dict[str, Any]) -> float:
    """The event's step; 0 where it is of none, and beyond all where what stands there is no number."""
    step = event.get("step", 0)
    return step if isinstance(step, int | float) else math.inf


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Logs:
    """All three of them: what one is told, all are, each in its own way."""

    def __init__(self, terminal: Terminal, json_log: JsonLog, board: TensorBoardLog) -> None:
        self._terminal, self._json, self._board = terminal, json_log, board

    def say(self, text: str) -> None:
        """To the terminal alone."""
        self._terminal.say(text)

    def start(self, facts: dict[str, Any]) -> None:
        """The run's facts, the first event of the log; a sitting that goes on with a log adds an event `resume`."""
        if self._json.is_new:
            self._json.write({"event": "start", **facts})
        else:
            self._json.write({"event": "resume", "step": facts["resumed_step"], **facts})

    def step(self, metrics: StepMetrics) -> None:
        """A step."""
        self._terminal.step(metrics)
        self._json.write(metrics.event())
        self._board.step(metrics)

    def not_captured(self, step: int, reason: str) -> None:
        """From `step` on steps run eagerly: to capture them was tried, unasked, and failed."""
        self._terminal.say(
            f"warning: no CUDA graph: the step could not be captured ({reason}). Steps run eagerly: every kernel is "
            "launched anew, which is slower at small batches (--no-cuda-graph leaves the attempt out)"
        )
        self._json.write({"event": "not_captured", "step": step, "reason": reason})

    def validation(self, step: int, loss: float) -> None:
        """A validation loss."""
        self._terminal.say(f"validation loss {loss:.6f} at step {step}")
        self._json.write({"event": "validation", "step": step, "loss": loss})
        self._board.validation(step, loss)

    def sample(self, step: int, text: str | None, error: str | None) -> None:
        """A sample of text, or why there is none."""
        if text is None:
            self._terminal.say(f"no sample at step {step}: {error}")
            self._json.write({"event": "sample", "step": step, "error": error})
            return
        self._terminal.say(f"sample at step {step}:\n{text}\n---")
        self._json.write({"event": "sample", "step": step, "text": text})
        self._board.sample(step, text)

    def end(self, status: str, message: str) -> None:
        """The last event: "finished", "interrupted", "out_of_memory" or "failed"."""
        self._json.write({"event": "end", "status": status, "message": message})

    def flush(self) -> None:
        """Write out what is held back."""
        self._board.flush()

    def close(self) -> None:
        """Close all of them."""
        self._json.close()
        self._board.close()
        self._terminal.close()
