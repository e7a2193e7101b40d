"""A run: workers side by side, watched; crashes and hangs cost their worker's bunch and no more; failures are shrunk at the end."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tileflash.fuzz.child import Child, death
from tileflash.fuzz.limits import Limits
from tileflash.fuzz.problems import Problem, from_json, to_json
from tileflash.fuzz.shrink import shrink
from tileflash.fuzz.variants import make_problem, make_variants
from tileflash.fuzz.work import Message, Task, work
from tileflash.fuzz.worker import smaller

_POLL_S = 0.05
_SHRINK_MOST = 4  # failures, of different variants
_SILENT_S = 45.0
_SLOW_S = 2.0
_START_S = 60.0  # what a process may take beyond the time limit, to import PyTorch


@dataclass(frozen=True)
class FuzzPlan:
    """What is run. `workers` 0 is this very process, in which a crash ends all.

    Without `seconds` exactly the problems 0 to `problems` - 1 are made; with it, quick workers go on until there are as many.
    """

    backends: tuple[str, ...]
    device: str
    seed: int = 0
    seconds: float | None = None
    problems: int | None = None
    workers: int = 1
    variants: int = 16
    timeout_s: float = 180.0
    shrink_s: float = 60.0

    def __post_init__(self) -> None:
        if self.seconds is None and self.problems is None:
            raise ValueError("give --seconds, --problems or both")
        for name, least in (("problems", 1), ("variants", 1), ("workers", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name} must be at least {least}, got {value}")

    def task(self, number: int) -> Task:
        workers = max(1, min(self.workers, self.variants))
        return Task(
            self.seed, self.variants, self.backends, self.device, number, workers,
            bunch=16 if self.device.startswith("cuda") else 1,
            problems=self.problems if self.seconds is None else None,
        )  # fmt: skip


@dataclass
class Failure:
    """A problem that went wrong: results ("mismatch"), a process that died ("crash") or did not answer ("hang")."""

    kind: str
    index: int
    problem: Problem
    backend: str
    words: list[str]
    shrunk: Problem | None = None

    @property
    def smallest(self) -> Problem:
        return self.problem if self.shrunk is None else self.shrunk


@dataclass
class Outcome:
    """What came of a run. `slow_seconds` are those of bunches that took so long that they compiled, over all workers."""

    count: int = 0
    seconds: float = 0.0
    worker_seconds: float = 0.0
    slow_seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    traits: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)  # what makes a run fail
    notes: list[str] = field(default_factory=list)  # and what does not

    def take(self, message: Message, plan: FuzzPlan) -> None:
        if message["kind"] == "done":
            self.count += message["count"]
            self.worker_seconds += message["seconds"]
            self.slow_seconds += message["seconds"] if message["seconds"] > _SLOW_S else 0.0
            self.traits.update(message["traits"])
        elif message["kind"] == "failed":
            problem = from_json(json.dumps(message["problem"]))
            self.failures.append(Failure("mismatch", message["index"], problem, message["backend"], message["words"]))


def run_session(plan: FuzzPlan, tell: Callable[[Outcome], None] = lambda outcome: None) -> Outcome:
    """Run it; `tell` hears of the state now and then."""
    began = time.monotonic()
    outcome = Outcome()
    end = None if plan.seconds is None else began + plan.seconds

    def is_over() -> bool:
        outcome.seconds = time.monotonic() - began
        return (end is not None and time.monotonic() >= end) or (
            plan.problems is not None and outcome.count >= plan.problems
        )

    if plan.workers == 0:
        for message in work(plan.task(0)):
            outcome.take(message, plan)
            tell(outcome)
            if message["kind"] == "done" and is_over():
                break
    else:
        _run_workers(plan, outcome, is_over, tell)
    outcome.seconds = time.monotonic() - began
    return outcome


def _run_workers(
    plan: FuzzPlan, outcome: Outcome, is_over: Callable[[], bool], tell: Callable[[Outcome], None]
) -> None:
    workers = [Watched(plan.task(number), plan) for number in range(plan.task(0).workers)]
    try:
        while workers and not is_over():
            for worker in list(workers):
                if not worker.look(outcome):
                    workers.remove(worker)
            tell(outcome)
            time.sleep(_POLL_S)
        for worker in workers:
            worker.note_silence(outcome)
    finally:
        for worker in workers:
            worker.child.end()


class Watched:
    """One worker's process, and another one after it where it died."""

    def __init__(self, task: Task, plan: FuzzPlan) -> None:
        self.plan = plan
        self.task = task  # the one that goes on where there is none of single problems
        self.current = task
        self.child = Child({"do": "work", "task": task.__dict__})
        self.since = time.monotonic()
        self.patience_s = plan.timeout_s + _START_S
        self.indices: list[int] = []
        self.round = 0

    def look(self, outcome: Outcome) -> bool:
        """Take what it said; False when it has come to its end."""
        over = self.child.is_over()  # before its words are read: what it wrote before its end must not be missed
        for message in self.child.messages():
            self.since, self.patience_s = time.monotonic(), self.plan.timeout_s
            if message["kind"] == "at":
                self.indices, self.round = message["indices"], message["round"]
            else:
                outcome.take(message, self.plan)
        if over:
            status = self.child.end()
            if status == 0:
                return self._go_on() if self.current.only else False
            return self._died("crash", death(status, self.child.last_words()), outcome)
        if time.monotonic() - self.since > self.patience_s:
            self.child.end()
            return self._died("hang", f"no answer within {self.patience_s:g} s", outcome)
        return True

    def note_silence(self, outcome: Outcome) -> None:
        """Say where it is if it has long said nothing: time may be up before it counts as a hang."""
        silent_s = time.monotonic() - self.since
        if self.indices and silent_s > min(_SILENT_S, self.plan.timeout_s):
            span = f"{self.indices[0]} to {self.indices[-1]}"
            outcome.notes.append(f"a worker was at problems {span} for {silent_s:.0f} s when the run ended: compiling?")

    def _died(self, kind: str, words: str, outcome: Outcome) -> bool:
        """Find which problem it was: those of a bunch are tried one by one."""
        if not self.indices:
            outcome.complaints.append(f"a worker ended before it began: {words}")
            return False
        if len(self.indices) > 1:
            outcome.complaints.append(f"problems {self.indices[0]} to {self.indices[-1]}: {words}; tried one by one")
            self._start(replace(self.task, only=tuple(self.indices), first_round=self.round))
            return True
        index = self.indices[0]
        plan = self.plan
        limits = Limits.of(plan.backends)
        variant = make_variants(plan.variants, plan.seed, plan.device, limits)[index % plan.variants]
        problem = make_problem(variant, plan.seed, index, plan.device, limits)
        outcome.failures.append(Failure(kind, index, problem, plan.backends[0], [words]))
        outcome.count += 1
        self.task = replace(self.task, without=(*self.task.without, index % plan.variants))
        return self._go_on()

    def _go_on(self) -> bool:
        """With the next round, without variants that died; False where none is left."""
        self._start(replace(self.task, first_round=self.round + 1))
        return True

    def _start(self, task: Task) -> None:
        self.current = task
        self.child = Child({"do": "work", "task": task.__dict__})
        self.since, self.patience_s = time.monotonic(), self.plan.timeout_s + _START_S
        self.indices = []


