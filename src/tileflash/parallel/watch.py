"""Which rank the others wait for: each has a thread that answers a roll call, even while its main thread hangs."""

from __future__ import annotations

import json
import sys
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

_LOOK_EVERY_S = 0.5
_ANSWER_WITHIN_S = 4 * _LOOK_EVERY_S
_CALLS = "calls"


class Watch:
    """This rank's thread. It says nothing and sends next to nothing until a rank is missed.

    `store` is where the ranks leave their addresses, too; the thread talks to it through a connection of its own. Where no
    step begins for `patience_s`, one rank tells on stderr who is waited for: on NCCL, whose own watchdog ends the process
    soon after, nobody else would say it.
    """

    def __init__(self, store: Store, rank: int, ranks: int, patience_s: float) -> None:
        self._store, self._rank, self._ranks, self._patience_s = store, rank, ranks, patience_s
        self._main = threading.main_thread().ident
        self._steps, self._begun = 0, time.monotonic()
        self._answered = self._warned = 0  # the call, and the step
        self._stopped = threading.Event()
        own = store.clone()  # type: ignore[attr-defined]  # not in the stubs of PyTorch 2.13
        self._thread = threading.Thread(target=self._run, args=(own,), name="watch", daemon=True)
        self._thread.start()

    def step_begins(self) -> None:
        """The main thread is there, and so are the others: all count the same steps."""
        self._steps, self._begun = self._steps + 1, time.monotonic()

    def stop(self) -> None:
        """No more answers, before the store is gone."""
        self._stopped.set()
        self._thread.join()

    def leave_word(self, text: str) -> None:
        """Why this rank ends, for those who will miss it."""
        try:
            self._store.set(f"word/{self._rank}", text)
        except RuntimeError:  # the store has ended with the rank that holds it: nobody can read it
            return

    def missed(self) -> str:
        """After another rank has failed to come: which it is and why, as far as can be known. Takes up to some seconds."""
        told = self._missed(self._store)
        if self._rank == 0:
            time.sleep(2 * _LOOK_EVERY_S)  # the store may end with this rank, and others are still asking
        return told

    def _run(self, store: Store) -> None:
        while not self._stopped.wait(_LOOK_EVERY_S):
            try:
                self._answer(store)
                self._warn(store)
            except RuntimeError:  # the store is gone, and with it whoever would ask
                return

    def _answer(self, store: Store) -> None:
        call = store.add(_CALLS, 0)
        if call > self._answered:
            store.set(f"at/{call}/{self._rank}", json.dumps(self._place()))
            self._answered = call

    def _warn(self, store: Store) -> None:
        steps, waited_s = self._steps, time.monotonic() - self._begun
        if steps == self._warned or waited_s < self._patience_s or not self._place()[1]:
            return
        self._warned = steps
        if store.add(f"warned/{steps}", 1) > 1:  # another rank tells it
            return
        told = self._missed(store)
        print(
            f"warning: rank {self._rank}: no step has begun for {waited_s:.0f} s: {told}", file=sys.stderr, flush=True
        )

    def _place(self) -> tuple[str, bool]:
        return _place(None if self._main is None else sys._current_frames().get(self._main))

    def _missed(self, store: Store) -> str:
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        words: dict[int, str] = {}
        places: dict[int, tuple[str, bool]] = {}
        end = time.monotonic() + _ANSWER_WITHIN_S
        try:
            call = store.add(_CALLS, 1)
            while len(words.keys() | places.keys()) < len(others) and time.monotonic() < end:
                for rank in others:
                    if rank not in words and store.check([f"word/{rank}"]):
                        words[rank] = store.get(f"word/{rank}").decode()
                    if rank not in places and store.check([f"at/{call}/{rank}"]):
                        place, waits = json.loads(store.get(f"at/{call}/{rank}"))
                        places[rank] = place, waits
                if threading.current_thread() is self._thread:
                    self._answer(store)
                time.sleep(0.05)
        except RuntimeError:
            if not words:
                return "rank 0 has ended, and with it what the ranks know of each other"
        return _told(others, words, places)


def _told(others: list[int], words: dict[int, str], places: dict[int, tuple[str, bool]]) -> str:
    """What is known of `others`: the last `words` of some, and of some (where they are, whether they wait there for others)."""
    if words:
        return "; ".join(f"rank {rank} ended: {text}" for rank, text in sorted(words.items()))
    silent = [rank for rank in others if rank not in places]
    if silent:
        plural = "s" if len(silent) > 1 else ""
        return f"rank{plural} {', '.join(map(str, silent))} gave no sign of life: killed, or stuck outside Python"
    busy = {rank: place for rank, (place, waits) in sorted(places.items()) if not waits}
    if busy:
        return "; ".join(f"rank {rank} does not wait for others, but is at {place}" for rank, place in busy.items())
    return "all ranks are there and wait for each other or for their devices"


def _place(frame: FrameType | None) -> tuple[str, bool]:
    """(where a thread is, whether it waits there for other ranks or for its device)."""
    if frame is None:
        return "its end", False
    place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    # The step's one wait for the device is in the trainer's `_step`, that for a save of all ranks in `_end_save`.
    waits = frame.f_code.co_name == "_step"
    current: FrameType | None = frame
    while current is not None and not waits:
        waits = (
            "torch/distributed/" in current.f_code.co_filename
            or current.f_code.co_name == "_end_save"
            or current.f_globals.get("__name__") == __name__
        )
        current = current.f_back
    return place, waits
