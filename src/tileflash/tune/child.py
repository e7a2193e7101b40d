"""The child process of a tuning: tries configurations one after the other and writes what it found, a JSON line at a time.

A configuration that takes the process down leaves a "started" line behind; the parent goes on with the others in a new child.

    python -m tileflash.tune.child EVENTS_FILE JOB     (JOB: JSON of `session.Job`)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tileflash.bench.timing import TimingPlan, clock_for, compare
from tileflash.tune.calls import Call, Shape, bind, disagreement, make_call
from tileflash.tune.candidates import Target, candidates


def main(arguments: list[str]) -> None:
    """Verify (compile, run, compare with the shipped configuration), or verify and time."""
    path, text = arguments
    job = json.loads(text)
    target, device = Target(**job["target"]), job["device"]
    all_candidates = candidates(target)

    def tell(event: str, **facts: Any) -> None:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **facts}) + "\n")

    for shape in (Shape(**one) for one in job["shapes"]):
        call = make_call(target, shape, device)
        calls: dict[str, Call] = {}
        expected: tuple[torch.Tensor, ...] | None = None
        for index in job["indices"]:
            tell("started", index=index)
            try:
                run = bind(target, all_candidates[index], call)
                result = run()
                if device != "cpu":
                    torch.cuda.synchronize()
                expected = result if expected is None else expected
                complaint = disagreement(result, expected)
            except Exception as error:  # a compiler's errors have no common base
                complaint = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            if complaint:
                tell("failed", index=index, reason=complaint)
                continue
            tell("verified", index=index)
            calls[str(index)] = run
        if job["time"] and calls:
            plan = TimingPlan(rounds=job["rounds"], target_ms=job["target_ms"], pause_ms=5.0)
            baseline = str(job["indices"][0])
            for name, timing in compare(calls, clock_for(device), baseline=baseline, plan=plan).items():
                ratio = timing.speed_ratio
                tell(
                    "timed", index=int(name), length=shape.length, time_ms=vars(timing.time_ms),
                    speed_ratio=None if ratio is None else vars(ratio),
                )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
