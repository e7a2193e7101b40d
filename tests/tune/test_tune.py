"""Tuning: candidates that fit, children that die, the same process for all that is compared, and the kernels' own launches."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tileflash.bench import Sitting
from tileflash.cli import app
from tileflash.kernels.triton.configurations import HOPPER, HOPPER_WITH_OPTIONS, Tile
from tileflash.tune import calls, session
from tileflash.tune.candidates import Target, candidates, shipped, targets_of, words
from tileflash.tune.session import Outcome, Settings, ledger_lines, tune

FORWARD = Target("triton", "forward", 64, True)
SMALL = Settings(lengths=(16,), tokens=32, width=64, dtype="float32", device="cpu", jobs=2, rounds=1, target_ms=1.0)
ROWS = [
    *(Target("hopper", kernel, d, banded) for kernel in ("forward", "backward") for d in (64, 128, 256) for banded in (False, True)),
    *(Target("triton", kernel, d, banded) for kernel, d in HOPPER for banded in (False, True)),
    *(Target("triton", kernel, d, True, "softcap") for kernel, d in HOPPER_WITH_OPTIONS),
]  # fmt: skip


@pytest.mark.parametrize("target", ROWS, ids=str)
def test_the_shipped_configuration_comes_first_and_each_once(target: Target) -> None:
    pytest.importorskip("triton")
    found = candidates(target)
    assert found[0] == shipped(target)
    assert len(set(found)) == len(found) > 1
    assert len({words(one) for one in found}) == len(found)
    if target.options:
        assert all((t.block_m if target.kernel in ("dk", "dv", "dkdv") else t.block_n) >= 32 for t in found)


@pytest.mark.parametrize(("values", "complaint"), [
    (("sdpa", "forward", 64, True), "no kernel 'forward' of backend 'sdpa'"),
    (("hopper", "dq", 64, True), "hopper: forward, backward"),
    (("hopper", "forward", 80, True), "padded to 64, 128 or 256"),
    (("hopper", "forward", 64, True, "softcap"), "no options 'softcap' with hopper"),
    (("triton", "dkdv", 256, True), "has no row for head dimension 256"),
])  # fmt: skip
def test_what_is_no_row_is_named(values: tuple[Any, ...], complaint: str) -> None:
    with pytest.raises(ValueError, match="no ") as raised:
        Target(*values)
    assert complaint in str(raised.value)


def test_rows_that_are_not_there_are_left_out() -> None:
    found = targets_of("triton", ["forward", "dkdv", "dk"], [128, 256], ["causal"], "")
    assert [(t.kernel, t.head_dim) for t in found] == [("forward", 128), ("forward", 256), ("dkdv", 128), ("dk", 256)]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_deeds(deeds: dict[int, str]) -> None:
        monkeypatch.setenv("FAKE_TUNE", json.dumps(deeds))

    monkeypatch.setattr(session, "CHILD", (sys.executable, str(Path(__file__).with_name("fake_child.py"))))
    set_deeds({})
    return set_deeds


def outcome_of(found: list[Outcome], index: int) -> Outcome:
    return next(one for one in found if one.configuration == candidates(FORWARD)[index])


def test_the_best_comes_first_and_the_failed_say_why(fake: Any) -> None:
    fake({3: "abort", 5: "wrong", 9: "abort in timing"})
    ((target, found),) = tune([FORWARD], SMALL)
    assert target == FORWARD
    assert found[0].mean_ratio == max(one.mean_ratio for one in found) == pytest.approx(7.0)
    failures = {index: outcome_of(found, index).failure for index in (3, 5, 9)}
    assert "ended with status" in failures[3]
    assert failures[5] == "differs"
    assert "ended with status" in failures[9]
    assert sum(bool(one.failure) for one in found) == 3
    assert all(one.time_ms for one in found if not one.failure)
    assert outcome_of(found, 0).shipped


def test_what_fails_at_one_length_is_no_best_at_another(fake: Any) -> None:
    fake({6: "wrong at 32"})  # by far the fastest at 16
    settings = replace(SMALL, lengths=(16, 32))
    ((target, found),) = tune([FORWARD], settings)
    out = outcome_of(found, 6)
    assert (out.failure, list(out.time_ms), out.mean_ratio) == ("differs", [16], 0.0)
    assert found[0] is not out
    lines = ledger_lines(target, found, settings, Sitting.begin({"gpu": None, "cpu": "test", "commit": "abc"}))
    assert words(out.configuration) not in {line.variant for line in lines}


def test_lengths_must_divide_the_tokens() -> None:
    with pytest.raises(ValueError, match="divide `tokens` = 32"):
        replace(SMALL, lengths=(16, 64))


def test_the_width_must_be_whole_heads() -> None:
    with pytest.raises(ValueError, match="`width` was 100; it must be a multiple of 64"):
        next(iter(tune([FORWARD], replace(SMALL, width=100))))


def test_ctrl_c_ends_it_all(tmp_path: Path) -> None:
    """As a terminal sends it: to all processes at once. It was taken for the death of one child, and the next began."""
    program = f"""
