"""The self-test passes what is right and finds what is wrong."""

from __future__ import annotations

import json

import pytest
import torch

import tileflash
from tileflash.attention.dispatch import BACKENDS
from tileflash.doctor import self_test
from tileflash.doctor.self_test import run_self_test, survey


def test_every_backend_is_told_of_and_what_serves_here_gets_a_regular_and_an_odd_case() -> None:
    found = {backend["name"]: backend for backend in survey()}
    assert list(found) == list(BACKENDS)
    for name, backend in found.items():
        assert backend["loads"]
        assert bool(backend["reasons"]) is not backend["serves"]
        if backend["serves"]:
            assert len(self_test._served(name, backend["device"])[0]) == 2
    assert {name for name in found if found[name]["serves"]} >= {"sdpa-cpu", "tiled", "sdpa-math", "reference"}


@pytest.mark.parametrize("name", ["tiled", "sdpa-cpu"])
def test_what_is_right_passes(name: str) -> None:
    facts = run_self_test(name)
    assert facts["ok"]
    assert len(facts["cases"]) == 2
    for case in facts["cases"]:
        assert [result["name"] for result in case["results"]] == ["out", "d_q", "d_k", "d_v"]
        for result in case["results"]:
            assert 0 < result["tolerance"] < 0.1
            assert result["error"] <= result["tolerance"]
    json.dumps(facts, allow_nan=False)


@pytest.mark.parametrize(("what", "wrong"), [("one element", ["out"]), ("a gradient", ["d_v"]), ("NaN", ["out"])])
def test_what_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch, what: str, wrong: list[str]) -> None:
    right = tileflash.attention

    def damaged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: object) -> torch.Tensor:
        if what == "a gradient":
            v = v + (v - v.detach()) * 1e-3  # the value stays, its gradient is 0.1 % larger
        out = right(q, k, v, **arguments)
        offset = torch.zeros_like(out)
        offset[0, -1, -1, -1] = {"one element": 1e-4, "a gradient": 0.0, "NaN": float("nan")}[what]
        return out + offset

    monkeypatch.setattr(tileflash, "attention", damaged)
    facts = run_self_test("tiled")
    assert not facts["ok"]
    for case in facts["cases"]:
        assert [result["name"] for result in case["results"] if not result["ok"]] == wrong
    if what == "NaN":
        assert facts["cases"][0]["results"][0]["error"] is None
    json.dumps(facts, allow_nan=False)


@pytest.mark.gpu
def test_every_backend_of_the_gpu_passes_in_5_seconds_after_compiling() -> None:
    on_gpu = [backend["name"] for backend in survey() if backend["device"] == "cuda"]
    assert {"triton", "tiled", "reference", "sdpa-math"} <= set(on_gpu)
    for name in on_gpu:
        facts = run_self_test(name)
        assert facts["ok"], (name, facts["cases"])
        assert facts["run_s"] < 5, name
