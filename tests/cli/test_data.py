"""`tileflash data`: the commands a user types, and one line for each thing that can be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tileflash.cli import app

RUNNER = CliRunner()


def _run(*arguments: object) -> tuple[int, str, str]:
    result = RUNNER.invoke(app, ["data", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_prepare_and_show(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The meaning of life is\n" * 20)
    status, out, _ = _run("prepare", tmp_path / "a.txt", "--output", tmp_path / "out")
    assert status == 0
    assert f"{tmp_path / 'out' / 'train.bin'}: 115 tokens" in out  # 1 + 19 lines of 6
    status, out, _ = _run("show", tmp_path / "out" / "train.bin", "--first", 6)
    assert status == 0
    assert "magic 20240520, version 1" in out
    assert "first 6 ids: 50256 464 3616 286 1204 318" in out
    assert "text (gpt2): '<|endoftext|>The meaning of life is'" in out
    assert "0: tokens 0 to 115 (115)" in out


def test_demo(tmp_path: Path) -> None:
    for _ in range(2):  # the second is a no-op with the same answer
        status, out, _ = _run("demo", "--output", tmp_path / "demo", "--tokenizer", "bytes")
        assert status == 0
        assert "train.bin: " in out
        assert "val.bin: " in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepare", "{t}/none.txt", "--output", "{t}/out"], "none.txt: No such file or directory"),
        (["prepare", "{t}/empty.txt", "--output", "{t}/out"], "empty.txt: empty; it must hold some text"),
        (["prepare", "{t}/latin.txt", "--output", "{t}/out"], "latin.txt: not UTF-8 at byte 3"),
        (["prepare", "{t}/good.txt", "--output", "{t}/out", "--tokenizer", "gpt4"], "`tokenizer` was 'gpt4'"),
        (["prepare", "{t}/good.txt", "--output", "{t}/out", "--tokenizer", "llama3"], "--tokenizer-path"),
        (["prepare", "{t}/good.txt", "--output", "{t}/out", "--validation-fraction", "1"], "`validation_fraction` was"),
        (["show", "{t}/good.txt"], "good.txt: truncated: 4 bytes"),
        (["show", "{t}/none.bin"], "none.bin: not a file"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes("café\n".encode("latin-1"))
    (tmp_path / "good.txt").write_text("good")
    status, out, error = _run(*(argument.format(t=tmp_path) for argument in arguments))
    assert (status, out) == (2, "")
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error


def test_help_has_an_example() -> None:
    for command in ("prepare", "demo", "show"):
        status, out, _ = _run(command, "--help")
        assert status == 0
        assert f"tileflash data {command}" in out
