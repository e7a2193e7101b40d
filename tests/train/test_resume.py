"""A run that is killed, however often and wherever, and resumed, is bit for bit the run that never was."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch

from tileflash.models import GPT2
from tileflash.train import TrainConfig, train
from tileflash.train import trainer as trainer_module
from tileflash.train.checkpoint import checkpoints, load_checkpoint

Make = Callable[..., TrainConfig]
KILLS = 20


def _child(config: TrainConfig, kill_at: int | None) -> None:
    """Train; if told so, die by SIGKILL at the `kill_at`-th thing done to a file of the output: its creation, a rename,
    a deletion. That is mostly inside the save, else at the log or at the start."""
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if kill_at is not None:
        events, left = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"), [kill_at]

        def count(event: str, arguments: tuple) -> None:
            if event in events and str(config.output) in str(arguments[0]):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
    assert train(config).status == "finished"


def _last_tensors(output: Path) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint import FileSystemReader

    step, path = checkpoints(output)[-1]
    stored = FileSystemReader(path / "tensors").read_metadata().state_dict_metadata
    into = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored.items()}
    load_checkpoint(path, into)
    return into | {"step": torch.tensor(step)}


def test_twenty_kills_change_no_bit(tmp_path: Path, tiny: Make, token_file: Path, numbers, read_events) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # shown when it fails
    choose = random.Random(seed)
    config = tiny(
        num_iteration=60,
        total_batch_size=64,
        shuffle=True,
        warmup_iterations=10,
        skip_loss_z=2.0,  # the guard's window must come back too
        skip_window=8,
        save_every=2,
        keep=2,
        val_loss_every=7,
        input_val_bin=str(token_file),
        output=str(tmp_path / "whole"),
    )
    train(config)
    broken = tmp_path / "broken"
    # Children are forked from a server that has PyTorch loaded, so that each takes a fraction of a second.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tileflash.train.run", "torch.distributed.checkpoint", "pynvml"])
    deaths, progress = 0, []
    for kill in range(KILLS):
        in_a_save = kill % 2 == 0
        resumed = replace(config, output=str(broken), resume=True)
        child = context.Process(target=_child, args=(resumed, choose.randint(1, 60) if in_a_save else None))
        child.start()
        if not in_a_save:
            time.sleep(choose.uniform(0.0, 0.6))
            child.kill()
        child.join(60)
        deaths += child.exitcode == -signal.SIGKILL
        progress.append(checkpoints(broken)[-1][0] if checkpoints(broken) else 0)
    print(f"{deaths} deaths of {KILLS}; last checkpoints {progress}")
    assert train(replace(config, output=str(broken), resume=True)).status == "finished"
    assert deaths >= KILLS // 2  # the others had come to their end before
    assert numbers(broken / "log.jsonl") == numbers(tmp_path / "whole" / "log.jsonl")
    assert [event["step"] for event in read_events(broken / "log.jsonl", "step")] == list(range(1, 61))
    assert read_events(broken / "log.jsonl", "validation") == read_events(
        tmp_path / "whole" / "log.jsonl", "validation"
    )
    expected, found = _last_tensors(tmp_path / "whole"), _last_tensors(broken)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert not list(broken.glob(".tmp-*"))


@pytest.mark.parametrize("model", ["gpt2-tiny", "llama3-tiny"])
def test_every_part_of_the_state_comes_back(tmp_path: Path, tiny: Make, numbers, read_events, model: str) -> None:
    """With a skipped step behind it, a full guard window, shuffled epochs (3000 tokens are 23 steps) and bfloat16."""
    small = {"n_layer": 1, "n_head": 2, "n_embd": 32}
    config = tiny(
        model=model,
        model_overrides=small | ({"n_kv_head": 1, "intermediate_size": 48} if model == "llama3-tiny" else {}),
        num_iteration=60,
        batch_size=8,
        shuffle=True,
        dtype="bfloat16",
        skip_gradient_z=1.5,
        skip_window=6,
        warmup_iterations=5,
        save_every=13,
        keep=99,
        output=str(tmp_path / "whole"),
    )
    train(config)
    whole = numbers(tmp_path / "whole" / "log.jsonl")
    assert 0 < read_events(tmp_path / "whole" / "log.jsonl", "step")[-1]["skipped"] < 40
    for step in (13, 39):
        part = tmp_path / f"from_{step}"
        path = tmp_path / "whole" / f"checkpoint_step_{step:06d}"
        train(replace(config, load=str(path), output=str(part)))
        assert numbers(part / "log.jsonl") == whole[step:]


def test_the_log_goes_on_with_no_step_twice_or_missing(tmp_path: Path, tiny: Make, read_events, numbers) -> None:
    config = tiny(num_iteration=10, output=str(tmp_path / "o"))
    train(replace(config, output=str(tmp_path / "whole")))
    train(replace(config, num_iteration=4, final_learning_rate_fraction=1.0))
    log = tmp_path / "o" / "log.jsonl"
    # What a killed run may leave: steps after the checkpoint, and a line cut off.
    with log.open("a") as file:
        file.write(json.dumps({"event": "step", "step": 5, "train_loss": 1.0}) + '\n{"event": "st')
    train(replace(config, resume=True))
    events = read_events(log)
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, 11))
    assert [event["event"] for event in events if event["event"] != "step"] == ["start", "resume", "end"]
    assert events[-1]["event"] == "end"
    assert [event["step"] for event in events if event["event"] == "resume"] == [4]


def test_the_learning_rate_of_a_resumed_run_is_that_of_its_steps(
    tmp_path: Path, tiny: Make, monkeypatch, numbers
) -> None:
    config = tiny(num_iteration=10, warmup_iterations=3, output=str(tmp_path / "whole"), save_every=5, keep=9)
    train(config)
    rates = [rate for _, _, rate, _ in numbers(tmp_path / "whole" / "log.jsonl")]
    used: list[float] = []
    real = trainer_module.train_step

    def watch(model, optimizer, *arguments, **more):
        used.extend({group["lr"] for group in optimizer.param_groups})
        return real(model, optimizer, *arguments, **more)

    monkeypatch.setattr(trainer_module, "train_step", watch)
    train(replace(config, load=str(tmp_path / "whole" / "checkpoint_step_000005"), output=str(tmp_path / "o")))
    assert used == rates[5:]
    assert [rate for _, _, rate, _ in numbers(tmp_path / "o" / "log.jsonl")] == rates[5:]


def _watch_tokens(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    seen: list[list[int]] = []
    forward = GPT2.forward
    monkeypatch.setattr(GPT2, "forward", lambda self, x: seen.extend(x.tolist()) or forward(self, x))
    return seen


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": 3},
        {"batch_size": 4, "total_batch_size": 128},
        {"batch_size": 1, "total_batch_size": 48},
        {"sequence_length": 8},
    ],
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_with_other_batches_no_sample_is_left_out_or_seen_twice(
    tmp_path: Path, tiny: Make, monkeypatch, changes: dict, shuffle: bool
) -> None:
    if shuffle and "sequence_length" in changes:
        pytest.skip("samples of another length are other samples: there is no order to keep")
    config = tiny(num_iteration=5, shuffle=shuffle, output=str(tmp_path))  # 10 samples
    seen = _watch_tokens(monkeypatch)
    train(replace(config, num_iteration=90, output=None))  # 180 samples in their order
    order = list(chain.from_iterable(seen))
    seen.clear()
    train(config)
    train(replace(config, num_iteration=25, resume=True, **changes))
    tokens = list(chain.from_iterable(seen))
    assert len(tokens) > 300
    assert tokens == order[: len(tokens)]


def test_another_model_is_refused_by_name_and_nothing_is_touched(tmp_path: Path, tiny: Make) -> None:
    config = tiny(output=str(tmp_path))
    train(config)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != ".lock"}
    other = {**config.model_overrides, "n_embd": 64, "vocab_size": 300}
    with pytest.raises(ValueError, match=r"another model .*vocab_size: 257 -> 300; n_embd: 32 -> 64"):
        train(replace(config, resume=True, model_overrides=other))
    with pytest.raises(ValueError, match="family: gpt2 -> llama3"):
        train(replace(config, resume=True, model="llama3-tiny", model_overrides={}))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != ".lock"} == before


def test_a_damaged_last_checkpoint_costs_its_steps_alone(tmp_path: Path, tiny: Make, capsys, numbers) -> None:
    config = tiny(num_iteration=9, save_every=3, output=str(tmp_path / "o"))
    train(config)
    whole = numbers(tmp_path / "o" / "log.jsonl")
    (tmp_path / "o" / "checkpoint_step_000009" / "state.json").unlink()
    (tmp_path / "o" / ".tmp-checkpoint_step_000012").mkdir()
    capsys.readouterr()
    train(replace(config, resume=True))
    told = capsys.readouterr().out
    assert "checkpoint_step_000009 is not a complete checkpoint and is not used: state.json is missing" in told
    assert "going on from" in told
    assert numbers(tmp_path / "o" / "log.jsonl") == whole
    assert [path.name for path in sorted((tmp_path / "o").glob("*checkpoint*"))] == [
        "checkpoint_step_000003",
        "checkpoint_step_000006",
        "checkpoint_step_000009",
    ]


def test_checkpoints_are_never_mixed_with_those_of_another_run(tmp_path: Path, tiny: Make) -> None:
    config = tiny(output=str(tmp_path))
    train(config)
    with pytest.raises(ValueError, match=r"it has checkpoints \(the last of step 6\); add --resume"):
        train(config)
    with pytest.raises(ValueError, match="add --resume"):
        train(replace(config, load=str(tmp_path)))


def test_a_finished_run_says_so_and_changed_settings_are_told(tmp_path: Path, tiny: Make, capsys) -> None:
    config = tiny(output=str(tmp_path))
    train(config)
    result = train(replace(config, resume=True))
    assert (result.status, result.step) == ("finished", 6)
    assert "nothing left to do" in result.message
    capsys.readouterr()
    train(replace(config, resume=True, num_iteration=8, learning_rate=0.5))
    assert "num_iteration: 6 -> 8; learning_rate: 0.01 -> 0.5" in capsys.readouterr().out


def test_resume_with_no_checkpoint_starts_at_the_beginning(tmp_path: Path, tiny: Make, capsys) -> None:
    assert train(tiny(output=str(tmp_path), resume=True)).step == 6
    assert "has no checkpoint yet: starting at step 0" in capsys.readouterr().out
