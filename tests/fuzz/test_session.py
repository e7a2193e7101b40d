"""A run: workers side by side, what becomes of crashes and hangs, and what the command prints and returns."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tileflash.attention import dispatch, ops
from tileflash.bench import read
from tileflash.cli import app
from tileflash.fuzz import session
from tileflash.fuzz.child import Child
from tileflash.fuzz.session import FuzzPlan, run_session

FAKE = Path(__file__).with_name("fake_worker.py")


def _run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["fuzz", "--device", "cpu", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def _fake(monkeypatch: pytest.MonkeyPatch, what: str, index: int) -> None:
    command = [sys.executable, str(FAKE), what, str(index)]
    monkeypatch.setattr(session, "Child", lambda order: Child(order, command))


@pytest.mark.parametrize("what", ["crash", "hang"])
def test_a_worker_that_dies_costs_its_problem_only(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """18 problems in bunches of one on the CPU; the one that is bad is named, and its variant is left out from then on."""
    _fake(monkeypatch, what, 4)
    monkeypatch.setattr(session, "_START_S", 3.0)
    plan = FuzzPlan(("tiled",), "cpu", problems=1000, workers=3, variants=3, timeout_s=1.0)
    outcome = run_session(plan)
    assert [(failure.kind, failure.index) for failure in outcome.failures] == [(what, 4)]
    words = outcome.failures[0].words[0]
    assert ("SIGABRT" in words and "illegal memory access" in words) if what == "crash" else "no answer" in words
    assert 12 <= outcome.count < 18  # the other workers' 12, the bad one, and what its worker did before and after it


def test_which_of_a_bunch_it_was_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake(monkeypatch, "crash", 26)
    true = FuzzPlan.task
    monkeypatch.setattr(FuzzPlan, "task", lambda plan, number: _in_bunches(true(plan, number)))
    outcome = run_session(FuzzPlan(("tiled",), "cpu", problems=1000, workers=2, variants=4))
    assert [(failure.kind, failure.index) for failure in outcome.failures] == [("crash", 26)]
    assert "problems 18 to 30" in outcome.complaints[0].replace("problems 2 to 14", "")
    assert outcome.count > 4 * 6 * 2


def _in_bunches(task: Any) -> Any:
    from dataclasses import replace

    return replace(task, bunch=4)


def test_a_clean_run_says_so_and_is_in_the_ledger(tmp_path: Path) -> None:
    ledger = tmp_path / "fuzz.jsonl"
    status, out, _ = _run("--backend", "tiled", "--problems", 6, "--workers", 0, "--variants", 3, "--ledger", ledger)
    assert status == 0
    assert out.startswith("6 problems in ")
    assert "no mismatches" in out
    assert "options: bias " in out
    (line,) = read(ledger)
    assert (line.suite, line.metric, line.variant, line.median) == ("fuzz", "mismatches", "tileflash-tiled", 0.0)
    assert line.case == {"problems": 6, "seed": 0}


def test_a_file_that_is_no_ledger_is_left_alone_and_nothing_is_judged(tmp_path: Path) -> None:
    notes = tmp_path / "notes.md"
    notes.write_text("years of work\n")
    status, out, error = _run("--backend", "tiled", "--problems", 6, "--workers", 0, "--variants", 3, "--ledger", notes)
    assert (status, out, error.count("\n")) == (2, "", 1)
    assert "notes.md is no ledger that lines could be appended to: " in error
    assert notes.read_text() == "years of work\n"


def test_processes_do_the_same_problems(tmp_path: Path) -> None:
    status, out, error = _run("--backend", "tiled", "--problems", 6, "--workers", 2, "--variants", 4)
    assert (status, error) == (0, "")
    alone = _run("--backend", "tiled", "--problems", 6, "--workers", 0, "--variants", 4)[1]
    assert out.splitlines()[1:] == alone.splitlines()[1:], "coverage"


def test_what_is_wrong_is_shrunk_printed_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "tiled" in dispatch.BACKENDS
    true = ops.kernels_of("tiled")

    def forward(*arguments: Any) -> Any:
        out, lse = true.forward(*arguments)
        return out, lse + 0.1

    monkeypatch.setitem(ops._loaded, "tiled", ops.Kernels(forward, true.backward))
    status, out, _ = _run(
        "--backend", "tiled", "--problems", 3, "--workers", 0, "--variants", 3, "--shrink-seconds", 3, "--seed", 1
    )
    assert status == 1
    assert "tiled: lse: error" in out
    assert "mismatch" in out
    replay = re.search(r"--replay '(.*)'", out)
    assert replay is not None
    assert json.loads(replay[1])["options"] == []
    status, words, _ = _run("--backend", "tiled", "--replay", replay[1])
    assert status == 1
    assert "lse: error" in words
    # the printed Python says the same
    code = out[out.index("import torch\n") : out.index("\ntileflash fuzz --backend")]
    printed: list[Any] = []
    exec(code, {"print": lambda *values, sep: printed.extend(values)})
    assert any(value.result == "lse" for value in printed)
    monkeypatch.undo()
    status, words, _ = _run("--backend", "tiled", "--replay", replay[1])
    assert (status, "nothing is wrong" in words) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--backend", "triiton"), "--backend must be one of"),
        (("--device", "tpu"), "--device must be"),
        (("--replay", "{"), "must be JSON"),
        (("--problems", 0), "problems"),
        (("--workers", -1), "workers"),
    ],
)
def test_bad_usage(arguments: tuple[object, ...], words: str) -> None:
    status, _, error = _run(*arguments)
    assert status == 2
    assert words in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    status, _, error = _run("--device", "cuda")
    assert status == 2
    assert "there is no GPU" in error
