from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tileflash.compare.plan import FLASH, CompareConfig, Run, Setting
from tileflash.compare.results import Outcome, count_steps, read_run

RUN = Run(Setting("gpt2", 4, 64, 3, "float32"), FLASH, 1)
STEPS = [
    {"event": "step", "step": i, "step_ms": 10.0 * i, "train_loss": 5.0 - i, "peak_used_bytes": 100 * i}
    for i in (1, 2, 3)
]
END = {"event": "end", "status": "finished", "message": ""}
WriteLog = Callable[..., Path]


@pytest.fixture
def config(small_config: Callable[..., CompareConfig]) -> CompareConfig:
    return small_config()


def test_a_finished_run(config: CompareConfig, write_log: WriteLog) -> None:
    start = {"event": "start", "environment": {"gpu": "G"}, "parameters": 7, "attention": "cudnn"}
    result = read_run(RUN, write_log(config, RUN, [start, *STEPS, END]))
    assert result is not None
    assert result.outcome is Outcome.FINISHED
    assert not result.settled
    assert result.steps == (1, 2, 3)
    assert result.step_ms == (10.0, 20.0, 30.0)
    assert result.train_loss == (4.0, 3.0, 2.0)
    assert result.peak_used_bytes == 300
    assert (result.environment, result.parameters, result.attention) == ({"gpu": "G"}, 7, "cudnn")


@pytest.mark.parametrize(
    ("start", "captured"),
    [
        ({"cuda_graph": True, "config": {"cuda_graph": None}}, True),
        ({"cuda_graph": False, "config": {"cuda_graph": None}}, False),
        ({"config": {"cuda_graph": False}}, False),  # of before the value in force was logged
        ({"config": {"cuda_graph": None}}, None),
        ({"cuda_graph": "yes"}, None),
        ({}, None),
    ],
)
def test_whether_steps_were_a_cuda_graph(
    config: CompareConfig, write_log: WriteLog, start: dict[str, object], captured: bool | None
) -> None:
    result = read_run(RUN, write_log(config, RUN, [{"event": "start", **start}, *STEPS, END]))
    assert result is not None
    assert result.cuda_graph is captured


def test_no_log_and_no_record_are_no_result(config: CompareConfig, write_log: WriteLog, tmp_path: Path) -> None:
    assert read_run(RUN, tmp_path / "absent.jsonl") is None
    assert read_run(RUN, write_log(config, RUN, [*STEPS, END], record=False)) is None


def test_lines_that_are_no_events_are_passed_over(config: CompareConfig, write_log: WriteLog) -> None:
    garbage = ["", "nonsense", "[1]", "3", '{"event": "st', '{"event": "step", "step": "x", "step_ms": 1.0}', "\x00"]
    result = read_run(RUN, write_log(config, RUN, [*garbage, *STEPS, *garbage, END]))
    assert result is not None
    assert result.outcome is Outcome.FINISHED
    assert result.steps == (1, 2, 3)


def test_a_loss_that_is_not_finite_is_nan_and_not_lost(config: CompareConfig, write_log: WriteLog) -> None:
    steps = [
        {**STEPS[0], "train_loss": None},
        '{"event": "step", "step": 2, "step_ms": 1, "train_loss": NaN}',
        STEPS[2],
    ]
    result = read_run(RUN, write_log(config, RUN, [*steps, END]))
    assert result is not None
    assert math.isnan(result.train_loss[0])
    assert math.isnan(result.train_loss[1])
    assert result.train_loss[2] == 2.0


@pytest.mark.parametrize("peak", [None, 0])
def test_a_device_that_tells_no_peak(config: CompareConfig, write_log: WriteLog, peak: int | None) -> None:
    result = read_run(RUN, write_log(config, RUN, [*({**s, "peak_used_bytes": peak} for s in STEPS), END]))
    assert result is not None
    assert result.peak_used_bytes is None


OOM_END = {"event": "end", "status": "out_of_memory", "message": "lower --batch-size"}


@pytest.mark.parametrize(
    ("events", "exit_status", "timed_out", "outcome", "message", "settled"),
    [
        ([OOM_END], 3, False, Outcome.OUT_OF_MEMORY, "lower --batch-size", True),
        ([], 3, False, Outcome.OUT_OF_MEMORY, "out of memory", True),
        ([OOM_END], 1, False, Outcome.OUT_OF_MEMORY, "lower --batch-size", True),
        ([], 2, False, Outcome.FAILED, "exit status 2", True),
        ([{"event": "end", "status": "failed", "message": "broke"}], 1, False, Outcome.FAILED, "broke", False),
        ([], -9, False, Outcome.FAILED, "killed by signal 9; the kernel kills so", False),
        ([], -11, False, Outcome.FAILED, "killed by signal 11", False),
        ([*STEPS], -15, True, Outcome.TIMED_OUT, "killed after 12 s", True),
        ([*STEPS[:2], END], 0, False, Outcome.FAILED, "2 steps instead of 3", False),
        ([], 0, False, Outcome.FAILED, "0 steps instead of 3", False),
    ],
)
def test_how_runs_end(
    config: CompareConfig,
    write_log: WriteLog,
    events: list[object],
    exit_status: int,
    timed_out: bool,
    outcome: Outcome,
    message: str,
    settled: bool,
) -> None:
    result = read_run(RUN, write_log(config, RUN, events, exit_status, timed_out))
    assert result is not None
    assert result.outcome is outcome
    assert message in result.message
    assert result.settled is settled


def test_steps_are_counted_while_they_are_written(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    assert count_steps(log) == 0
    log.write_text('{"event": "start"}\n{"event": "step", "step": 1}\n{"event":"step"}\n{"event": "st')
    assert count_steps(log) == 2
