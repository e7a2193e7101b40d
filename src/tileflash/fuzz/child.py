"""A worker's process as its parent sees it: one order, then messages, and an end of whatever kind."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

# The child sees the very sys.path of this process: not the directory that `python -m` would put first.
_COMMAND = "import sys; sys.path[:] = sys.argv[1].split('\\n'); from tileflash.fuzz.worker import main; main()"
_POLL_S = 0.02
_DYING_S = 10.0


class Child:
    """Started at once; `messages` gives what it has said since the last time."""

    def __init__(self, order: dict[str, Any], command: list[str] | None = None) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the child
        self._process = subprocess.Popen(
            command or [sys.executable, "-X", "faulthandler", "-c", _COMMAND, "\n".join(sys.path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin is not None
        try:
            self._process.stdin.write((json.dumps(order) + "\n").encode())
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it died at once; its end tells
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                self._messages.put(json.loads(line))
            except json.JSONDecodeError:
                return  # a line that its end cut short

    def messages(self) -> list[dict[str, Any]]:
        found = []
        while not self._messages.empty():
            found.append(self._messages.get())
        return found

    def is_over(self) -> bool:
        """It has ended, and all it said can be had."""
        if self._process.poll() is None:
            return False
        self._reader.join(timeout=5)
        return True

    def end(self) -> int:
        """End it and what it started, where it still runs; its exit status, negative for a signal."""
        if self._process.poll() is None:
            if os.name == "posix":
                os.killpg(
                    self._process.pid, signal.SIGKILL
                )  # a session of its own: compilers that it started are in it
            else:
                self._process.kill()
        try:
            status = self._process.wait(timeout=_DYING_S)
        except subprocess.TimeoutExpired:
            status = -int(signal.SIGKILL)  # a kernel without end holds it in the driver; we need not wait for that
        self._reader.join(timeout=5)
        return status

    def wait(self, seconds: float) -> int:
        """Its exit status; ended by force after `seconds`."""
        end = time.monotonic() + seconds
        while not self.is_over() and time.monotonic() < end:
            time.sleep(_POLL_S)
        return self.end()

    def last_words(self) -> str:
        """The last lines of its stderr."""
        self._said.seek(0)
        return self._said.read().decode(errors="replace")[-4000:]


def death(status: int, said: str) -> str:
    """How a process died, with the last thing that it said."""
    if status < 0:
        try:
            how = f"the process died of {signal.Signals(-status).name}"
        except ValueError:
            how = f"the process died of signal {-status}"
    else:
        how = f"the process ended with status {status}"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if "Error: " in line or "CUDA error" in line]  # advice may stand behind it
    return f"{how}: {(telling or lines)[-1][:500]}" if lines else how
