"""Runs steps in a child process that may crash, abort or hang: what came of each is told, and the others still run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "failed", "crashed", "timeout", "skipped"]

# The child sees the very sys.path of this process: not the directory that `python -m` or `python -c` would put first.
_CHILD = (
    "import sys; sys.path[:] = sys.argv[1].split('\\n'); from tileflash.doctor.child import main; main(sys.argv[2:])"
)
_POLL_S = 0.02


@dataclass(frozen=True)
class Outcome:
    """What came of a step: its facts, or why there are none (an exception's type and words, a signal, a time limit)."""

    status: Status
    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.status == "ok"


def run_steps(
    steps: Iterable[str],
    timeout_s: float,
    *,
    hidden: Iterable[str] = (),
    wanted: Callable[[str, Mapping[str, Outcome]], bool] = lambda step, outcomes: True,
    on_start: Callable[[str], None] = lambda step: None,
) -> dict[str, Outcome]:
    """Run steps of `tileflash.doctor.child` in order, in one child process as long as it lives, `timeout_s` at most for each.

    A step that takes the process down is told as "crashed", one that takes too long as "timeout"; the next child begins with
    the step after it, unless `wanted` says of a step that after such outcomes it shall be "skipped". Modules named in `hidden`
    cannot be imported in the child.
    """
    remaining = list(steps)
    outcomes: dict[str, Outcome] = {}
    while remaining := [step for step in remaining if step not in outcomes]:
        if skipped := [step for step in remaining if not wanted(step, outcomes)]:
            outcomes.update(dict.fromkeys(skipped, Outcome("skipped")))
            continue
        with tempfile.TemporaryDirectory(prefix="tileflash-doctor-") as directory:
            told = _run_child(remaining, timeout_s, tuple(hidden), Path(directory), on_start)
        outcomes.update(told)
    return outcomes


def _run_child(
    steps: list[str], timeout_s: float, hidden: tuple[str, ...], directory: Path, on_start: Callable[[str], None]
) -> dict[str, Outcome]:
    """The outcomes of at least the first of `steps`."""
    events_path, said_path = directory / "events.jsonl", directory / "said.txt"
    events_path.touch()
    command = [sys.executable, "-X", "faulthandler", "-c", _CHILD, "\n".join(sys.path), str(events_path)]
    outcomes: dict[str, Outcome] = {}
    # Files, not pipes: a grandchild that outlives the child would hold a pipe open.
    with open(said_path, "wb") as said:
        child = subprocess.Popen(
            [*command, ",".join(hidden), *steps],
            stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True,
        )  # fmt: skip
    current, since = steps[0], time.monotonic()
    on_start(current)
    seen = 0
    try:
        while True:
            exit_status = child.poll()  # before the events are read: what it wrote before its end must not be missed
            events = _read_events(events_path)
            for event in events[seen:]:
                if event["state"] == "started":
                    if event["step"] != current:
                        on_start(event["step"])
                    current, since = event["step"], time.monotonic()
                else:
                    seconds = time.monotonic() - since
                    outcomes[event["step"]] = Outcome(event["state"], event["facts"], event["error"], seconds)
            seen = len(events)
            if exit_status is not None:
                if current not in outcomes:
                    error = _death(exit_status, said_path.read_text(errors="replace"))
                    outcomes[current] = Outcome("crashed", error=error, seconds=time.monotonic() - since)
                return outcomes
            if current not in outcomes and time.monotonic() - since > timeout_s:
                error = f"no answer within {timeout_s:g} s"
                outcomes[current] = Outcome("timeout", error=error, seconds=time.monotonic() - since)
                return outcomes
            time.sleep(_POLL_S)
    finally:
        _end(child)


def _read_events(path: Path) -> list[dict[str, Any]]:
    """The whole lines of the file; the last may be half written."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _death(exit_status: int, said: str) -> str:
    """How a child died, with its last own words and where it was, out of what it and faulthandler wrote."""
    if exit_status < 0:
        try:
            how = f"the process died of {signal.Signals(-exit_status).name}"
        except ValueError:
            how = f"the process died of signal {-exit_status}"
    else:
        how = f"the process ended with status {exit_status}"
    before, _, trace = said.partition("Fatal Python error:")
    words = [line.strip() for line in before.splitlines() if line.strip()]
    if words:
        how += f": {words[-1][:500]}"
    if frame := re.search(r'File "([^"]+)", line (\d+)', trace):
        how += f" (in {frame[1]}, line {frame[2]})"
    return how


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child and what it started, where it still runs."""
    if child.poll() is not None:
        return
    if os.name == "posix":
        os.killpg(child.pid, signal.SIGKILL)  # a session of its own: compilers that it started are in it
    else:
        child.kill()
    child.wait()
