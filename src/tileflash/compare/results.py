"""Reads the JSON-lines log of one training run, whatever state the run left it in."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from tileflash.compare.plan import Run

OUT_OF_MEMORY_STATUS = 3  # the exit status of `tileflash train` for out of memory
BAD_INPUT_STATUS = 2
RECORD_EVENT = "compare"  # the line that the comparison adds to a run's log once its process has ended


class Outcome(str, Enum):
    FINISHED = "finished"
    OUT_OF_MEMORY = "out_of_memory"
    TIMED_OUT = "timed_out"
    FAILED = "failed"


@dataclass(frozen=True)
class Record:
    """How the process of a run ended: what the comparison knows that the training log does not.

    `exit_status` is negative for a signal, as in `subprocess`; `tail` is the last lines the process printed.
    """

    arguments: tuple[str, ...]
    exit_status: int
    duration_s: float
    timed_out: bool
    tail: str

    def as_line(self) -> str:
        event = {"event": RECORD_EVENT, **self.__dict__, "arguments": list(self.arguments)}
        return json.dumps(event) + "\n"


@dataclass(frozen=True)
class RunResult:
    """What one run gave. The tuples hold one entry a step, in the order of the steps; empty when there is nothing.

    `step_ms` in milliseconds; `train_loss` is NaN where it was not finite; `peak_used_bytes` is the highest of the
    run, None where the device does not tell; `environment` as `tileflash.environment.environment` makes it;
    `attention` says in the trainer's words what computed it; `cuda_graph` whether steps were one CUDA graph, None where
    the log does not say.
    """

    run: Run
    outcome: Outcome
    record: Record
    steps: tuple[int, ...] = ()
    step_ms: tuple[float, ...] = ()
    train_loss: tuple[float, ...] = ()
    peak_used_bytes: int | None = None
    environment: dict[str, Any] | None = None
    attention: str = ""
    cuda_graph: bool | None = None
    parameters: int | None = None
    message: str = ""

    @property
    def settled(self) -> bool:
        """No use in another repeat: it would end the same way (out of memory, bad input) or hang as long again."""
        return self.outcome in (Outcome.OUT_OF_MEMORY, Outcome.TIMED_OUT) or self.record.exit_status == BAD_INPUT_STATUS


def read_run(run: Run, log: Path) -> RunResult | None:
    """The result in `log`, or None when the file is not there or its process was never seen to end (no record).

    Lines that are not JSON objects are passed over: a killed process leaves half a line, and a library may print.
    """
    if not log.is_file():
        return None
    events = _events(log)
    records = [event for event in events if event.get("event") == RECORD_EVENT]
    if not records:
        return None
    record = _record(records[-1])
    steps = [event for event in events if _is_step(event)]
    start: dict[str, Any] = next((event for event in events if event.get("event") == "start"), {})
    end: dict[str, Any] = next((event for event in reversed(events) if event.get("event") == "end"), {})
    outcome, message = _outcome(run, record, end, len(steps))
    peaks = [step["peak_used_bytes"] for step in steps if _is_number(step.get("peak_used_bytes"))]
    return RunResult(
        run=run,
        outcome=outcome,
        record=record,
        steps=tuple(int(step["step"]) for step in steps),
        step_ms=tuple(float(step["step_ms"]) for step in steps),
        train_loss=tuple(_loss(step.get("train_loss")) for step in steps),
        peak_used_bytes=int(max(peaks)) if peaks and max(peaks) > 0 else None,
        environment=_dictionary(start, "environment"),
        attention=str(start.get("attention") or ""),
        cuda_graph=_cuda_graph(start),
        parameters=start.get("parameters") if isinstance(start.get("parameters"), int) else None,
        message=message,
    )


def count_steps(log: Path) -> int:
    """How many steps a run has logged so far; for the progress bar."""
    try:
        return len(re.findall(rb'"event":\s*"step"', log.read_bytes()))
    except OSError:
        return 0


def _events(log: Path) -> list[dict[str, Any]]:
    events = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            events.append(event)
    return events


def _record(event: dict[str, Any]) -> Record:
    return Record(
        arguments=tuple(event["arguments"]),
        exit_status=event["exit_status"],
        duration_s=event["duration_s"],
        timed_out=event["timed_out"],
        tail=event["tail"],
    )


def _outcome(run: Run, record: Record, end: dict[str, Any], steps: int) -> tuple[Outcome, str]:
    """How the run ended and, unless it finished, one line that says why."""
    said = str(end.get("message") or "")
    if record.timed_out:
        return Outcome.TIMED_OUT, f"killed after {record.duration_s:.0f} s without an end"
    if record.exit_status == OUT_OF_MEMORY_STATUS or end.get("status") == "out_of_memory":
        return Outcome.OUT_OF_MEMORY, said or "out of memory"
    if record.exit_status < 0:
        hint = "; the kernel kills so when the host's memory runs out" if record.exit_status == -9 else ""
        return Outcome.FAILED, f"killed by signal {-record.exit_status}{hint}"
    if record.exit_status != 0:
        return Outcome.FAILED, said or f"exit status {record.exit_status}"
    expected = run.setting.num_iteration
    if steps != expected:
        return Outcome.FAILED, f"exit status 0, but the log has {steps} steps instead of {expected}"
    return Outcome.FINISHED, ""


def _is_step(event: dict[str, Any]) -> bool:
    return event.get("event") == "step" and _is_number(event.get("step")) and _is_number(event.get("step_ms"))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _loss(value: object) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan


def _cuda_graph(start: dict[str, Any]) -> bool | None:
    """What was in force; of a log that holds only what was asked for, that, where it was not left to the default."""
    for value in (start.get("cuda_graph"), (_dictionary(start, "config") or {}).get("cuda_graph")):
        if isinstance(value, bool):
            return value
    return None


def _dictionary(event: dict[str, Any], key: str) -> dict[str, Any] | None:
    value = event.get(key)
    return value if isinstance(value, dict) else None
