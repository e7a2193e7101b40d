"""A rank that fails, dies, hangs or is told to end takes the others with it: in time, in words, with a status."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from support.ranks import ROOT, config, run_ranks, start_ranks, steps
from support.ranks import model_arguments as arguments
from tileflash.train.checkpoint import checkpoints, find_fault

pytestmark = pytest.mark.xdist_group("ranks")

# Rank 1 does something at its third step; the ranks are started without torchrun, whose agent would end the others.
AT_STEP_3 = """
import os, signal, sys, time
from tileflash.train import parallel_trainer
original, calls = parallel_trainer.ParallelTrainer._compute, [0]
def compute(self, *arguments):
    calls[0] += 1
    if self.ranks.rank == 1 and calls[0] == 3:
        {action}
    return original(self, *arguments)
parallel_trainer.ParallelTrainer._compute = compute
"""


@pytest.mark.parametrize(
    ("action", "status", "why"),
    [
        ("raise RuntimeError('out of luck')", 1, "rank 1 ended: RuntimeError: out of luck"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, "rank 1 gave no sign of life: killed, or stuck"),
    ],
    ids=["raises", "is killed"],
)
def test_the_others_end_when_a_rank_does(tokens: Path, tmp_path: Path, action: str, status: int, why: str) -> None:
    given = arguments(
        tokens, "--data-parallel", 2, "--zero-stage", 2, "--output", tmp_path, "--num-iteration", 9, "--save-every", 1
    )
    ranks = start_ranks(2, given, tmp_path, AT_STEP_3.format(action=action))
    (first, told, error), (second, _, _) = [rank.end(60) for rank in ranks]
    assert (first, second) == (1, status), error
    assert "error: rank 0: another rank has ended or has not answered" in error
    assert why in error
    assert "step 2/9" in told
    assert "step 3/9" not in told
    step, last = checkpoints(tmp_path)[-1]
    # A rank that raises sees the save of step 2 to its end; one that is killed may be in the middle of it.
    assert step == 2 or (step == 1 and status == -signal.SIGKILL)
    assert find_fault(last) is None


@pytest.mark.parametrize("layout", ["--tensor-parallel", "--pipeline-parallel"])
def test_a_rank_that_hangs_is_given_up_and_named(tokens: Path, tmp_path: Path, layout: str) -> None:
    """Of four ranks the second: not the one that all others ask first."""
    more = ["--total-batch-size", 8 * 16 * 2, "--model-override", "n_layer=4"] if "pipeline" in layout else []
    given = arguments(tokens, "--model-override", "n_head=4", layout, 4, "--rank-timeout", 5, *more)
    ranks = start_ranks(4, given, tmp_path, AT_STEP_3.format(action="time.sleep(600)"))
    started = time.monotonic()
    first, *others = ranks
    hanging = others.pop(0)
    told = [rank.end(60) for rank in (first, *others)]
    assert time.monotonic() - started < 60
    assert hanging.end(0)[0] is None  # it would still be asleep
    for status, _, error in told:
        assert status == 1, error
        assert "has not answered for 5 s" in error
    together = "".join(error for _, _, error in told)
    where = "rank 1 does not wait for others, but is at <string>:8 in compute"
    assert f"no step has begun for 4 s: {where}" in together  # before it is given up
    assert f"has not answered for 5 s ({where}), so this one ends too" in together


def test_a_signal_to_one_rank_ends_all_after_saving(tokens: Path, tmp_path: Path) -> None:
    action = "os.kill(os.getpid(), signal.SIGTERM)"
    given = arguments(tokens, "--tensor-parallel", 2, "--output", tmp_path, "--num-iteration", 10**6)
    ranks = start_ranks(2, given, tmp_path, AT_STEP_3.format(action=action))
    (first, told, error), (second, silent, _) = [rank.end(60) for rank in ranks]
    assert (first, second) == (130, 130), error
    assert "another rank was told to end: so do all" in told
    assert "interrupted at step 3/1000000" in told
    assert silent == ""  # only the first rank speaks
    step, last = checkpoints(tmp_path)[-1]
    assert (step, find_fault(last)) == (3, None)


def _nan_on_the_last_rank(rank: int) -> None:
    """The loss of the second micro-batch is NaN in steps 3 and 4, on rank 1 alone."""
    from tileflash.parallel.model import ParallelModel

    if rank != 1:
        return
    forward, calls = ParallelModel.forward, [0]

    def poisoned(self: ParallelModel, *arguments: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return forward(self, *arguments) * (float("nan") if calls[0] in (6, 8) else 1.0)

    ParallelModel.forward = poisoned  # type: ignore[method-assign, assignment]


def test_nan_on_one_rank_skips_the_step_on_all(tokens: Path, tmp_path: Path) -> None:
    settings = {"data_parallel": 2, "zero_stage": 1, "num_iteration": 6, "log_json": str(tmp_path / "log.jsonl")}
    # It saves: whatever a rank had taken up of the NaN would be found. Ranks that disagreed would wait for each other.
    run_ranks(2, [("NaN", config("gpt2", tokens, output=str(tmp_path), **settings))], _nan_on_the_last_rank)
    events = steps(tmp_path / "log.jsonl")
    assert ["skip_reason" in event for event in events] == [False, False, True, True, False, False]
    assert events[-1]["skipped"] == 2
    assert find_fault(checkpoints(tmp_path)[-1][1]) is None


# What torchrun starts twice: the first time rank 1 is killed at its third step.
KILLED_ONCE = """
import os
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    {kill}
from tileflash.cli import main
main()
"""


def test_wrong_numbers_are_told_by_all(tokens: Path, tmp_path: Path) -> None:
    for rank in start_ranks(2, arguments(tokens, "--data-parallel", 3), tmp_path):
        status, _, error = rank.end(60)
        assert status == 2
        assert "data_parallel * tensor_parallel is 3 * 1 = 3: it must be the number of ranks, 2" in error


def test_torchrun_restarts_what_was_killed(tokens: Path, tmp_path: Path) -> None:
    script = tmp_path / "killed_once.py"
    kill = AT_STEP_3.format(action="os.kill(os.getpid(), signal.SIGKILL)")
    script.write_text(KILLED_ONCE.format(kill=kill.strip().replace("\n", "\n    ")))
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        2,
        "--max-restarts",
        1,
    ]
    layout = ("--tensor-parallel", 2, "--sequence-parallel")
    given = arguments(tokens, "--num-iteration", 4, *layout, "--output", tmp_path / "run", "--save-every", 1)
    environment = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "PATH": ""}
    command = [*map(str, [*torchrun, script, "train", *given])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    (from_step,) = re.findall(r"going on from .* \(step (\d)\)", done.stdout)  # without --resume
    assert from_step in "12"  # the kill may come amid the save of step 2
    expected = [1, 2, *range(int(from_step) + 1, 5)]
    assert [line[:8] for line in lines] == [f"step {step}/4" for step in expected]
    assert all(line.endswith("DP=1, TP=2, SP=2, PP=1)") for line in lines)
