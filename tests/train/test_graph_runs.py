"""Runs whose steps are captured, without a GPU: where they are, what they agree with, what happens where it fails."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support.plain_recorder import OUT_OF_MEMORY, PlainRecorder
from tileflash.train import GraphCaptureError, TrainConfig, TrainingOutOfMemoryError, train
from tileflash.train.graph import CapturedStep
from tileflash.train.setup import cuda_graph_in_force

Make = Callable[..., TrainConfig]
RATE = 2.0**-7  # the same in fp32, which a captured step has it in
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("wanted", "device", "hip", "used"),
    [
        (None, CPU, None, False),
        (None, GPU, None, True),
        (None, GPU, "7.1.0", False),  # never tried there
        (True, GPU, None, True),
        (True, GPU, "7.1.0", True),
        (False, GPU, None, False),
        (False, CPU, None, False),
    ],
)
def test_where_steps_are_captured(
    monkeypatch, wanted: bool | None, device: torch.device, hip: str | None, used: bool
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    assert cuda_graph_in_force(wanted, device) is used


@pytest.fixture
def as_on_a_gpu(monkeypatch) -> Callable[[PlainRecorder], None]:
    """Lets runs on the CPU capture their steps, with the recorder that is given."""

    def use(recorder: PlainRecorder) -> None:
        monkeypatch.setattr("tileflash.train.setup.cuda_graph_in_force", lambda wanted, device: wanted is not False)
        captured = functools.partial(CapturedStep, recorder=recorder)
        monkeypatch.setattr("tileflash.train.trainer.CapturedStep", captured)

    return use


def steady(tiny: Make, **changes: object) -> TrainConfig:
    """Four micro-batches a step, a learning rate that is the same in fp32."""
    settings = {"learning_rate": RATE, "final_learning_rate_fraction": 1, "total_batch_size": 4 * 32}
    return tiny(**{**settings, **changes})


def test_a_run_is_the_same_captured_with_looks_at_the_model_between_steps(
    tmp_path: Path, tiny: Make, token_file: Path, as_on_a_gpu, numbers, read_events
) -> None:
    looks = {"val_loss_every": 2, "input_val_bin": str(token_file), "sample_every": 3, "tokenizer": "bytes"}
    train(steady(tiny, **looks, log_json=str(tmp_path / "eager")))
    recorder = PlainRecorder()
    as_on_a_gpu(recorder)
    train(steady(tiny, **looks, log_json=str(tmp_path / "graph")))
    assert recorder.replayed == 6 * 5
    for kind in ("validation", "sample"):
        assert read_events(tmp_path / "graph", kind) == read_events(tmp_path / "eager", kind) != []
    assert numbers(tmp_path / "graph") == numbers(tmp_path / "eager")


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
def test_captured_and_eager_runs_go_on_from_each_other(
    tmp_path: Path, tiny: Make, as_on_a_gpu, numbers, first: bool, second: bool
) -> None:
    whole = steady(tiny, output=str(tmp_path / "whole"), cuda_graph=False)
    train(whole)
    as_on_a_gpu(PlainRecorder())
    output = str(tmp_path / "part")
    train(steady(tiny, output=output, cuda_graph=first, num_iteration=3))
    train(steady(tiny, output=output, cuda_graph=second, resume=True))
    assert numbers(tmp_path / "part" / "log.jsonl") == numbers(tmp_path / "whole" / "log.jsonl")


def test_a_capture_that_fails_unasked_is_told_and_the_run_goes_on(
    tmp_path: Path, tiny: Make, as_on_a_gpu, numbers, read_events, capsys
) -> None:
    train(steady(tiny, log_json=str(tmp_path / "eager")))
    capsys.readouterr()
    recorder = PlainRecorder(1, GraphCaptureError("RuntimeError: a stream was waited for"))
    as_on_a_gpu(recorder)
    result = train(steady(tiny, log_json=str(tmp_path / "graph")))
    assert (result.status, recorder.recorded) == ("finished", 1)  # it is tried once
    assert numbers(tmp_path / "graph") == numbers(tmp_path / "eager")
    event = {"event": "not_captured", "step": 1, "reason": "RuntimeError: a stream was waited for"}
    assert read_events(tmp_path / "graph", "not_captured") == [event]
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1
    assert "could not be captured (RuntimeError: a stream was waited for). Steps run eagerly" in warnings[0]


def test_a_capture_that_was_asked_for_and_fails_ends_the_run(
    tmp_path: Path, tiny: Make, as_on_a_gpu, read_events
) -> None:
    as_on_a_gpu(PlainRecorder(1, GraphCaptureError("RuntimeError: a stream was waited for")))
    told = r"cuda_graph is set and the step could not be captured \(RuntimeError: a stream .*\): --no-cuda-graph"
    with pytest.raises(GraphCaptureError, match=told):
        train(steady(tiny, log_json=str(tmp_path / "log"), cuda_graph=True))
    events = read_events(tmp_path / "log")
    assert [event["event"] for event in events] == ["start", "end"]
    assert events[-1]["status"] == "failed"


@pytest.mark.parametrize("wanted", [None, True])
def test_memory_that_runs_out_in_a_capture_is_told_as_ever(
    tmp_path: Path, tiny: Make, as_on_a_gpu, read_events, wanted: bool | None
) -> None:
    as_on_a_gpu(PlainRecorder(1, OUT_OF_MEMORY))
    with pytest.raises(TrainingOutOfMemoryError, match=r"(?s)2.00 GiB more were asked for.*--batch-size 1"):
        train(steady(tiny, log_json=str(tmp_path / "log"), cuda_graph=wanted))
    events = read_events(tmp_path / "log")
    assert [event["event"] for event in events] == ["start", "end"]
    assert events[-1]["status"] == "out_of_memory"
