"""The host suite: what is counted, who waits when, what cannot serve, and its lines in the ledger."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tileflash.bench import Sitting, host, read
from tileflash.bench.flags import UNSUPPORTED
from tileflash.bench.host import MODES, HostSuite, host_lines, measure_host
from tileflash.cli import app

SMALL = HostSuite(
    variants=("tileflash-auto", "math", "fa3"),
    seq=16,
    heads=2,
    head_dim=8,
    dtype="float32",
    device="cpu",
    calls=2,
    rounds=3,
)


def test_every_variant_in_every_mode_and_a_reason_for_what_is_not_here() -> None:
    cells = measure_host(SMALL)
    assert [(cell.variant, cell.mode) for cell in cells] == [(v, m) for v in SMALL.variants for m in MODES]
    for cell in cells:
        if cell.variant == "fa3":
            assert (cell.time_us, cell.flag) == (None, UNSUPPORTED)
            assert "is not here" in cell.reason
        else:
            assert cell.time_us is not None
            assert cell.time_us.repeats == 3
            assert cell.time_us.median > 0


def test_a_measurement_is_the_time_of_all_calls_over_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that each call of a variant moves by its price: modes and variants are told apart, and nothing else is counted."""
    clock, waits = [0.0], []
    prices = {"tileflash-auto": 2e-6, "math": 7e-6}

    def variant(name: str, *_: object) -> Any:
        @contextmanager
        def hold() -> Any:  # entered and left at a price that no call has
            clock[0] += 0.5
            yield
            clock[0] += 0.5

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
            clock[0] += prices[name] + (1e-6 if torch.is_grad_enabled() else 0.0)
            return q + k + v

        return hold, run

    monkeypatch.setattr(host, "held_variant", variant)
    monkeypatch.setattr(host, "attention_variant", lambda name: None)
    monkeypatch.setattr(host, "wait_for", lambda device: waits.append(clock.__setitem__(0, clock[0] + 1.0)))
    suite = replace(SMALL, variants=tuple(prices))
    cells = {(cell.variant, cell.mode): cell.time_us for cell in measure_host(suite, lambda: clock[0])}
    assert len(waits) == 3 * 2 * 3 + 1
    for name, price in prices.items():
        for mode, more in zip(MODES, (0.0, 1e-6, 1e-6), strict=True):
            figure = cells[name, mode]
            assert figure is not None
            assert figure.median == pytest.approx((price + more) * 1e6, rel=1e-3)


@pytest.mark.parametrize(("changed", "complaint"), [
    ({"variants": ()}, "`variants` was"), ({"variants": ("math", "math")}, "each once"), ({"variants": ("fast",)}, "'fast'"),
    ({"seq": 0}, "`seq` was 0"), ({"calls": 0}, "`calls` was 0"), ({"mask": "window"}, "`mask` was 'window'"),
    ({"dtype": "float64"}, "`dtype` was 'float64'"),
])  # fmt: skip
def test_what_does_not_fit_is_named(changed: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match="must be") as raised:
        replace(SMALL, **changed)
    assert complaint in str(raised.value)


def test_ledger_lines() -> None:
    cells = measure_host(SMALL)
    lines = list(host_lines(SMALL, cells, Sitting.begin({"gpu": None, "cpu": "test", "commit": "abc"})))
    assert [line.variant for line in lines] == [cell.variant for cell in cells]
    assert {line.metric for line in lines} == {"host_us"}
    assert lines[0].case["mode"] == "forward"
    assert lines[-1].flags == (UNSUPPORTED,)
    assert lines[-1].median is None


def test_the_command(tmp_path: Path) -> None:
    ledger = tmp_path / "host.jsonl"
    arguments = [
        "--device",
        "cpu",
        "--variants",
        "tileflash-auto,math,fa3",
        "--dtype",
        "float32",
        "--seq",
        "16",
        "--calls",
        "2",
        "--largest-spread",
        "1e6",
    ]
    result = CliRunner().invoke(app, ["bench", "host", *arguments, "--rounds", "2", "--output", str(ledger)])
    assert result.exit_code == 0, result.output
    assert "tileflash-auto" in result.stdout
    assert "fa3: FlashAttention 3 is not here" in result.stdout
    assert len(read(ledger, suite="host")) == 9
    bad = CliRunner().invoke(app, ["bench", "host", "--device", "cpu", "--variants", "fast"])
    assert bad.exit_code == 2
    assert len(bad.stderr.splitlines()) == 1


def test_a_variant_that_has_no_backward_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        if q.requires_grad:
            raise NotImplementedError("no gradients here")
        return q

    monkeypatch.setattr(host, "held_variant", lambda name, *_: (nullcontext, only_forward))
    arguments = ["--device", "cpu", "--variants", "math", "--calls", "1", "--rounds", "1"]
    result = CliRunner().invoke(app, ["bench", "host", *arguments])
    assert result.stdout.count("math: no gradients here") == 1
