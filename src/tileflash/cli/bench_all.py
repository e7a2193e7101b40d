"""`tileflash bench all`: every suite in turn, within a time budget, each a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from tileflash.cli.bench_console import progress_line
from tileflash.cli.bench_options import Device, Fa3Library, LargestSpread
from tileflash.cli.errors import friendly_errors

# suite -> its share of what is left when its turn comes, from suites whose time is known (an H200), and its arguments on a CPU.
# What is counted or short comes first, so that a budget that is too small costs the long tables alone.
_SUITES: dict[str, tuple[float, str]] = {
    "model-memory": (0.05, ""),
    "host": (0.05, "--variants tileflash-auto,math --dtype float32 --seq 32 --calls 3 --rounds 3"),
    "memory": (0.1, "--lengths 32,64 --batch 1 --heads 2 --head-dim 16 --variants math,tileflash-auto"),
    "lengths": (0.15, "--lengths 32,64 --batch 1 --heads 2 --head-dim 16 --dtype float32 --target-ms 5 --pause-ms 0"),
    "scaling": (0.15, "--lengths 32,64 --heads 2 --head-dim 16 --dtype float32 --target-ms 5 --pause-ms 0"),
    "versions": (0.2, "--lengths 64 --batch 1 --heads 2 --head-dim 16 --dtype float32 --target-ms 5 --pause-ms 0"),
    "generation": (0.25, "--model llama3-tiny --contexts 32,64 --dtype float32 --target-ms 5 --pause-ms 0"),
    "training": (0.35, "--cases llama3-tiny:1x32,llama3-tiny:2x32 --dtype float32"),
    "models": (0.5, "--cases gpt2-tiny:1x32,llama3-tiny:1x32 --dtype float32"),
    "parallel": (0.6, "--cases dp --repeats 1 --steps 2 --warmup 1"),
    "attention": (
        1.0,
        "--tokens 64 --width 32 --lengths 32,64 --head-dims 16 --dtype float32 --variants tileflash-auto,math --target-ms 5 --pause-ms 0",
    ),
}
_WITH_FA3 = ("host", "memory", "lengths", "versions", "attention")
# 72 cases: shorter turns than by default, so that all fit into a quarter of an hour together with the rest.
_ATTENTION_ON_A_GPU = "--variants tileflash-auto,tileflash-triton,fa2,cudnn,fa3 --target-ms 60"
_GRACE_S = 60.0  # a suite ends by itself before its budget does; this is for one that hangs


@friendly_errors
def all_suites(
    budget_seconds: Annotated[
        float, typer.Option(help="For all suites together; what does not fit is left out.")
    ] = 900.0,
    device: Device = "cuda",
    output: Annotated[Path, typer.Option(help="Directory of the ledger; one file a suite.")] = Path(
        "benchmarks/results"
    ),
    fa3_library: Fa3Library = None,
    largest_spread: LargestSpread = 0.2,
    only: Annotated[str | None, typer.Option(help="Some of the suites, comma-separated.", show_default="all")] = None,
) -> None:
    """Every suite, each in a process of its own, within a time budget; on a CPU at small sizes.

    Example: tileflash bench all --budget-seconds 900
    On a CPU: tileflash bench all --device cpu --output /tmp/results --largest-spread 10

    Then: tileflash report --html report.html. Exit status 1 when a suite's audit found something or a suite failed.
    """
    from tileflash.bench.timing import clock_for
    from tileflash.cli.comma_separated import words

    chosen = words(only) if only is not None else tuple(_SUITES)
    if unknown := [name for name in chosen if name not in _SUITES]:
        raise ValueError(f"`--only` held {unknown[0]!r}; it must be some of {', '.join(_SUITES)}")
    if not budget_seconds > 0:
        raise ValueError(f"`--budget-seconds` was {budget_seconds}; it must be above 0")
    clock_for(device)  # says what is wrong with the device
    end, statuses = time.monotonic() + budget_seconds, {}
    for name in (name for name in _SUITES if name in chosen):
        left_s = end - time.monotonic()
        if left_s <= 0:
            progress_line(f"{name}: no time left, left out")
            continue
        if name == "parallel" and not _has_two(device):
            progress_line(f"{name}: needs two GPUs, left out")
            continue
        share_s = left_s * (1.0 if name == chosen[-1] else _SUITES[name][0])
        arguments = _arguments(name, device, output, fa3_library, largest_spread, share_s)
        progress_line(f"== tileflash bench {' '.join(arguments)}")
        statuses[name] = _run(arguments, share_s + _GRACE_S)
    wrong = {name: status for name, status in statuses.items() if status != 0}
    for name, status in wrong.items():
        progress_line(f"{name}: exit status {status}")
    raise typer.Exit(1 if wrong else 0)


def _has_two(device: str) -> bool:
    import torch

    return device == "cpu" or torch.cuda.device_count() > 1


def _arguments(
    name: str, device: str, output: Path, fa3_library: Path | None, largest_spread: float, share_s: float
) -> list[str]:
    arguments = [name, "--output", str(output / f"{name}.jsonl")]
    if name == "model-memory":
        return arguments
    arguments += ["--device", device, "--largest-spread", f"{largest_spread:g}"]
    if name not in ("host", "memory"):  # these are short, and know no budget
        arguments += ["--budget-seconds", f"{share_s:.0f}" if share_s >= 1 else f"{share_s:g}"]
    if fa3_library is not None and name in _WITH_FA3:
        arguments += ["--fa3-library", str(fa3_library)]
    if device == "cpu":
        arguments += _SUITES[name][1].split()
    elif name == "attention":
        arguments += _ATTENTION_ON_A_GPU.split()
    return arguments


def _run(arguments: list[str], limit_s: float) -> int:
    """The exit status; 124, as `timeout` has it, where the suite had to be ended."""
    try:
        return subprocess.run(
            [sys.executable, "-m", "tileflash", "bench", *arguments], timeout=limit_s, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return 124