def shrink_failures(plan: FuzzPlan, failures: list[Failure], tell: Callable[[str], None] = lambda words: None) -> None:
    """Shrink the first failure of each of some variants, side by side, `plan.shrink_s` at most."""
    chosen = first_of_each(failures, plan.variants)[:_SHRINK_MOST]
    if plan.workers == 0:
        for failure in chosen:
            tell(f"shrinking problem {failure.index}")
            failure.shrunk = smaller(
                failure.problem, failure.backend, plan.device, plan.shrink_s / len(chosen), lambda _: None
            )
        return
    mismatches = [failure for failure in chosen if failure.kind == "mismatch"]
    children = {
        failure.index: Child({
            "do": "shrink", "problem": json.loads(to_json(failure.problem)), "backend": failure.backend,
            "device": plan.device, "seconds": plan.shrink_s,
        })
        for failure in mismatches
    }  # fmt: skip
    end = time.monotonic() + plan.shrink_s + _START_S
    if children:
        tell(f"shrinking {len(children)} of {len(failures)} failures, {plan.shrink_s:g} s at most")
    try:
        while any(not child.is_over() for child in children.values()) and time.monotonic() < end:
            time.sleep(_POLL_S)
    finally:
        for failure in mismatches:
            child = children[failure.index]
            child.end()
            for message in child.messages():
                failure.shrunk = from_json(json.dumps(message["problem"]))
    for failure in chosen:
        if failure.kind != "mismatch":
            tell(f"shrinking problem {failure.index}, a process for each try")
            failure.shrunk = shrink(failure.problem, lambda p, f=failure: _dies(p, f, plan), plan.shrink_s)  # type: ignore[misc]


def _dies(problem: Problem, failure: Failure, plan: FuzzPlan) -> bool:
    child = Child({
        "do": "examine", "problem": json.loads(to_json(problem)), "backend": failure.backend, "device": plan.device,
    })  # fmt: skip
    return child.wait(plan.timeout_s if failure.kind == "hang" else plan.timeout_s + _START_S) != 0


def first_of_each(failures: list[Failure], variants: int) -> list[Failure]:
    """One failure of each variant and kind, in the order in which they were found."""
    found: dict[tuple[int, str], Failure] = {}
    for failure in failures:
        found.setdefault((failure.index % variants, failure.kind), failure)
    return list(found.values())
