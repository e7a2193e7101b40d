"""A worker process: reads one line of JSON from stdin, writes messages as lines of JSON to stdout.

{"do": "work", "task": {...}}, {"do": "shrink", "problem": {...}, "backend": ..., "device": ..., "seconds": ...} with messages
"shrunk" (problem), or {"do": "examine", ...} with a message "examined" (words).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from tileflash.fuzz.judge import examine
from tileflash.fuzz.problems import Problem, from_json, to_json
from tileflash.fuzz.shrink import shrink
from tileflash.fuzz.work import Message, Task, is_fatal, work


def main() -> None:
    order = json.loads(sys.stdin.readline())
    # What kernels, compilers and drivers print must not come between the messages.
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(message: Message) -> None:
        messages.write(json.dumps(message) + "\n")
        messages.flush()

    torch.set_num_threads(1)  # there are other workers
    if order["do"] == "work":
        for message in work(_task(order["task"])):
            tell(message)
    else:
        problem = from_json(json.dumps(order["problem"]))
        if order["do"] == "examine":
            tell({"kind": "examined", "words": what_is_wrong(problem, order["backend"], order["device"])})
        else:
            smaller(problem, order["backend"], order["device"], order["seconds"], tell)


def smaller(problem: Problem, backend: str, device: str, seconds: float, tell: Callable[[Message], None]) -> Problem:
    """Shrink in this process, telling each step. The fault stays the same: some result that is wrong, or the exception's type."""
    faults = _kinds(what_is_wrong(problem, backend, device))
    return shrink(
        problem,
        lambda candidate: bool(faults & _kinds(what_is_wrong(candidate, backend, device))),
        seconds,
        lambda found: tell({"kind": "shrunk", "problem": json.loads(to_json(found))}),
    )


def _kinds(words: list[str]) -> set[str]:
    """What words of `what_is_wrong` are about, without their numbers."""
    return {text.partition(": error ")[0] if ": error " in text else text.partition(":")[0] for text in words}


def what_is_wrong(problem: Problem, backend: str, device: str) -> list[str]:
    """Results that are wrong, or the exception, in words."""
    try:
        return [str(one) for one in examine(problem, backend, device)]
    except Exception as error:
        if is_fatal(error):
            raise
        return [f"{type(error).__name__}: {error}"]


def _task(record: dict[str, Any]) -> Task:
    for name in ("backends", "only", "without"):
        if record.get(name) is not None:
            record[name] = tuple(record[name])
    return Task(**record)


if __name__ == "__main__":
    main()