import sys
from tileflash.tune import session
from tileflash.tune.candidates import Target
session.CHILD = (sys.executable, {str(Path(__file__).with_name("fake_child.py"))!r})
list(session.tune([Target("triton", "forward", 64, True)], session.Settings(lengths=(16,), tokens=32, device="cpu", jobs=1)))
"""
    deeds = json.dumps(dict.fromkeys(range(1, 100), "hang"))
    environment = {**os.environ, "FAKE_TUNE": deeds, "PYTHONPATH": "src", "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=environment, start_new_session=True, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not any("verified" in path.read_text() for path in tmp_path.rglob("events.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    try:
        assert process.wait(timeout=30) != 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_a_child_that_hangs_is_ended(fake: Any) -> None:
    fake({2: "hang"})
    ((_, found),) = tune([FORWARD], replace(SMALL, timeout_s=3.0, jobs=8))
    assert outcome_of(found, 2).failure.startswith("not done after")
    assert sum(bool(one.failure) for one in found) == 1


def test_a_shipped_configuration_that_fails_times_nothing(fake: Any) -> None:
    fake({0: "abort"})
    ((_, found),) = tune([FORWARD], SMALL)
    assert all(one.failure and not one.time_ms for one in found)


def test_ledger_lines(fake: Any) -> None:
    settings = replace(SMALL, lengths=(16, 32))
    ((target, found),) = tune([FORWARD], settings)
    lines = list(ledger_lines(target, found, settings, Sitting.begin({"gpu": None, "cpu": "test", "commit": "abc"})))
    assert len(lines) == 2 * (2 * len(found) - 1)
    assert {line.metric for line in lines} == {"time_ms", "speed_ratio_to_shipped"}
    assert lines[0].case["mask"] == "causal"


def test_each_call_keeps_its_own_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    module = calls.kernels_module("triton")
    monkeypatch.setattr(module, "_forward_launches", {})
    monkeypatch.setitem(HOPPER, ("forward", 64), HOPPER["forward", 64])
    seen = []

    def call() -> tuple[torch.Tensor, ...]:
        if not module._forward_launches:
            module._forward_launches["key"] = HOPPER["forward", 64][True]
        seen.append(module._forward_launches["key"])
        return ()

    tiles = [Tile(64, 64, 4, 1), Tile(128, 64, 8, 2)]
    one, other = (calls.bind(FORWARD, tile, call) for tile in tiles)
    for run in (one, other, one, other):
        run()
    assert seen == tiles * 2


@pytest.mark.parametrize("change", [float("nan"), 0.5])
def test_a_wrong_result_is_out(change: float) -> None:
    right = (torch.ones(4, 4), torch.full((2,), 3.0))
    assert calls.disagreement(right, right) == ""
    assert calls.disagreement((right[0] + 0.001, right[1]), right) == ""
    assert calls.disagreement((right[0], right[1] + change), right) != ""


def test_the_kernels_themselves_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The true child on the CPU, where all tiles are the interpreter's: it verifies and times."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["src", os.environ.get("PYTHONPATH", "")]))
    for target in (FORWARD, Target("triton", "dq", 64, False, "softcap")):
        found = [Outcome(one, i == 0) for i, one in enumerate(candidates(target))]
        session._run(target, [0, 1], found, SMALL, SMALL.lengths, timed=True)
        assert [one.failure for one in found[:2]] == ["", ""]
        assert all(16 in one.time_ms and one.speed_ratio[16].median > 0 for one in found[:2])


@pytest.mark.parametrize("arguments", [
    ["--device", "cpu"], ["--backend", "sdpa"], ["--head-dims", "80"], ["--dtype", "float32"], ["--options", "softcap"],
    ["--backend", "triton", "--kernels", "forwards"], ["--masks", "bogus"], ["--lengths", "500"],
])  # fmt: skip
def test_bad_usage_is_one_line_and_status_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["tune", *arguments])
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    if arguments[0] != "--device":
        assert "GPU" not in result.stderr  # it is told what is wrong, on any machine


@pytest.mark.usefixtures("fake")
def test_the_command_prints_and_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tileflash.train.setup.find_gpu_device", lambda name: "cuda")
    monkeypatch.setattr(
        "tileflash.environment.environment", lambda device: {"gpu": None, "cpu": "test", "commit": "abc"}
    )
    ledger = tmp_path / "tuning.jsonl"
    command = [
        "tune",
        "--backend",
        "triton",
        "--kernels",
        "forward",
        "--head-dims",
        "64",
        "--masks",
        "causal",
        "--output",
        str(ledger),
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "(shipped)" in result.stdout
    assert "triton forward, head dimension 64, causal" in result.stdout
    assert ledger.read_text().count("speed_ratio_to_shipped") > 10


@pytest.mark.gpu
def test_on_a_gpu_candidates_are_verified_and_timed() -> None:
    settings = Settings(lengths=(512,), tokens=4096, width=512, jobs=8, rounds=2, target_ms=5.0)
    found = [Outcome(one, i == 0) for i, one in enumerate(candidates(FORWARD))]
    session._run(FORWARD, [0, 1, 2], found, settings, settings.lengths, timed=True)
    assert found[0].failure == ""
    assert found[0].speed_ratio[512].median == pytest.approx(1.0)
