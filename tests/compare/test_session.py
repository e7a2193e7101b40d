"""A whole comparison over a fake trainer: every way a run can end, interruption, taking up again."""

from __future__ import annotations

import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tileflash.compare.plan import BASELINE, FLASH, CompareConfig, Run, plan
from tileflash.compare.session import compare

MakeConfig = Callable[..., CompareConfig]
FakeTrainer = Callable[..., list[str]]


def _compare(config: CompareConfig, command: list[str]) -> tuple[int, str]:
    """Exit status and what was shown."""
    shown = io.StringIO()
    return compare(config, command=command, console=Console(file=shown, width=200)), shown.getvalue()


def _logs(config: CompareConfig) -> set[str]:
    return {path.stem for path in (config.output / "runs").glob("*.jsonl")}


def _report(config: CompareConfig) -> str:
    assert "</html>" in (config.output / "report.html").read_text()
    return (config.output / "report.md").read_text()


def test_all_goes_well(small_config: MakeConfig, fake_trainer: FakeTrainer) -> None:
    config = small_config()
    status, shown = _compare(config, fake_trainer())
    assert status == 0
    assert _logs(config) == {run.name for run in plan(config)}
    assert "[8/8]" in shown
    assert str(config.output / "report.html") in shown
    report = _report(config)
    assert "Runs that failed" not in report
    assert "planned runs are in this report" not in report
    for plot in ("time-gpt2", "memory-gpt2", "speedup-gpt2"):
        assert (config.output / "plots" / f"{plot}.svg").read_text().startswith("<svg")
    assert list(config.output.rglob("*.tmp")) == []


