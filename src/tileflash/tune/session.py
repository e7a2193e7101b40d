"""The parent of a tuning: all candidates compiled and verified by children side by side, then each row timed by one child alone."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tileflash.bench.ledger import CaseValue, Line
from tileflash.bench.sitting import Sitting
from tileflash.bench.statistic import Statistic, geometric_mean
from tileflash.tune.calls import Shape
from tileflash.tune.candidates import Target, candidates, words

SUITE = "tuning"
_VERIFY_LENGTH = 512
_POLL_S = 0.1
CHILD = (sys.executable, "-m", "tileflash.tune.child")


@dataclass(frozen=True)
class Settings:
    """What is measured: lengths at `tokens` tokens and `width` columns; `jobs` children compile at a time, `timeout_s` is for one
    configuration; rounds and milliseconds are those of the timer."""

    lengths: tuple[int, ...] = (512, 2048, 8192)
    tokens: int = 16384
    width: int = 2048
    dtype: str = "bfloat16"
    device: str = "cuda"
    jobs: int = 8
    rounds: int = 5
    target_ms: float = 30.0
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1 or any(self.tokens % length for length in self.lengths):
            raise ValueError(
                f"`lengths` was {self.lengths}; each must be at least 1 and divide `tokens` = {self.tokens}"
            )


@dataclass(eq=False)
class Outcome:
    """What came of one configuration: why it is out, or times and speeds relative to the shipped one, by length."""

    configuration: Any
    shipped: bool
    failure: str = ""
    time_ms: dict[int, Statistic] = field(default_factory=dict)
    speed_ratio: dict[int, Statistic] = field(default_factory=dict)

    @property
    def counts(self) -> bool:
        """Whether it was timed and is not out: what failed at one length may be fast at another."""
        return bool(self.time_ms) and not self.failure

    @property
    def mean_ratio(self) -> float:
        """Geometric mean over the lengths; 0 for what does not count."""
        ratios = [ratio.median for ratio in self.speed_ratio.values()] if self.counts else []
        return geometric_mean(ratios) if ratios else 0.0


def tune(targets: Sequence[Target], settings: Settings, tell: Callable[[str], None] = lambda message: None) -> Iterator[
    tuple[Target, list[Outcome]]
]:  # fmt: skip
    """Each row with its outcomes, best first. What fails or takes its process down is out and says why.

    ValueError where the width is not whole heads of a row.
    """
    for target in targets:
        if settings.width % target.head_dim:
            raise ValueError(f"`width` was {settings.width}; it must be a multiple of {target.head_dim} for {target}")
    outcomes = {target: [Outcome(c, i == 0) for i, c in enumerate(candidates(target))] for target in targets}
    interrupted = threading.Event()
    with ThreadPoolExecutor(settings.jobs) as pool:
        jobs = []
        for target, found in outcomes.items():
            others = list(range(1, len(found)))
            share = max(1, -(-len(others) // settings.jobs))
            for first in range(0, max(1, len(others)), share):
                jobs.append((target, [0, *others[first : first + share]]))
        tell(f"{sum(map(len, outcomes.values()))} configurations of {len(targets)} rows: compiling and verifying")
        try:
            list(pool.map(lambda job: _verify(job[0], job[1], outcomes[job[0]], settings, interrupted), jobs))
        except BaseException:
            # A Ctrl-C reaches the children as well: a thread would take it for the death of one and go on with the next.
            interrupted.set()
            raise
    for target, found in outcomes.items():
        alive = [index for index, outcome in enumerate(found) if not outcome.failure]
        tell(f"{target}: timing {len(alive)} of {len(found)}")
        if 0 in alive:
            _run(target, alive, found, settings, settings.lengths, timed=True)
        yield target, sorted(found, key=lambda outcome: -outcome.mean_ratio)


def ledger_lines(target: Target, outcomes: Sequence[Outcome], settings: Settings, sitting: Sitting) -> Iterator[Line]:
    """Times and ratios of all that count."""
    for outcome in outcomes:
        if not outcome.counts:
            continue
        for length, time_ms in outcome.time_ms.items():
            case: dict[str, CaseValue] = {
                "backend": target.backend, "kernel": target.kernel, "head_dim": target.head_dim,
                "mask": "causal" if target.banded else "full", "options": target.options or "none", "seq": length,
                "tokens": settings.tokens, "width": settings.width, "dtype": settings.dtype,
            }  # fmt: skip
            name = words(outcome.configuration)
            yield sitting.line(SUITE, case, name, "time_ms", time_ms)
            if not outcome.shipped and length in outcome.speed_ratio:
                yield sitting.line(SUITE, case, name, "speed_ratio_to_shipped", outcome.speed_ratio[length])


def _verify(
    target: Target, indices: list[int], outcomes: list[Outcome], settings: Settings, interrupted: threading.Event
) -> None:
    lengths = (min(_VERIFY_LENGTH, settings.tokens),)
    _run(target, indices, outcomes, settings, lengths, timed=False, interrupted=interrupted)


def _run(
    target: Target,
    indices: list[int],
    outcomes: list[Outcome],
    settings: Settings,
    lengths: Sequence[int],
    timed: bool,
    interrupted: threading.Event | None = None,
) -> None:
    """One child after the other until the indices have all been tried; the first index is what the others are held against."""
    remaining = list(indices)
    while remaining and not (interrupted and interrupted.is_set()):
        job = {
            "target": asdict(target), "indices": remaining, "device": settings.device, "time": timed,
            "rounds": settings.rounds, "target_ms": settings.target_ms,
            "shapes": [asdict(Shape(length, settings.tokens, settings.width, settings.dtype)) for length in lengths],
        }  # fmt: skip
        events, said = _child(job, settings.timeout_s)
        culprit = None
        for event in events:
            outcome = outcomes[event["index"]]
            if event["event"] == "started":
                culprit = event["index"]
            elif event["event"] == "failed":
                outcome.failure, culprit = event["reason"], None
            elif event["event"] == "verified":
                culprit = None
            elif event["event"] == "timed":
                outcome.time_ms[event["length"]] = Statistic(**event["time_ms"])
                if event["speed_ratio"] is not None:
                    outcome.speed_ratio[event["length"]] = Statistic(**event["speed_ratio"])
        if said is None:
            return
        if culprit is None:
            # Between two configurations, or in the timing of them all: none of them can be blamed alone.
            for index in remaining:
                outcomes[index].failure = outcomes[index].failure or said
            return
        outcomes[culprit].failure = said
        tried = remaining.index(culprit)
        if culprit == remaining[0]:
            for index in remaining[1:]:
                outcomes[index].failure = f"the shipped configuration failed: {said}"
            return
        rest = remaining[1:tried] if timed else []
        remaining = [remaining[0], *rest, *remaining[tried + 1 :]]
        if len(remaining) == 1:
            return


def _child(job: dict[str, Any], timeout_s: float) -> tuple[list[dict[str, Any]], str | None]:
    """(events, None), or what the child died of in place of None. The time limit starts anew with each event: it is for one
    configuration, not for all that a child has to do."""
    with tempfile.TemporaryDirectory() as folder:
        path, errors = Path(folder, "events.jsonl"), Path(folder, "stderr")
        path.touch()
        with errors.open("wb") as sink:
            process = subprocess.Popen(
                [*CHILD, str(path), json.dumps(job)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=sink
            )
            try:
                silent = _wait(process, path, timeout_s)
            finally:
                process.kill()
                process.wait()
        said = None
        if silent:
            said = f"not done after {timeout_s:.0f} s"
        elif process.returncode:
            last = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:] or [""]
            said = f"its process ended with status {process.returncode}: {last[0][:200]}"
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()], said


def _wait(process: subprocess.Popen[bytes], events: Path, timeout_s: float) -> bool:
    """Until the process ends; True if it wrote no event for `timeout_s` seconds."""
    size, since = -1, time.monotonic()
    while process.poll() is None:
        if events.stat().st_size != size:
            size, since = events.stat().st_size, time.monotonic()
        elif time.monotonic() - since > timeout_s:
            return True
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_POLL_S)
    return False
