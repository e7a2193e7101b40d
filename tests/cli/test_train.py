"""`tileflash train` as a user types it: flags, files, exit statuses, messages without tracebacks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tileflash.cli import app
from tileflash.cli.train import _PRESETS
from tileflash.data import write_token_file
from tileflash.models import GPT2, PRESETS
from tileflash.train import GraphCaptureError

TINY = ["--model-override", "n_layer=1", "--model-override", "n_embd=32", "--model-override", "n_head=2"]


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "train.bin"
    write_token_file(path, np.arange(2000) % 200, vocab_size=257)
    return path


def run(*arguments: object):
    torch.set_num_threads(1)
    return CliRunner().invoke(app, ["train", *map(str, arguments)], env={"COLUMNS": "200", "TERM": "dumb"})


def common(tokens: Path, *more: object) -> list[object]:
    return ["gpt2-tiny", *TINY, "--input-bin", tokens, "--device", "cpu", "--sequence-length", 16, *more]


def config_of(log: Path) -> dict:
    return json.loads(log.read_text().splitlines()[0])["config"]


def test_help_has_examples_every_flag_of_the_design_and_all_presets() -> None:
    text = run("--help").output
    assert "tileflash train gpt2 --flash --batch-size 16" in text
    assert "Exit status: 0 finished, 130 interrupted" in text
    for flag in [
        "input-bin",
        "input-val-bin",
        "tokenizer",
        "batch-size",
        "sequence-length",
        "total-batch-size",
        "num-iteration",
        "learning-rate",
        "warmup-iterations",
        "final-learning-rate-fraction",
        "weight-decay",
        "gradient-clip",
        "dtype",
        "flash",
        "attention-backend",
        "fused-operators",
        "device",
        "seed",
        "val-loss-every",
        "val-max-batches",
        "sample-every",
        "text-length",
        "output",
        "save-every",
        "keep",
        "resume",
        "load",
        "skip-loss-z",
        "skip-gradient-z",
        "log-json",
        "no-tensorboard",
        "deterministic",
        "init-from",
    ]:
        assert f"--{flag}" in text, flag
    assert tuple(_PRESETS.split(", ")) == tuple(PRESETS)


def test_help_loads_neither_models_nor_the_trainer() -> None:
    code = "import sys; import tileflash.cli.train; print([m for m in ('tileflash.models', 'tileflash.train.run') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_run(tmp_path: Path, tokens: Path) -> None:
    done = run(
        *common(tokens, "--num-iteration", 3, "--log-json", tmp_path / "log", "--flash", "--attention-backend", "sdpa")
    )
    assert done.exit_code == 0, done.output
    assert [line[:8] for line in done.output.splitlines() if line.startswith("step")] == [
        "step 1/3",
        "step 2/3",
        "step 3/3",
    ]
    assert "attention: tileflash.attention: sdpa" in done.output
    settings = config_of(tmp_path / "log")
    assert (settings["flash"], settings["num_iteration"], settings["total_batch_size"]) == (True, 3, 64)
    assert settings["model_overrides"] == {"n_layer": 1, "n_embd": 32, "n_head": 2}


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path, tokens: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        f'model = "gpt2-tiny"\ninput-bin = "{tokens}"\nbatch-size = 3\nsequence-length = 8\nnum-iteration = 2\nflash = true\n'
        'device = "cpu"\n[model-overrides]\nn_layer = 1\nn_embd = 32\nn_head = 2\n'
    )
    done = run(path, "--num-iteration", 1, "--no-flash", "--log-json", tmp_path / "log")
    assert done.exit_code == 0, done.output
    settings = config_of(tmp_path / "log")
    assert [settings[key] for key in ("batch_size", "num_iteration", "flash", "seed")] == [3, 1, False, 42]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["gpt3"], "gpt2-tiny, gpt2, "),
        (["gpt2-tiny", "--total-batch-size", "300"], "must be a multiple of batch_size * sequence_length"),
        (["gpt2-tiny", "--dtype", "float16"], "must be one of auto, float32, bfloat16"),
        (["gpt2-tiny", "--input-bin", "nowhere.bin"], "nowhere.bin"),
        (["nowhere.toml"], "nowhere.toml: No such file"),
        (["gpt2-tiny", "--model-override", "n_layer"], "FIELD=VALUE"),
        (["gpt2-tiny", "--resume"], "output must name the directory"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments: list[str], told: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert told in done.output
    assert "Traceback" not in done.output
    assert len(done.output.strip().splitlines()) == 1


def test_an_unknown_key_in_the_file_is_status_2(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('model = "gpt2"\nlearning_rat = 1\n')
    done = run(tmp_path / "run.toml")
    assert (done.exit_code, 'did you mean "learning_rate"?' in done.output) == (2, True)


def test_out_of_memory_is_status_3(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: GPT2, tokens: torch.Tensor) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.50 GiB.")

    monkeypatch.setattr(GPT2, "forward", forward)
    done = run(*common(tokens))
    assert done.exit_code == 3
    assert "error: out of memory on cpu: 3.50 GiB more were asked for. What would need less:\n  --flash" in done.output


def test_a_stopped_run_is_status_1(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = GPT2.forward
    monkeypatch.setattr(GPT2, "forward", lambda self, x: forward(self, x) * float("nan"))
    done = run(*common(tokens, "--max-skips-in-a-row", 2))
    assert done.exit_code == 1
    assert "error: stopped at step 2: 2 steps in a row were skipped" in done.output


def test_a_capture_that_fails_is_one_line_and_status_1(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise GraphCaptureError("RuntimeError: a stream was waited for")

    monkeypatch.setattr("tileflash.train.setup.cuda_graph_in_force", lambda wanted, device: wanted)  # as on a GPU
    monkeypatch.setattr("tileflash.train.trainer.CapturedStep", refuse)
    done = run(*common(tokens, "--cuda-graph"))
    assert done.exit_code == 1
    told = "error: cuda_graph is set and the step could not be captured (RuntimeError: a stream was waited for): "
    assert f"{told}--no-cuda-graph trains without" in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_is_status_130_and_the_run_can_go_on(
    tmp_path: Path, tokens: Path, number: signal.Signals
) -> None:
    arguments = common(tokens, "--num-iteration", 100000, "--output", tmp_path / "o", "--no-tensorboard")
    command = [sys.executable, "-m", "tileflash", "train", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 3/"):
            process.send_signal(number)
            break
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert f"{number.name}: finishing this step and saving" in out
    last = out.strip().splitlines()[-1]
    assert last.startswith("interrupted at step ")
    step = int(last.split()[3].partition("/")[0])
    assert step >= 3
    assert (tmp_path / "o" / f"checkpoint_step_{step:06d}" / "manifest.json").is_file()
    assert error == ""
    again = run(*common(tokens, "--num-iteration", step + 1, "--output", tmp_path / "o", "--resume"))
    assert again.exit_code == 0, again.output
    assert f"step {step + 1}/{step + 1} | " in again.output


def test_on_a_terminal_there_is_a_bar_and_the_same_lines_above_it(tokens: Path) -> None:
    import pty

    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "tileflash", "train", *map(str, common(tokens, "--num-iteration", 4))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(command, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    shown = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        shown += piece
    assert process.wait(timeout=60) == 0
    text = shown.decode()
    assert "━" in text
    for step in range(1, 5):
        assert f"step {step}/4 | train loss " in text
    assert "DP=1, TP=1, SP=1, PP=1)" in text  # the line is not cut at the terminal's width
