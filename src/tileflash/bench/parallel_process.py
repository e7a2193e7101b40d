"""Runs of `parallel_worker` as processes, alone or by torchrun, and what they left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tileflash.bench.flags import OUT_OF_MEMORY

_TO_END_S = 45.0  # torchrun gives its ranks 30 s


@dataclass(frozen=True)
class Outcome:
    """Of the first run: milliseconds of each step, and of each rank the peak of memory. Of the last one: the loss of each step.

    `reason` says why there is nothing, "" where there is.
    """

    step_ms: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    peak_bytes: tuple[int, ...] = ()
    out_of_memory: bool = False
    reason: str = ""


def in_processes(runs: Sequence[Mapping[str, Any]], ranks: int, limit_s: float) -> Outcome:
    """`runs` (settings of TrainConfig) one after the other in `ranks` fresh processes, which are ended after `limit_s`."""
    assert ranks == 1 or len(runs) == 1  # a process group is made once
    with tempfile.TemporaryDirectory(prefix="tileflash-parallel-") as directory:
        request = Path(directory) / "request.json"
        request.write_text(json.dumps([dict(settings) for settings in runs]), encoding="utf-8")
        starter = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        command = [sys.executable, *starter, "-m", "tileflash.bench.parallel_worker", str(request)]
        # What torchrun sets for several ranks: on a CPU one rank with more threads would not be what a rank is compared with.
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        with (Path(directory) / "output").open("w+") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                _end(process)
                return Outcome(reason=f"ended after {limit_s:.0f} s without an answer")
            except BaseException:
                _end(process)
                raise
            output.seek(0)
            printed = output.read()
        told = [json.loads(path.read_text()) for path in sorted(Path(directory).glob("*.*.json"))]
        if status != 0 or len(told) != len(runs) * ranks:
            return _failure(status, told, printed)
        last = Path(directory) / f"{len(runs) - 1}.jsonl"
        peaks = tuple(
            json.loads((Path(directory) / f"0.{rank}.json").read_text())["peak_bytes"] for rank in range(ranks)
        )
        first_steps, last_steps = steps_of(Path(directory) / "0.jsonl"), steps_of(last)
        return Outcome(
            tuple(step["step_ms"] for step in first_steps),
            # A loss that is not finite is null in the log.
            tuple(float("nan") if step["train_loss"] is None else step["train_loss"] for step in last_steps),
            peaks,
        )


def steps_of(log: Path) -> list[dict[str, Any]]:
    """The events `step` of a trainer's log."""
    events = map(json.loads, log.read_text(encoding="utf-8").splitlines())
    return [event for event in events if event["event"] == "step"]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()  # torchrun ends its ranks
    try:
        process.wait(_TO_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _failure(status: int, told: Sequence[Mapping[str, Any]], printed: str) -> Outcome:
    short = next((facts for facts in told if facts.get(OUT_OF_MEMORY)), None)
    if short is not None:
        return Outcome(out_of_memory=True, reason=str(short["reason"]).splitlines()[0][:300])
    # torchrun's own report comes last; what ended a rank stands before it.
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    errors = [line for line in lines if "rror:" in line and "ChildFailedError" not in line]
    found = (errors or lines or ["nothing was printed"])[0 if errors else -1]
    # -9: the host's own memory ran out, and the kernel chose this process.
    return Outcome(out_of_memory=status == -9, reason=f"exit status {status}: {found[:300]}")


def link_and_library(device: str) -> dict[str, str]:
    """What carries the messages between ranks on this machine, for the ledger's `versions`: `link`, and `nccl` on a GPU."""
    import torch

    if torch.device(device).type != "cuda":
        return {"link": "gloo in this machine's memory"}
    version: tuple[int, ...] = torch.cuda.nccl.version()
    return {"link": _link(), "nccl": ".".join(map(str, version))}


def _link() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    except Exception:  # NVML's errors have a base only where the package could be imported
        return "unknown: NVML does not answer"
    active = []
    for number in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            if pynvml.nvmlDeviceGetNvLinkState(handle, number):
                active.append(pynvml.nvmlDeviceGetNvLinkVersion(handle, number))
        except pynvml.NVMLError:  # there is no link of that number
            break
    if not active:
        return "PCIe: no NVLink is active"
    return f"{len(active)} NVLinks of NVML's version {max(active)}"
