"""`tileflash compare` as it is typed, with the real trainer on tiny models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tileflash", "compare", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_help_shows_examples_and_exit_status() -> None:
    ended = _run("--help")
    assert ended.returncode == 0
    for needed in ("tileflash compare gpt2 llama3-1b", "--continue", "--demo", "--ladder", "Exit status"):
        assert needed in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["gpt5"], "model is 'gpt5'; must be a TOML file or one of gpt2-tiny, gpt2"),
        (["absent.toml"], "model is 'absent.toml': there is no such file"),
        (["gpt2", "--lengths", "64,x"], "--lengths is '64,x'"),
        (["gpt2", "--repeats", "0"], "repeats is 0; must be at least 1"),
        (["gpt2", "--dtype", "int8"], "dtype is 'int8'"),
        ([], "models is empty"),
        (["gpt2", "--ladder", "--demo"], "--ladder and --demo do not go together"),
        (["gpt2", "--cuda-graph", "--device", "cpu"], "cuda_graph is set and the device is cpu: it must be a GPU"),
        (["gpt2", "--device", "tpu"], 'device is "tpu": it must be auto, cpu, cuda or cuda:N'),
        (["gpt2", "--attention-backend", "triiton"], "backend must be one of auto, "),
        (["gpt2", "--input-bin", "nowhere/*.bin"], "no file matches 'nowhere/*.bin'"),
        (["gpt2", "--ledger", __file__], "test_compare.py is no ledger that lines could be appended to"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments: list[str], told: str, tmp_path: Path) -> None:
    ended = _run(*arguments, "--output", str(tmp_path / "report"))
    assert ended.returncode == 2
    assert told in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not (tmp_path / "report").exists()


def test_the_demo_with_the_real_trainer(tmp_path: Path) -> None:
    """Both tiny models, few steps: losses fall, both schemes agree, and the report says what was measured."""
    arguments = ["--demo", "--lengths", "32", "--repeats", "1", "--num-iteration", "16", "--device", "cpu"]
    rates = ["--learning-rate", "1e-3", "--warmup-iterations", "2", "--language", "zh"]
    ledger = tmp_path / "train.jsonl"
    ended = _run(*arguments, *rates, "--output", str(tmp_path / "report"), "--ledger", str(ledger))
    assert ended.returncode == 0, ended.stdout + ended.stderr

    runs = list((tmp_path / "report" / "runs").glob("*.jsonl"))
    assert len(runs) == 4
    starts = [json.loads(run.read_text().splitlines()[0]) for run in runs]
    assert sorted(start["config"]["flash"] for start in starts) == [False, False, True, True]
    assert len({json.dumps(_without_scheme(start["config"])) for start in starts}) == 2, (
        "schemes differ in --flash alone"
    )

    assert {start["cuda_graph"] for start in starts} == {False}
    assert "CUDA graph: 否" in ended.stdout

    html = (tmp_path / "report" / "report.html").read_text()
    assert "两者损失一致" in html
    assert "未融合的小算子链" in html
    assert "unfused chain" not in html
    assert "--no-cuda-graph" in html
    assert "--language zh" in html
    assert "http" not in html
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    assert [line["case"]["cuda_graph"] for line in lines] == [False] * 2 * 2 * 3


def _without_scheme(config: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in config.items() if key not in ("flash", "log_json")}
