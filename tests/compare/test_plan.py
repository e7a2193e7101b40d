from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tileflash.compare.plan import (
    BASELINE,
    FLASH,
    CompareConfig,
    Run,
    Setting,
    compare_command,
    decided,
    plan,
    train_arguments,
)
from tileflash.data import write_token_file


def test_public_setting_comes_first_and_is_not_measured_twice() -> None:
    config = CompareConfig(models=("gpt2", "llama3-1b"), lengths=(256, 64), repeats=2)
    runs = plan(config)
    public = {Setting("gpt2", 4, 64, 10, "bfloat16"), Setting("llama3-1b", 4, 64, 10, "bfloat16")}
    assert {run.setting for run in runs[:8]} == public
    assert all(run.setting.sequence_length == 256 for run in runs[8:])
    assert len(runs) == len(set(runs)) == 2 * 2 * 2 * 2


def test_public_setting_is_its_own_when_the_lengths_are_measured_otherwise() -> None:
    runs = plan(CompareConfig(models=("gpt2",), lengths=(64,), dtype="float32", repeats=1))
    assert [run.setting.dtype for run in runs] == ["bfloat16", "bfloat16", "float32", "float32"]


def test_both_schemes_of_a_repeat_are_neighbours() -> None:
    runs = plan(CompareConfig(models=("gpt2", "llama3-1b"), repeats=3))
    for a, b in zip(runs[::2], runs[1::2], strict=True):
        assert (a.setting, a.repeat) == (b.setting, b.repeat)
        assert {a.scheme, b.scheme} == {BASELINE, FLASH}


@pytest.mark.parametrize("seed", range(5))
def test_neither_scheme_always_comes_first(seed: int) -> None:
    runs = plan(CompareConfig(models=("gpt2",), lengths=(64, 128, 256), repeats=4, seed=seed, public_setting=False))
    first = Counter((run.setting.sequence_length, run.scheme) for run in runs[::2])
    assert set(first.values()) == {2}, "over an even number of repeats each scheme comes first equally often"


def test_the_order_is_drawn_with_the_seed() -> None:
    def order(seed: int) -> list[Run]:
        return plan(CompareConfig(models=("gpt2",), lengths=tuple(range(64, 84)), repeats=1, seed=seed))

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_every_length_is_measured_before_any_is_repeated() -> None:
    runs = plan(CompareConfig(models=("gpt2",), lengths=(64, 256, 1024), repeats=2, public_setting=False))
    assert [run.setting.sequence_length for run in runs[:6:2]] == [64, 256, 1024]
    assert {run.repeat for run in runs[:6]} == {1}


def test_both_schemes_get_the_same_arguments_but_flash() -> None:
    config = CompareConfig(
        models=("gpt2",),
        learning_rate=3e-4,
        warmup_iterations=5,
        attention_backend="triton",
        input_bin="a*.bin",
        cuda_graph=True,
    )
    setting = Setting("gpt2", 4, 1024, 10, "bfloat16")
    baseline = train_arguments(config, Run(setting, BASELINE, 1))
    flash = train_arguments(config, Run(setting, FLASH, 1))
    assert flash == [*baseline, "--flash", "--attention-backend", "triton"]
    assert baseline[:9] == [
        *("gpt2", "--batch-size", "4", "--sequence-length", "1024"),
        *("--total-batch-size", "4096", "--num-iteration", "10"),
    ]
    assert baseline[baseline.index("--learning-rate") + 1] == "0.0003"
    assert baseline[baseline.index("--warmup-iterations") + 1] == "5"


@pytest.mark.parametrize(("captured", "flag"), [(True, "--cuda-graph"), (False, "--no-cuda-graph")])
def test_every_run_is_told_whether_its_step_is_captured(captured: bool, flag: str) -> None:
    """Never left to the trainer's default: a run made before that changed would have the same arguments."""
    config = CompareConfig(models=("gpt2",), cuda_graph=captured)
    for run in plan(config):
        assert [word for word in train_arguments(config, run) if "cuda-graph" in word] == [flag]
    assert [word for word in compare_command(config) if "cuda-graph" in word] == [flag]


