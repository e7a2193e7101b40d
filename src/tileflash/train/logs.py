"""Where a run is told: lines on the terminal with a progress bar, JSON lines in a file, TensorBoard."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tileflash.train.metrics import StepMetrics

_REDRAW_S = 0.1


class Terminal:
    """Lines on stdout; on a terminal with a progress bar below them, elsewhere (a file, a pipe) just the lines."""

    def __init__(self, last_step: int) -> None:
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
        self.say(metrics.line(self._last_step))
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


class JsonLog:
    """One JSON object a line, written out at once. Values that JSON has no number for (NaN, Inf) are null."""

    def __init__(self, path: Path | None, *, resumed_step: int | None = None) -> None:
        """Begin the file anew, or, with `resumed_step`, keep what it says of the steps up to that one."""
        self._file = None
        self.is_new = True
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if resumed_step is not None and path.is_file():
            kept = _events_until(path, resumed_step)
            self.is_new = not kept
            # Replaced whole: a kill amid this leaves either the old log or the new one.
            aside = path.with_name(f"{path.name}.tmp")
            aside.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            os.replace(aside, path)
        self._file = path.open("w" if self.is_new else "a", encoding="utf-8")

    def write(self, event: dict[str, Any]) -> None:
        """Append `event`."""
        if self._file is not None:
            self._file.write(json.dumps(_jsonable(event), ensure_ascii=False, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class TensorBoardLog:
    """Scalars and texts for TensorBoard; nothing where `directory` is None."""

    def __init__(self, directory: Path | None, *, say: Callable[[str], None], resumed_step: int | None = None) -> None:
        self._writer: Any = None
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
        if self._writer is not None:
            for name in ("train_loss", "learning_rate", "gradient_norm", "step_ms", "tokens_per_s", "skipped"):
                self._writer.add_scalar(f"train/{name}", getattr(metrics, name), metrics.step)
            self._writer.add_scalar("memory/peak_used_bytes", metrics.peak_used_bytes, metrics.step)

    def validation(self, step: int, loss: float) -> None:
        """A validation loss."""
        if self._writer is not None:
            self._writer.add_scalar("validation/loss", loss, step)

    def sample(self, step: int, text: str) -> None:
        """A sample of text."""
        if self._writer is not None:
            self._writer.add_text("sample", text, step)

    def flush(self) -> None:
        """Write out what is held back."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write out and close."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _events_until(path: Path, step: int) -> list[str]:
    """The log's lines without those of later steps, ends of earlier sittings, and a last line cut off by a kill."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("event") != "end" and event.get("step", 0) <= step:
            kept.append(line)
    return kept


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
