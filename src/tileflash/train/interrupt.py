"""Ctrl-C and SIGTERM: the first lets the run finish its step and save, the second ends it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from tileflash.train.logs import Terminal


class Interrupt:
    """While in force (a context manager), the first signal makes `requested` true, the second is a KeyboardInterrupt.

    Outside the main thread Python allows no handlers; then nothing is changed.
    """

    def __init__(self, terminal: Terminal, *, saves: bool) -> None:
        self.requested = False
        self._then = " and saving" if saves else "; nothing is saved (no --output)"
        self._terminal = terminal
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._terminal.say(
            f"{signal.Signals(number).name}: finishing this step{self._then}. Once more ends the run at once"
        )
