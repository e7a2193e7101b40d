"""`tileflash bench attention` as a user types it, on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.clocks import SteadyClock
from tileflash.bench import read
from tileflash.cli import app

SMALL = [
    *("--device", "cpu", "--dtype", "float32", "--tokens", "64", "--width", "32", "--lengths", "32,64"),
    *("--head-dims", "32", "--rounds", "2", "--target-ms", "1", "--pause-ms", "0"),
]


def _run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["bench", "attention", *SMALL, *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_tables_means_ledger_and_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tileflash.bench.timing.clock_for", lambda device: SteadyClock())
    ledger = tmp_path / "results" / "attention.jsonl"
    status, out, error = _run("--variants", "tileflash-sdpa,math,cudnn", "--baseline", "math", "--output", ledger)
    assert status == 0
    for heading in ("forward, TFLOP/s", "backward, TFLOP/s"):
        assert heading in out
    assert out.count("unsupported") == 8 + 1  # each cell, and one line with the reason
    assert "cudnn: unsupported: " in out
    assert "and 7 more]" in out
    assert "forward: tileflash-sdpa is " in out
    assert "x as fast as math (geometric mean of 4 points of 4 cases)" in out
    assert "8/8 backward d=32 causal S=64" in error
    lines = read(ledger)
    assert len({line.run for line in lines}) == 1
    assert len(lines) == 8 * (3 + 1)
    assert _run("--variants", "math", "--direction", "forward", "--masks", "full", "--output", ledger)[0] == 0
    assert len(read(ledger)) == 8 * 4 + 2  # appended


@pytest.mark.parametrize("content", [b"notes\n", b"\xff\xfe\x00\x01"])
def test_a_file_that_is_no_ledger_is_left_alone_and_nothing_is_measured(tmp_path: Path, content: bytes) -> None:
    notes = tmp_path / "notes.md"
    notes.write_bytes(content)
    status, out, error = _run("--variants", "math", "--output", notes)
    assert (status, out, error.count("\n")) == (2, "", 1)
    assert "notes.md is no ledger that lines could be appended to: " in error
    assert notes.read_bytes() == content


def test_budget_says_what_was_left_out() -> None:
    status, _, error = _run("--variants", "math", "--budget-seconds", "1e-9")
    assert status == 0
    assert "time is up: 8 of 8 cases left out, from forward d=32 full S=32 on" in error


def test_a_wrong_result_is_exit_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tileflash.bench.attention_check._TOLERANCE", dict.fromkeys(_tolerances(), 1e-12))
    status, out, _ = _run("--variants", "math")
    assert status == 1
    assert "math: wrong_result: out is wrong: error" in out


def _tolerances() -> list[object]:
    from tileflash.bench.attention_check import _TOLERANCE

    return list(_TOLERANCE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variants", "fa9"], "`variants` named 'fa9'"),
        (["--lengths", "1k"], "`--lengths` was '1k'; it must be whole numbers"),
        (["--masks", "window"], "`masks` was 'window'"),
        (["--rounds", "0"], "`rounds` was 0"),
        (["--head-dims", "48"], "`head_dims` was (48,)"),
        (["--device", "meta"], "`device` was meta"),
        (["--device", "cuda"], "`device` was cuda, but PyTorch sees no GPU here; use --device cpu"),
    ],
)
def test_bad_input_is_one_line(monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    status, out, error = _run(*arguments)
    assert (status, out, error.count("\n")) == (2, "", 1)
    assert error.startswith("error: ")
    assert message in error
