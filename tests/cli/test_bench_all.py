"""`tileflash bench all`: every suite with the arguments that it takes, within the budget, and an exit status that says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from tileflash.cli import app, bench_all


def _invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", "all", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stderr


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], float]]:
    calls: list[tuple[list[str], float]] = []

    def run(arguments: list[str], limit_s: float) -> int:
        calls.append((arguments, limit_s))
        return 1 if arguments[0] == "host" else 0

    monkeypatch.setattr(bench_all, "_run", run)
    return calls


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_suite_with_arguments_that_it_takes(
    made: list[tuple[list[str], float]], tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tileflash.bench.timing.clock_for", lambda device: None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    status, error = _invoke(
        "--device", device, "--output", tmp_path, "--fa3-library", "fa3.so", "--budget-seconds", 100
    )
    assert (status, "host: exit status 1" in error) == (1, True)
    suites = typer.main.get_command(app).commands["bench"].commands  # type: ignore[attr-defined]
    assert {arguments[0] for arguments, _ in made} == suites.keys() - {"all"}
    for arguments, limit_s in made:
        suites[arguments[0]].make_context(arguments[0], arguments[1:])
        assert f"{arguments[0]}.jsonl" in " ".join(arguments)
        assert limit_s <= 100 + bench_all._GRACE_S
    assert any("--fa3-library" in arguments for arguments, _ in made)


def test_some_suites_and_no_time(
    made: list[tuple[list[str], float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _invoke("--device", "cpu", "--output", tmp_path, "--only", "memory,scaling")[0] == 0
    assert [arguments[0] for arguments, _ in made] == ["memory", "scaling"]
    assert "`--only` held 'speed'" in _invoke("--device", "cpu", "--only", "speed")[1]
    assert "`--budget-seconds` was 0.0" in _invoke("--device", "cpu", "--budget-seconds", 0)[1]
    made.clear()
    times = iter([0.0, *[99.0] * 20])
    monkeypatch.setattr("tileflash.cli.bench_all.time.monotonic", lambda: next(times))
    status, error = _invoke("--device", "cpu", "--output", tmp_path, "--budget-seconds", 10)
    assert (status, made) == (0, [])
    assert "attention: no time left, left out" in error


def test_several_ranks_need_several_gpus(
    made: list[tuple[list[str], float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tileflash.bench.timing.clock_for", lambda device: None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    status, error = _invoke("--device", "cuda", "--output", tmp_path, "--only", "parallel,memory")
    assert (status, [arguments[0] for arguments, _ in made]) == (0, ["memory"])
    assert "parallel: needs two GPUs, left out" in error


def test_a_true_suite_in_its_process(tmp_path: Path) -> None:
    """The one that measures nothing, so that no noise can end it with 1."""
    assert _invoke("--device", "cpu", "--output", tmp_path, "--only", "model-memory")[0] == 0
    assert (tmp_path / "model-memory.jsonl").is_file()
    assert bench_all._run(["nothing"], 60.0) == 2
    assert bench_all._run(["host"], 0.01) == 124
