"""`tileflash explain` as a user types it."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

import tileflash
from tileflash.cli import app


def _run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["explain", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_it_prints_what_the_function_says() -> None:
    q = torch.zeros(2, 40, 4, 24).requires_grad_()
    k, v = torch.zeros(2, 50, 2, 24), torch.zeros(2, 50, 2, 16)
    sizes = ["--batch", 2, "--length", 40, "--key-length", 50, "--heads", 4, "--kv-heads", 2, "--head-dim", 24]
    sizes += ["--head-dim-v", 16, "--dtype", "float32", "--device", "cpu"]
    for flags, arguments in [
        ([], {}),
        (["--causal"], {"causal": True}),
        (["--top-left", "--scale", "0.5"], {"causal": "top-left", "scale": 0.5}),
        (["--window", "7,none", "--backend", "tiled"], {"window": (7, None), "backend": "tiled"}),
        (["--lse", "--backend", "reference"], {"return_lse": True, "backend": "reference"}),
    ]:
        status, out, _ = _run(*sizes, *flags)
        assert (status, out) == (0, f"{tileflash.explain(q, k, v, **arguments)}\n")
    assert _run(*sizes, "--no-gradients")[1] == f"{tileflash.explain(q.detach(), k, v)}\n"


def test_sizes_beyond_any_memory_take_none() -> None:
    status, out, _ = _run("--length", 2**24, "--batch", 2**10, "--device", "cpu")
    assert status == 0
    assert "what tiled launches" in out or "what sdpa-cpu launches" in out or "what triton launches" in out


def test_nobody_serves_is_status_1() -> None:
    status, out, _ = _run("--device", "meta", "--length", 64)
    assert status == 1
    assert "'auto' -> none can serve" in out


def test_help_has_examples() -> None:
    assert "tileflash explain --length 1 --key-length 65536" in CliRunner().invoke(app, ["explain", "--help"]).output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", 32, "--kv-heads", 5], "q's heads must be a multiple of k's heads, got 32 and 5"),
        (["--dtype", "int8"], "`--dtype` was 'int8'; it must be one of float16"),
        (["--device", "gpu"], "`--device` was 'gpu'"),
        (["--device", "cuda"], "`--device` was cuda, but PyTorch sees no GPU here; tileflash doctor says why"),
        (["--window", "7"], "`--window` was '7'; it must be LEFT,RIGHT"),
        (["--window", "a,b"], "`--window` was 'a,b'"),
        (["--backend", "fa9"], "backend must be one of auto"),
    ],
)
def test_bad_input_is_one_line(monkeypatch: pytest.MonkeyPatch, arguments: list[object], message: str) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    status, out, error = _run("--length", 8, *arguments)
    assert (status, out, error.count("\n")) == (2, "", 1)
    assert error.startswith(f"error: {message}")
