"""Checkpoints are written while training goes on; one at a time, and the last is waited for."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tileflash.models import GPT2
from tileflash.train import TrainConfig, train
from tileflash.train import saving as saving_module
from tileflash.train.checkpoint import checkpoints, load_checkpoint
from tileflash.train.saving import Saver

Make = Callable[..., TrainConfig]
LONG_S = 60


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No checkpoint is written before it is opened."""
    gate, save = threading.Event(), saving_module.save_checkpoint

    def gated(*arguments, **more):
        assert gate.wait(LONG_S)
        return save(*arguments, **more)

    monkeypatch.setattr(saving_module, "save_checkpoint", gated)
    return gate


def at_step(monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[], None]) -> None:
    """Do `action` in the forward pass of that step."""
    forward, count = GPT2.forward, [0]

    def forward_and_act(self: GPT2, tokens: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        if count[0] == number:
            action()
        return forward(self, tokens)

    monkeypatch.setattr(GPT2, "forward", forward_and_act)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_written_is_as_it_was_when_the_save_began(tmp_path: Path, gate: threading.Event) -> None:
    tensors = {"weight": torch.ones(5, 3), "part": torch.arange(12.0).view(4, 3)[1:3]}
    state = {"window": [1.0, 2.0]}
    saver = Saver(tmp_path, 3, run="test")
    assert saver.result(wait_s=LONG_S) is None  # nothing has begun
    saver.start(7, tensors, state)
    assert saver.result(wait_s=0) is None
    for tensor in tensors.values():
        tensor.zero_()
    state["window"].append(3.0)
    gate.set()
    save = saver.result(wait_s=LONG_S)
    assert save is not None
    assert (save.step, save.path, save.error) == (7, tmp_path / "checkpoint_step_000007", None)
    assert saver.result(wait_s=LONG_S) is None  # told once
    into = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    assert load_checkpoint(save.path, into)["window"] == [1.0, 2.0]
    assert torch.equal(into["weight"], torch.ones(5, 3))
    assert torch.equal(into["part"], torch.arange(3.0, 9.0).view(2, 3))


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, tiny: Make, monkeypatch: pytest.MonkeyPatch, gate: threading.Event, capsys, numbers
) -> None:
    config = tiny(num_iteration=6, save_every=2, output=str(tmp_path / "o"))
    at_step(monkeypatch, 4, gate.set)  # a save that kept step 4 from coming would wait for it
    assert train(config).status == "finished"
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("step ", "saved "))]
    order = [line.split("/")[0] if line.startswith("step") else "saved " + line[-1] for line in lines]
    assert order.index("saved 2") > order.index("step 3")
    assert order.index("saved 2") < order.index("step 5")  # the next save has waited for it
    assert order[-1] == "saved 6"  # the last save is waited for
    assert [step for step, _ in checkpoints(tmp_path / "o")] == [2, 4, 6]
    # What was written is what was there at step 2, not what became of it meanwhile.
    monkeypatch.undo()
    whole = numbers(tmp_path / "o" / "log.jsonl")
    again = replace(
        config,
        output=None,
        save_every=0,
        load=str(tmp_path / "o" / "checkpoint_step_000002"),
        log_json=str(tmp_path / "l"),
    )
    train(again)
    assert numbers(tmp_path / "l") == whole[2:]


def test_a_run_that_fails_sees_its_save_to_the_end(
    tmp_path: Path, tiny: Make, monkeypatch: pytest.MonkeyPatch, gate: threading.Event, capsys
) -> None:
    def fail() -> None:
        threading.Timer(0.2, gate.set).start()
        raise RuntimeError("out of luck")

    at_step(monkeypatch, 3, fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        train(tiny(save_every=2, output=str(tmp_path)))
    assert [step for step, _ in checkpoints(tmp_path)] == [2]
    assert "saved " in capsys.readouterr().out


def test_the_second_signal_does_not_wait_for_a_save(
    tmp_path: Path, tiny: Make, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    def interrupt_twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()  # while the run waits for the save

    at_step(monkeypatch, 3, interrupt_twice)
    with pytest.raises(KeyboardInterrupt, match="at once"):
        train(tiny(num_iteration=9, save_every=2, output=str(tmp_path)))
    assert not gate.is_set()
    assert checkpoints(tmp_path) == []
    gate.set()