def test_arguments_of_what_is_not_decided_are_not_made() -> None:
    config = CompareConfig(models=("gpt2",))
    with pytest.raises(AssertionError, match="not `decided`"):
        train_arguments(config, plan(config)[0])


@pytest.mark.parametrize(
    ("device", "gpus", "asked", "captured"),
    [
        ("auto", 0, None, False),
        ("auto", 1, None, True),
        ("auto", 1, False, False),
        ("auto", 1, True, True),
        ("cpu", 1, None, False),
        ("cuda", 1, None, True),
        ("cuda:1", 2, None, True),
    ],
)
def test_the_graph_is_decided_from_the_device(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, asked: bool | None, captured: bool
) -> None:
    _machine_with(monkeypatch, gpus)
    config = CompareConfig(models=("gpt2",), device=device, cuda_graph=asked)
    assert decided(config) == dataclasses.replace(config, cuda_graph=captured)


@pytest.mark.parametrize(
    ("device", "gpus", "asked", "told"),
    [
        ("auto", 0, True, "cuda_graph is set and the device is cpu"),
        ("cpu", 1, True, "cuda_graph is set and the device is cpu"),
        ("cuda", 0, None, "sees no GPU here"),
        ("cuda:1", 1, None, "there are 1 GPUs, numbered from 0"),
        ("tpu", 1, None, "must be auto, cpu, cuda or cuda:N"),
    ],
)
def test_a_device_that_cannot_is_told(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, asked: bool | None, told: str
) -> None:
    _machine_with(monkeypatch, gpus)
    with pytest.raises(ValueError, match=told):
        decided(CompareConfig(models=("gpt2",), device=device, cuda_graph=asked))


def test_a_backend_and_token_files_that_are_not_there_are_told(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "*.bin")
    for changes, told in (
        ({"attention_backend": "triiton"}, "backend must be one of auto, .* got 'triiton'"),
        ({"input_bin": nowhere}, "no file matches"),
    ):
        with pytest.raises(ValueError, match=told):
            decided(CompareConfig(models=("gpt2",), device="cpu", **changes))  # type: ignore[arg-type]
    write_token_file(tmp_path / "a.bin", np.arange(100), vocab_size=257)
    decided(CompareConfig(models=("gpt2",), device="cpu", attention_backend="sdpa", input_bin=nowhere))


def _machine_with(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)


def test_the_command_that_repeats_it_is_one_that_the_command_line_takes(
    small_config: Callable[..., CompareConfig],
) -> None:
    command = compare_command(small_config(demo=True, learning_rate=0.001, budget_seconds=60.0))
    assert command[:3] == ["tileflash", "compare", "gpt2"]
    # An impossible value at the end: the command must get so far as to complain of it and of nothing else.
    line = [sys.executable, "-m", "tileflash", *command[1:], "--language", "xx"]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert "language is 'xx'" in ended.stderr


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"models": ()}, "models is empty"),
        ({"models": ("gpt2", "gpt2")}, "models is"),
        ({"models": ("gpt2", "other/gpt2.toml")}, "models is"),
        ({"lengths": ()}, "lengths is"),
        ({"lengths": (64, 64)}, "lengths is"),
        ({"lengths": (0,)}, "lengths is"),
        ({"repeats": 0}, "repeats is 0"),
        ({"num_iteration": 1}, "num_iteration is 1; must be at least 2"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
        ({"language": "de"}, "language is 'de'"),
        ({"budget_seconds": 0.0}, "budget_seconds is 0.0"),
        ({"timeout_seconds": -1.0}, "timeout_seconds is -1.0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"warmup_iterations": -1}, "warmup_iterations is -1"),
    ],
)
def test_bad_settings_are_told(
    small_config: Callable[..., CompareConfig], changes: dict[str, object], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        small_config(**changes)
