"""Kernels compiled ahead: which kinds are asked for, what is told, and on a GPU that a call after it compiles nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tileflash import warmup
from tileflash.cli import app
from tileflash.train.setup import find_gpu_device
from tileflash.warmup import Done, Kind, compile_kind, kinds_of_model, make_kinds, warm_up

KINDS = make_kinds([8, 16, 24], ["float16"], ["full"], [1], ["triton"])


def test_kinds_are_all_combinations_each_once() -> None:
    kinds = make_kinds([64, 128, 64], ["bfloat16"], ["full", "causal"], [1, 4], ["triton"])
    assert len(kinds) == 8
    assert kinds[0] == Kind("triton", 64, "bfloat16", "full", 1)
    assert str(kinds[3]) == "triton: head dimension 64, bfloat16, causal, 4 query heads a K/V head"


@pytest.mark.parametrize(("arguments", "complaint"), [
    (([], ["bfloat16"], ["full"], [1], ["triton"]), "`head-dims` was ''; it must be numbers of at least 1"),
    (([0], ["bfloat16"], ["full"], [1], ["triton"]), "`head-dims` was '0'"),
    (([64], ["bf16"], ["full"], [1], ["triton"]), "`dtypes` was 'bf16'; it must be some of bfloat16, float16, float32"),
    (([64], ["float16"], ["no"], [1], ["triton"]), "`masks` was 'no'"),
    (([64], ["float16"], ["full"], [1], ["sdpa"]), "`backends` was 'sdpa'; it must be some of hopper, triton"),
])  # fmt: skip
def test_what_is_no_kind_is_named(arguments: tuple[list[str], ...], complaint: str) -> None:
    with pytest.raises(ValueError, match="must be") as raised:
        make_kinds(*arguments)  # type: ignore[arg-type]
    assert complaint in str(raised.value)


def test_models_know_their_kind() -> None:
    assert kinds_of_model("gpt2", ["bfloat16"], ["triton"]) == [Kind("triton", 64, "bfloat16", "causal", 1)]
    assert kinds_of_model("llama3-8b", ["float16"], ["hopper"]) == [Kind("hopper", 128, "float16", "causal", 4)]
    with pytest.raises(ValueError, match="gpt3"):
        kinds_of_model("gpt3", ["bfloat16"], ["triton"])


@pytest.mark.parametrize("mask", warmup.MASKS)
def test_a_kind_is_run_forward_and_backward(mask: str, device: str) -> None:
    pytest.importorskip("triton")
    done = compile_kind(Kind("triton", 16, "float32", mask, 2), device)
    assert done.refused == ""
    assert done.seconds > 0


def test_what_a_backend_does_not_serve_is_its_reason() -> None:
    assert compile_kind(Kind("hopper", 64, "bfloat16", "causal", 1), "cpu").refused.startswith("runs on cuda")


@pytest.mark.parametrize("jobs", [1, 2])
def test_all_kinds_come_back(jobs: int) -> None:
    kinds = make_kinds([8, 16, 24], ["float16"], ["full"], [1], ["hopper"])
    assert {done.kind for done in warm_up(kinds, "cpu", jobs)} == set(kinds)


def _fails_at_16(kind: Kind, device: str) -> Done:
    if kind.head_dim == 16:
        raise RuntimeError("no such instruction")
    return Done(kind, 1.0)


def _dies_at_16(kind: Kind, device: str) -> Done:
    if kind.head_dim == 16:
        os.abort()
    return Done(kind, 1.0)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_kind_that_fails_does_not_end_the_others(jobs: int) -> None:
    found = {done.kind.head_dim: done.failure for done in warm_up(KINDS, "cpu", jobs, _fails_at_16)}
    assert found == {8: "", 16: "RuntimeError: no such instruction", 24: ""}


def test_a_kind_that_takes_its_process_down_is_told() -> None:
    found = {done.kind.head_dim: done.failure for done in warm_up(KINDS, "cpu", 2, _dies_at_16)}
    assert len(found) == 3
    assert found[16].startswith("BrokenProcessPool: ")


def test_auto_is_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert find_gpu_device("auto") == "cuda"


def test_where_there_is_no_gpu_none_is_advised() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="sees no GPU here, and this needs one"):
        find_gpu_device("cuda")


def test_a_failed_kind_is_exit_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tileflash.train.setup.find_gpu_device", lambda name: "cuda")
    monkeypatch.setattr(warmup, "warm_up", lambda kinds, device, jobs: (Done(k, 0.0, failure="[why]") for k in kinds))
    result = CliRunner().invoke(app, ["warmup", "gpt2", "--backends", "triton"])
    assert result.exit_code == 1
    assert result.stdout.splitlines()[0].endswith("causal: failed ([why])")


def test_the_command_prints_a_line_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tileflash.train.setup.find_gpu_device", lambda name: "cuda")
    monkeypatch.setattr(
        warmup,
        "warm_up",
        lambda kinds, device, jobs: (Done(k, 1.25, "no" if k.backend == "hopper" else "") for k in kinds),
    )
    result = CliRunner().invoke(app, ["warmup", "llama3-1b", "--head-dims", "128", "--masks", "full"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "hopper: head dimension 64, bfloat16, causal, 4 query heads a K/V head: not served (no)"
    assert lines[1] == "triton: head dimension 64, bfloat16, causal, 4 query heads a K/V head: 1.2 s"
    assert lines[2:4] == [
        "hopper: head dimension 128, bfloat16, full: not served (no)",
        "triton: head dimension 128, bfloat16, full: 1.2 s",
    ]
    assert "files" in lines[4]


@pytest.mark.parametrize("arguments", [["--device", "cpu"], ["--head-dims", "x"], ["nothing"]])
def test_bad_usage_is_one_line_and_status_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["warmup", *arguments])
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.gpu
def test_after_it_a_call_compiles_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tileflash", "warmup", "llama3-1b", "--jobs", "1"]
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=90)
    before = sum(1 for _ in tmp_path.rglob("*.cubin"))
    program = """
import torch, tileflash
for length in (200, 777):  # `auto` may take another backend for long sequences
    q = torch.randn(2, length, 32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(2, length, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    tileflash.attention(q, k, v, causal=True).sum().backward()
torch.cuda.synchronize()
"""
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=90)
    assert before > 0
    assert sum(1 for _ in tmp_path.rglob("*.cubin")) == before
