"""What goes wrong while several ranks save, or has gone wrong with what they saved, costs no more than that save."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support.ranks import config, run_ranks, start_ranks, steps, tensors_of
from support.ranks import model_arguments as arguments
from tileflash.train import CheckpointError, train
from tileflash.train.checkpoint import checkpoints, find_checkpoint, find_fault

pytestmark = pytest.mark.xdist_group("ranks")

# Rank 1 does something when it is to write its file for the second time.
AT_SAVE_2 = """
import errno, os, signal, sys
from tileflash.train import checkpoint_format
original, calls = checkpoint_format.SealingWriter.{method}, [0]
def changed(self, *arguments, **more):
    calls[0] += 1
    if os.environ["RANK"] == "{rank}" and calls[0] == 2:
        {action}
    return original(self, *arguments, **more)
checkpoint_format.SealingWriter.{method} = changed
"""
LAYOUT = ("--data-parallel", 2, "--zero-stage", 3)


def test_a_full_disk_of_one_rank_is_told_and_the_run_goes_on(tokens: Path, tmp_path: Path) -> None:
    full = "raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))"
    script = AT_SAVE_2.format(method="write_data", rank=1, action=full)
    given = arguments(tokens, *LAYOUT, "--output", tmp_path / "run", "--num-iteration", 3, "--save-every", 1)
    (first, told, error), (second, silent, _) = [rank.end(60) for rank in start_ranks(2, given, tmp_path, script)]
    assert (first, second, silent) == (0, 0, ""), error
    assert "could not save the checkpoint of step 2" in told
    assert "rank 1: No space left on device. Earlier checkpoints are untouched" in told
    assert "GB are free. Training goes on" in told
    assert [step for step, _ in checkpoints(tmp_path / "run")] == [1, 3]
    assert not list((tmp_path / "run").glob(".tmp-*"))


def test_a_disk_that_takes_no_more_at_the_end_fails_the_run(tokens: Path, tmp_path: Path) -> None:
    """A real limit: rank 1 may write files of 40 kB, and its part is larger."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))"
    script = AT_SAVE_2.format(method="write_data", rank=1, action=limit)
    given = arguments(tokens, *LAYOUT, "--output", tmp_path / "run", "--num-iteration", 2, "--save-every", 1)
    for rank in start_ranks(2, given, tmp_path, script):
        status, _, error = rank.end(60)
        assert status == 1
        assert "error: could not save the checkpoint of step 2" in error
        assert "rank 1: File too large. Earlier checkpoints are untouched" in error
    (step, path), *others = checkpoints(tmp_path / "run")
    assert (step, find_fault(path), others) == (1, None, [])
    assert not list((tmp_path / "run").glob(".tmp-*"))


@pytest.mark.parametrize(("rank", "method"), [(3, "write_data"), (0, "write_data"), (0, "finish")])
def test_a_kill_amid_a_save_leaves_the_one_before(tokens: Path, tmp_path: Path, rank: int, method: str) -> None:
    """Of four ranks, not all of which speak to the one that is gone: none of them waits to the time limit."""
    script = AT_SAVE_2.format(method=method, rank=rank, action="os.kill(os.getpid(), signal.SIGKILL)")
    run = tmp_path / "run"
    layout = ("--data-parallel", 2, "--tensor-parallel", 2, "--zero-stage", 3, "--rank-timeout", 300)
    given = arguments(tokens, *layout, "--output", run, "--num-iteration", 4, "--save-every", 1)
    ended = [rank.end(60) for rank in start_ranks(4, given, tmp_path, script)]
    assert ended.pop(rank)[0] == -signal.SIGKILL
    for status, _, error in ended:
        assert status == 1
        assert "another rank has ended" in error
    missed = "rank 3 gave no sign of life" if rank == 3 else "rank 0 has ended, and with it"
    assert any(missed in error for _, _, error in ended)
    (step, path), *others = checkpoints(run)
    assert (step, find_fault(path), others) == (1, None, [])
    assert rank == 3 or list(run.glob(".tmp-*"))  # the first rank tidies up, if it lives
    for rank_again in start_ranks(4, [*given, "--resume"], tmp_path):
        assert rank_again.end(60)[0] == 0
    assert [event["step"] for event in steps(run / "log.jsonl")] == [1, 2, 3, 4]
    assert not list(run.glob(".tmp-*"))


@pytest.fixture(scope="module")
def saved(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four ranks with checkpoints of steps 1, 2 and 3."""
    path = tmp_path_factory.mktemp("saved") / "run"
    settings = {"num_iteration": 3, "save_every": 1, "output": str(path), "data_parallel": 2, "tensor_parallel": 2}
    run_ranks(4, [("saved", config("gpt2", tokens, zero_stage=3, **settings))])
    return path


@pytest.mark.parametrize(
    ("flag", "told"), [("--output", "output is run"), ("--load", "the checkpoint to go on from is run/")]
)
def test_a_directory_that_not_all_ranks_see_is_refused(
    saved: Path, tokens: Path, tmp_path: Path, flag: str, told: str
) -> None:
    """As on hosts with disks of their own."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if flag == "--load":
        shutil.copytree(saved, tmp_path / "run")
    script = f"""
import os
from tileflash.train import output
output._SEEN_WITHIN_S = 0.3
os.chdir({str(tmp_path)!r} if os.environ["RANK"] == "0" else {str(elsewhere)!r})
"""
    for rank in start_ranks(2, arguments(tokens, *LAYOUT, flag, "run"), tmp_path, script):
        status, _, error = rank.end(60)
        assert status == 2
        assert told in error
        assert "rank 1 on host" in error
        assert "must be on a file system that all hosts share" in error


def cut_off(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 100)


def change(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [cut_off, change, Path.unlink])
@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", "__3_0.distcp", ".metadata"])
def test_a_damaged_file_of_any_rank_is_found_and_the_checkpoint_before_used(
    saved: Path, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    damage(run / "checkpoint_step_000003" / "tensors" / name)
    told: list[str] = []
    assert find_checkpoint(run, told.append) == run / "checkpoint_step_000002"
    (text,) = told
    assert f"checkpoint_step_000003 is not a complete checkpoint and is not used: tensors/{name}" in text


def test_the_run_goes_on_from_the_checkpoint_before(
    saved: Path, tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    whole = tensors_of(run, step=3)
    change(run / "checkpoint_step_000003" / "tensors" / "__2_0.distcp")
    torch.set_num_threads(1)
    train(config("gpt2", tokens, num_iteration=3, output=str(run), resume=True))
    told = capsys.readouterr().out
    assert "tensors/__2_0.distcp has changed since it was written" in told
    assert "(step 2)" in told
    again = tensors_of(run, step=3)
    for name, expected in whole.items():
        torch.testing.assert_close(again[name], expected, rtol=0, atol=2e-4)
    for path in run.glob("checkpoint_step_*"):
        cut_off(path / "tensors" / ".metadata")
    with pytest.raises(CheckpointError, match=r"none of the 3 checkpoints in .* is complete"):
        train(config("gpt2", tokens, num_iteration=3, output=str(run), resume=True))
