"""`tileflash report`: writes, checks, and says what is wrong in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tileflash.bench import Sitting, Statistic, append
from tileflash.cli import app

TEXT = "# 标题\r\n<!-- tileflash:table train -->\n<!-- tileflash:end -->\n"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    sitting = Sitting("r", "2026-12-01T09:30:00Z", "abc", "NVIDIA H200", {"torch": "2.11"})
    case = {"model": "gpt2", "batch": 4, "seq": 64, "dtype": "bfloat16"}
    lines = [
        sitting.line("train", case, v, "step_ms", Statistic(t, t, t, 3)) for v, t in (("baseline", 3.0), ("flash", 2.0))
    ]
    append(tmp_path / "results" / "train.jsonl", lines)
    return tmp_path / "results"


def _run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["report", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_write_then_check(tmp_path: Path, results: Path) -> None:
    english, chinese = tmp_path / "README.md", tmp_path / "README.zh-CN.md"
    for path in (english, chinese):
        path.write_bytes(TEXT.encode())
    arguments = ["--write", english, "--write", chinese, "--results", results]
    status, _, error = _run(*arguments, "--check")
    assert status == 1
    assert f"{english}: stale: train; run `tileflash report --write {english}`" in error
    assert english.read_bytes() == TEXT.encode()  # --check writes nothing
    status, out, _ = _run(*arguments)
    assert (status, out.count("filled train")) == (0, 2)
    assert "| speed-up |" in english.read_text(encoding="utf-8")
    assert "| 加速比 |" in chinese.read_text(encoding="utf-8")
    assert english.read_bytes().startswith("# 标题\r\n".encode())  # the rest is kept byte for byte
    assert _run(*arguments, "--check")[0] == 0
    assert _run(*arguments)[1].count("up to date") == 2
    english.write_text(english.read_text(encoding="utf-8").replace("1.50x", "9.50x"), encoding="utf-8")  # typed by hand
    assert _run(*arguments, "--check")[0] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "README.zh-CN.md", "results"]


def test_print(results: Path) -> None:
    status, out, _ = _run("--results", results)
    assert status == 0
    assert "## train" in out
    assert "1.50x (1.50 – 1.50)" in out
    assert "批大小" in _run("--results", results, "--language", "zh")[1]


def test_audit(tmp_path: Path, results: Path) -> None:
    assert _run("--results", results, "--audit") == (0, "nothing is wrong\n", "")
    case = {"model": "gpt2", "batch": 4, "seq": 64, "dtype": "bfloat16"}
    sitting = Sitting("r", "2026-12-01T09:30:00Z", "abc", "NVIDIA H200", {"torch": "2.11"})
    append(results / "train.jsonl", [sitting.line("train", case, "flash", "tokens_per_s", Statistic(1e6, 1e6, 1e6, 3))])
    status, _, error = _run("--results", results, "--audit")
    assert status == 1
    assert error.startswith("contradiction: train, flash, gpt2 batch=4 seq=64 bfloat16, tokens_per_s: 1,000,000, but ")


def test_bad_input_is_one_line(tmp_path: Path, results: Path) -> None:
    (tmp_path / "bare.md").write_text("no block")
    (tmp_path / "bad.jsonl").write_text("{}\n")
    for arguments, message in [
        (["--write", tmp_path / "none.md", "--results", results], "none.md: No such file"),
        (["--write", tmp_path / "bare.md", "--results", results], "bare.md: holds no block"),
        (["--results", tmp_path / "none"], "none: No such file"),
        (["--results", tmp_path / "bad.jsonl"], "bad.jsonl, line 1: missing field"),
        (["--results", results, "--language", "fr"], "`language` was 'fr'"),
    ]:
        status, _, error = _run(*arguments)
        assert (status, error.count("\n")) == (2, 1)
        assert message in error