def test_two_comparisons_in_one_directory_are_refused(small_config: MakeConfig, fake_trainer: FakeTrainer) -> None:
    """The second one put the runs of the first aside, which then ended amid its measurement."""
    config = small_config()
    config.output.mkdir(parents=True, exist_ok=True)
    with (config.output / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another comparison is writing to it"):
            _compare(config, fake_trainer())
    assert not (config.output / "runs").exists()
    assert _compare(config, fake_trainer())[0] == 0


def test_out_of_memory_is_a_result_and_not_repeated(small_config: MakeConfig, fake_trainer: FakeTrainer) -> None:
    config = small_config()
    status, shown = _compare(config, fake_trainer(out_of_memory=["baseline:256"]))
    assert status == 0
    assert "OOM: CUDA out of memory; lower --batch-size" in shown
    of_256 = {name for name in _logs(config) if "-s256-" in name}
    assert sum(name.endswith("baseline-r1") for name in of_256) == 1
    assert sum(name.endswith("baseline-r2") for name in of_256) == 0
    assert sum("flash" in name for name in of_256) == 2
    assert "baseline OOM" in _report(config)
    assert "At sequence 256 only the baseline runs out of memory." in _report(config)


def test_a_crash_is_shown_and_the_rest_goes_on(small_config: MakeConfig, fake_trainer: FakeTrainer) -> None:
    config = small_config()
    status, shown = _compare(config, fake_trainer(crash=["flash:64:r1"]))
    assert status == 1
    assert shown.count("RuntimeError: the fake broke at step 3") >= 2, "the reason and the last lines"
    assert _logs(config) == {run.name for run in plan(config)}
    assert "Runs that failed" in _report(config)
    assert "the fake broke at step 3" in _report(config)


def test_a_killed_run_is_a_failure_that_says_so(small_config: MakeConfig, fake_trainer: FakeTrainer) -> None:
    status, shown = _compare(small_config(repeats=1), fake_trainer(killed=["baseline:64"]))
    assert status == 1
    assert "killed by signal 9" in shown


def test_garbage_in_a_log_does_no_harm(small_config: MakeConfig, fake_trainer: FakeTrainer) -> None:
    config = small_config(repeats=1)
    assert _compare(config, fake_trainer(garbage=["baseline:64", "flash:256"]))[0] == 0
    assert "Runs that failed" not in _report(config)


def test_a_run_that_hangs_is_killed_even_if_it_ignores_sigterm(
    small_config: MakeConfig, fake_trainer: FakeTrainer
) -> None:
    config = small_config(lengths=(64,), timeout_seconds=1.5)
    started = time.monotonic()
    status, shown = _compare(config, fake_trainer(hang=["flash:64"]))
    assert time.monotonic() - started < 30
    assert status == 1
    assert "TIMED OUT" in shown
    assert _logs(config) == {run.name for run in plan(config) if run.scheme == BASELINE or run.repeat == 1}
    assert "timed out" in _report(config)
    assert not _running("fake_trainer.py", str(config.output))


def _running(*parts: str) -> list[int]:
    """The processes that have all of `parts` in their command lines."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_text()
        except OSError:
            continue
        if all(part in line for part in parts) and process.name != str(os.getpid()):
            found.append(int(process.name))
    return found


def test_continue_makes_only_what_is_missing(small_config: MakeConfig, fake_trainer: FakeTrainer) -> None:
    config = small_config(resume=True)
    assert _compare(config, fake_trainer(crash=["flash:64:r1"], out_of_memory=["baseline:256"]))[0] == 1
    before = {path: path.stat().st_mtime_ns for path in (config.output / "runs").glob("*.jsonl")}
    status, shown = _compare(config, fake_trainer(crash=["baseline:64", "flash:256"]))  # none of these may run
    assert status == 0
    assert "taking up 6 finished runs of 8" in shown  # all but the crash and the repeat that out of memory left out
    made_again = {path.stem for path, mtime in before.items() if path.stat().st_mtime_ns != mtime}
    assert made_again == {"gpt2-b4-s64-n5-bfloat16-flash-r1"}
    assert "Runs that failed" not in _report(config)


def test_continue_does_not_take_runs_made_with_other_arguments(
    small_config: MakeConfig, fake_trainer: FakeTrainer
) -> None:
    _compare(small_config(repeats=1), fake_trainer())
    _, shown = _compare(small_config(repeats=1, resume=True, seed=7), fake_trainer())
    assert "taking up" not in shown
    assert "[4/4]" in shown


@pytest.mark.parametrize("made_with", [[], ["--cuda-graph"]])
def test_continue_does_not_take_runs_whose_steps_were_another_kind(
    small_config: MakeConfig, fake_trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch, made_with: list[str]
) -> None:
    """Left to the default, which here is no graph: not those of a graph, nor those of before the flag was passed."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = small_config(repeats=1, cuda_graph=None, resume=True)
    _compare(config, fake_trainer())
    assert "taking up 4 finished runs of 4" in _compare(config, fake_trainer())[1]
    for log in (config.output / "runs").glob("*.jsonl"):
        *events, record = log.read_text().splitlines()
        arguments = json.loads(record)["arguments"]
        place = arguments.index("--no-cuda-graph")
        arguments[place : place + 1] = made_with
        log.write_text("\n".join([*events, json.dumps({**json.loads(record), "arguments": arguments})]) + "\n")
    _, shown = _compare(config, fake_trainer())
    assert "taking up" not in shown
    assert "[4/4]" in shown


def test_a_graph_without_a_gpu_is_refused_before_the_first_run(
    small_config: MakeConfig, fake_trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = small_config(cuda_graph=True)
    with pytest.raises(ValueError, match="cuda_graph is set and the device is cpu"):
        _compare(config, fake_trainer())
    assert not config.output.exists()


def test_a_new_comparison_keeps_the_last_ones_runs_aside(small_config: MakeConfig, fake_trainer: FakeTrainer) -> None:
    config = small_config(repeats=1)
    _compare(config, fake_trainer())
    names = _logs(config)
    status, shown = _compare(config, fake_trainer(crash=["baseline:64"]))
    assert status == 1
    assert "runs.previous" in shown
    assert {path.stem for path in (config.output / "runs.previous").glob("*.jsonl")} == names


def test_the_budget_ends_it_with_a_report(small_config: MakeConfig, fake_trainer: FakeTrainer) -> None:
    config = small_config(budget_seconds=4.0)  # a slow run takes 1.5 s
    status, _ = _compare(config, fake_trainer(slow=[f"{s}:{n}" for s in (BASELINE, FLASH) for n in (64, 256)]))
    assert status == 0
    assert "8 planned runs are in this report: its time budget of 4 s was spent" in _report(config)
    assert "Runs that failed" not in _report(config), "the run that the budget cut off is none"


INTERRUPTIBLE = """
import json, sys
from pathlib import Path
from tileflash.compare.plan import CompareConfig
from tileflash.compare.session import compare
config = CompareConfig(models=("gpt2",), lengths=(64, 256), repeats=2, num_iteration=5, public_setting=False, cuda_graph=False,
                       output=Path(sys.argv[1]))
sys.exit(compare(config, command=json.loads(sys.argv[2])))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_comparison_reports_and_can_be_taken_up(
    small_config: MakeConfig, fake_trainer: FakeTrainer, number: signal.Signals
) -> None:
    config = small_config(resume=True)
    third = plan(config)[2]
    command = fake_trainer(hang=[f"{third.scheme}:{third.setting.sequence_length}:r{third.repeat}"])
    line = [sys.executable, "-c", INTERRUPTIBLE, str(config.output), json.dumps(command)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    _wait_for(config.output / "runs" / f"{third.name}.jsonl")
    process.send_signal(number)
    shown, _ = process.communicate(timeout=60)
    assert process.returncode == 130, shown
    assert "interrupted" in shown
    assert "2 of 8 planned runs are in this report: it was interrupted" in _report(config)
    assert not _running("fake_trainer.py", str(config.output))

    status, shown = _compare(config, fake_trainer())
    assert status == 0
    assert "taking up 2 finished runs of 8" in shown
    assert "planned runs are in this report" not in _report(config)


def test_a_killed_comparisons_run_keeps_others_out(small_config: MakeConfig, fake_trainer: FakeTrainer) -> None:
    """It goes on: its lines came into the log of the run that took its place, and both shared the device."""
    config = small_config(resume=True)
    first = plan(config)[0]
    command = fake_trainer(hang=[f"{first.scheme}:{first.setting.sequence_length}:r1"])
    line = [sys.executable, "-c", INTERRUPTIBLE, str(config.output), json.dumps(command)]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, start_new_session=True)
    _wait_for(config.output / "runs" / f"{first.name}.jsonl")
    process.kill()
    process.wait()
    try:
        with pytest.raises(ValueError, match="one that was killed still goes on"):
            _compare(config, fake_trainer())
    finally:
        for orphan in _running("fake_trainer.py", str(config.output)):
            os.kill(orphan, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while _running("fake_trainer.py", str(config.output)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert _compare(config, fake_trainer())[0] == 0


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not (path.is_file() and path.stat().st_size):
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.05)


def test_the_demo_fails_when_losses_do_not_fall(small_config: MakeConfig, fake_trainer: FakeTrainer) -> None:
    # The fake's loss falls from 10.95 to 10.75 only; its schemes agree within 5e-5.
    status, shown = _compare(small_config(demo=True, dtype="float32", repeats=1), fake_trainer())
    assert status == 1
    assert "the loss of baseline did not fall (10.9500 at first, 10.7500 at last)" in shown
    assert "losses differ by" not in shown.partition("error:")[2]


def test_the_demo_fails_when_losses_differ(small_config: MakeConfig, fake_trainer: FakeTrainer) -> None:
    status, shown = _compare(small_config(demo=True, dtype="float32", repeats=1, num_iteration=40), fake_trainer())
    assert status == 1
    assert "the losses differ by 4.0e-04 at step 40; must be at most 1.0e-04" in shown
    assert "did not fall" not in shown


def test_on_a_terminal_there_is_a_bar_that_says_what_runs(small_config: MakeConfig, fake_trainer: FakeTrainer) -> None:
    shown = io.StringIO()
    console = Console(file=shown, width=120, force_terminal=True)
    config = small_config(lengths=(64,), repeats=1)
    assert compare(config, command=fake_trainer(slow=["flash:64"]), console=console) == 0
    assert "comparing" in shown.getvalue()
    assert "gpt2, sequence 64, bfloat16, flash, repeat 1, step" in shown.getvalue()


def test_an_output_that_cannot_be_written_is_an_oserror(
    small_config: MakeConfig, fake_trainer: FakeTrainer, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        _compare(small_config(output=tmp_path / "file" / "report"), fake_trainer())


def test_runs_are_told_apart_by_their_names(small_config: MakeConfig) -> None:
    names = [run.name for run in plan(small_config(models=("gpt2", "llama3-1b")))]
    assert len(names) == len(set(names))
    assert isinstance(plan(small_config())[0], Run)
