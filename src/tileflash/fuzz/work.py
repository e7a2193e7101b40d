"""What a worker does: problem after problem of its own variants, told as messages. `worker` runs it as a process, `session` in its own.

Messages are dictionaries that JSON can hold, by their "kind":

    at          round, indices: what is begun next
    done        count, seconds, traits: problems that were judged since the last one
    failed      index, problem, words, backend: results that are wrong, or an exception
"""

from __future__ import annotations

import json
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tileflash.fuzz.judge import examine, measure, read
from tileflash.fuzz.limits import Limits
from tileflash.fuzz.problems import Problem, to_json
from tileflash.fuzz.variants import Variant, make_problem, make_variants

Message = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """Worker `number` of `workers`. It has the variants number, number + workers, ...; problem `index` has variant index % variants.

    Args:
        bunch: problems judged between two waits for the device.
        first_round: rounds before it are done already.
        problems: indices from here on are not made; None for no end.
        only: these indices alone, one by one.
        without: variants left out.
    """

    seed: int
    variants: int
    backends: tuple[str, ...]
    device: str
    number: int = 0
    workers: int = 1
    bunch: int = 16
    first_round: int = 0
    problems: int | None = None
    only: tuple[int, ...] | None = None
    without: tuple[int, ...] = ()


def work(task: Task) -> Iterator[Message]:
    """Messages of a worker; without `problems` and `only` there is no end."""
    limits = Limits.of(task.backends)
    variants = make_variants(task.variants, task.seed, task.device, limits)
    if task.only is not None:
        for index in task.only:
            yield {"kind": "at", "round": task.first_round, "indices": [index]}
            yield from _judge(task, variants, [index])
        return
    own = [number for number in range(task.number, task.variants, task.workers) if number not in task.without]
    turn = task.first_round * len(own)
    while own:
        number, round_number = own[turn % len(own)], turn // len(own)
        indices = [number + task.variants * (round_number * task.bunch + step) for step in range(task.bunch)]
        if task.problems is not None:
            indices = [index for index in indices if index < task.problems]
            if not indices and number == own[0]:  # the smallest index of the round
                return
        if indices:
            yield {"kind": "at", "round": round_number, "indices": indices}
            yield from _judge(task, variants, indices)
        turn += 1


def _judge(task: Task, variants: list[Variant], indices: list[int]) -> Iterator[Message]:
    began = time.monotonic()
    limits = Limits.of(task.backends)
    problems = {
        index: make_problem(variants[index % task.variants], task.seed, index, task.device, limits) for index in indices
    }
    measured = []
    for index, problem in problems.items():
        try:
            measured.append(measure(problem, task.backends, task.device))
        except Exception as error:
            if is_fatal(error):
                raise  # nothing works any more in this process
            yield _failed(index, problem, [_words(error)], _guilty(problem, task))
    by_problem = {problem: index for index, problem in problems.items()}
    for problem, wrong in read(measured):
        yield _failed(by_problem[problem], problem, [str(one) for one in wrong], wrong[0].backend)
    counts: Counter[str] = Counter()
    for problem in problems.values():
        counts.update(words_of(problem))
    yield {"kind": "done", "count": len(problems), "seconds": time.monotonic() - began, "traits": dict(counts)}


def words_of(problem: Problem) -> list[str]:
    """What coverage is counted of."""
    words = list(problem.options) or ["plain"]
    words += [f"dtype {str(problem.dtype).removeprefix('torch.')}", f"layout {problem.layout}"]
    words.append("packed sequences" if problem.lengths is not None else "batch")
    if problem.causal or problem.window != (None, None):
        words.append(f"causal {problem.causal}" if problem.causal else "window")
    if problem.poison:
        words.append(f"poison {problem.poison.partition('-')[0]}")
    if problem.heads > problem.kv_heads:
        words.append("grouped heads")
    if problem.d != problem.dv:
        words.append("Dv != D")
    if problem.with_lse:
        words.append(f"gradient from {problem.loss}")
    if 0 in (problem.query_length, problem.key_length):
        words.append("empty")
    return words


def is_fatal(error: BaseException) -> bool:
    """The device is lost to this process: every later call fails, too."""
    words = str(error)
    return "CUDA error" in words or "illegal memory access" in words or "device-side assert" in words


def _guilty(problem: Problem, task: Task) -> str:
    """Which backend raises; the judge itself where none does."""
    for backend in task.backends:
        try:
            examine(problem, backend, task.device)
        except Exception:
            return backend
    return task.backends[0]


def _words(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)[:400]} (in {frame.filename}, line {frame.lineno})"


def _failed(index: int, problem: Problem, words: list[str], backend: str) -> Message:
    return {
        "kind": "failed",
        "index": index,
        "problem": json.loads(to_json(problem)),
        "words": words,
        "backend": backend,
    }
