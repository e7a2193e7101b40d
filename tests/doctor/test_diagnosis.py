"""Findings become problems, lines and an exit status; here on a machine with a GPU that is only told of."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from rich.console import Console

from tileflash.doctor import diagnosis
from tileflash.doctor.console import print_diagnosis
from tileflash.doctor.diagnosis import Diagnosis, diagnose
from tileflash.doctor.steps import Outcome

GPU = {
    "index": 0,
    "name": "NVIDIA H200",
    "capability": "9.0",
    "memory_bytes": 141 * 2**30,
    "free_memory_bytes": 100 * 2**30,
}
GOOD: dict[str, Outcome] = {
    "driver": Outcome("ok", {"version": "580.95.05", "cuda": "13.0", "gpus": [GPU]}),
    "numpy": Outcome("ok", {"version": "2.3.5"}),
    "torch": Outcome("ok", {
        "version": "2.13.0+cu130", "cuda": "13.0", "hip": None, "cxx11_abi": True, "architectures": ["sm_90"], "gpu_error": "",
        "gpus": [GPU],
    }),
    "triton": Outcome("ok", {"version": "3.7.1"}),
}  # fmt: skip


def backend(name: str, **changes: Any) -> dict[str, Any]:
    facts = {
        "name": name,
        "summary": name,
        "loads": True,
        "load_error": "",
        "serves": True,
        "device": "cuda",
        "reasons": [],
    }
    return {**facts, **changes}


def outcome_of(error: float | None = 1e-3, tolerance: float = 2e-3) -> Outcome:
    ok = error is not None and error <= tolerance
    results = [
        {"name": "out", "error": 1e-4, "tolerance": 1e-3, "ok": True},
        {"name": "d_q", "error": error, "tolerance": tolerance, "ok": ok},
    ]
    facts = {"device": "cuda", "dtype": "bfloat16", "ok": ok, "cases": [{"case": "q [1, 2]", "results": results}]}
    return Outcome("ok", {**facts, "compile_s": 3.21, "run_s": 0.02})


@pytest.fixture
def examine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Diagnosis]:
    """`examine(step=outcome, ...)`: the diagnosis of a good machine but for these outcomes."""

    def make(self_test: bool = True, **changes: Outcome) -> Diagnosis:
        outcomes = {**GOOD, "backends": Outcome("ok", {"backends": [backend("triton"), backend("tiled")]})}
        outcomes |= {name.replace("self_test_", "self-test:"): outcome for name, outcome in changes.items()}

        def run_steps(steps: Iterable[str], timeout_s: float, **_: Any) -> dict[str, Outcome]:
            assert timeout_s == 7
            return {step: outcomes.get(step, outcome_of()) for step in steps}

        monkeypatch.setattr(diagnosis, "run_steps", run_steps)
        monkeypatch.setattr(diagnosis, "is_installed", lambda peer: False)
        monkeypatch.setattr("tileflash.doctor.rules._compiler", lambda machine: [])
        monkeypatch.setattr("tileflash.doctor.machine._requirements", lambda name: ())
        monkeypatch.setattr("tileflash.doctor.diagnosis.cache_problems", lambda cache: [])
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        monkeypatch.setenv("TRITON_CACHE_DIR", "/tmp/kernels of mine")
        return diagnose(self_test=self_test, timeout_s=7)

    return make


def printed(found: Diagnosis) -> list[str]:
    text = io.StringIO()
    print_diagnosis(Console(file=text, highlight=False, soft_wrap=True), found)
    return text.getvalue().splitlines()


def test_all_is_well(examine: Callable[..., Diagnosis]) -> None:
    found = examine()
    assert (found.problems, found.exit_status(), found.exit_status(strict=True)) == ([], 0, 0)
    lines = printed(found)
    assert "  ok      torch 2.13.0+cu130 (CUDA 13.0)" in lines
    assert "  ok      driver 580.95.05 (CUDA up to 13.0)" in lines
    assert "  ok      0: NVIDIA H200, capability 9.0, 141.0 GiB, 100.0 GiB free" in lines
    assert (
        "  ok      triton          cuda bfloat16, forward and backward: largest error 1.0e-03 of 2.0e-03 allowed (d_q); "
        "compile 3.2 s, run 0.0 s"
    ) in lines
    assert lines[-1] == "all is well"
    json.dumps(found.to_json(), allow_nan=False)


def test_without_a_self_test_nothing_is_run(examine: Callable[..., Diagnosis]) -> None:
    found = examine(self_test=False, self_test_triton=Outcome("crashed", error="not to be run"))
    assert found.problems == []
    assert [facts["self_test"] for facts in found.backends] == [None, None]
    assert "  ok      tiled           serves on cuda (not tested)" in printed(found)


@pytest.mark.parametrize(
    ("outcome", "status", "identifier", "what", "fix"),
    [
        (outcome_of(error=0.5), "wrong", "self-test.wrong", "d_q is off by 5.0e-01, 2.0e-03 is allowed", None),
        (outcome_of(error=None), "wrong", "self-test.wrong", "d_q is not a number, 2.0e-03 is allowed", None),
        (Outcome("crashed", error="the process died of SIGSEGV"), "crashed", "self-test.crashed", "triton takes the process down", None),
        (Outcome("timeout", error="no answer within 7 s"), "timeout", "self-test.timeout", "triton does not come to an end", None),
        (Outcome("failed", error="KeyError: 'x'"), "failed", "self-test.failed", "triton fails on a small problem", None),
        (Outcome("failed", error="RuntimeError: Failed to find C compiler."), "failed", "self-test.failed", "no C compiler",
         "sudo apt-get install -y gcc"),
    ],
)  # fmt: skip
def test_a_backend_that_fails(
    examine: Callable[..., Diagnosis], outcome: Outcome, status: str, identifier: str, what: str, fix: str | None
) -> None:
    found = examine(self_test_triton=outcome)
    [problem] = found.problems
    assert (problem.id, problem.subject, problem.severity) == (identifier, "triton", "error")
    assert what in problem.what
    assert problem.fix == (fix or "rm -rf '/tmp/kernels of mine' && tileflash doctor")
    assert found.backends[0]["self_test"]["status"] == status
    assert found.exit_status() == 1
    lines = printed(found)
    assert any(line.startswith("  FAILED  triton ") for line in lines)
    assert lines[-2:] == [f"  fix: {problem.fix}", "1 error"]
    json.dumps(found.to_json(), allow_nan=False)


def test_other_backends_have_remedies_of_their_own(examine: Callable[..., Diagnosis]) -> None:
    listed = Outcome("ok", {"backends": [backend("sdpa-cudnn"), backend("tiled")]})
    found = examine(
        backends=listed, **{"self_test_sdpa-cudnn": outcome_of(error=1.0), "self_test_tiled": outcome_of(error=1.0)}
    )
    assert ["install --upgrade torch (until then" in found.problems[0].fix, "rm -rf" in found.problems[1].fix] == [
        True,
        False,
    ]
    assert printed(found)[-1] == "2 errors"


def test_kernels_that_do_not_load_on_a_triton_that_does(examine: Callable[..., Diagnosis]) -> None:
    error = "ImportError: cannot import name 'knobs' from 'triton' (/x/triton/__init__.py)"
    broken = backend("triton", loads=False, load_error=error, serves=False, device=None, reasons=[error])
    found = examine(backends=Outcome("ok", {"backends": [broken, backend("tiled")]}))
    [problem] = found.problems
    assert (problem.id, problem.said) == ("kernels.not-loaded", error)
    assert "does not fit the version of triton" in problem.what


def test_a_driver_whose_gpu_pytorch_does_not_use(examine: Callable[..., Diagnosis]) -> None:
    cpu = {**GOOD["torch"].facts, "version": "2.13.0+cpu", "cuda": None, "gpus": []}
    found = examine(torch=Outcome("ok", cpu))
    assert [problem.id for problem in found.problems] == ["torch.no-cuda"]
    lines = printed(found)
    assert "  FAILED  0: NVIDIA H200, capability 9.0, 141.0 GiB, 100.0 GiB free: PyTorch does not use it" in lines
    assert "  FAILED  torch 2.13.0+cpu (no CUDA)" in lines


def test_backends_that_cannot_be_listed_are_a_problem(examine: Callable[..., Diagnosis]) -> None:
    found = examine(backends=Outcome("failed", error="AttributeError: module 'torch' has no attribute 'library'"))
    assert [problem.id for problem in found.problems] == ["backends.not-loaded"]
    assert found.backends == []


def test_warnings_alone_are_status_0_unless_strict(examine: Callable[..., Diagnosis]) -> None:
    found = examine(triton=Outcome("ok", {"version": "3.6.0"}))
    assert [(problem.id, problem.severity) for problem in found.problems] == [("triton.mismatch", "warning")]
    assert (found.exit_status(), found.exit_status(strict=True)) == (0, 1)
    assert printed(found)[-1] == "all is well with tileflash; 1 warning"
