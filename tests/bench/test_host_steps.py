"""Where the host's time goes: parts that are timed, steps that add up to the whole, their lines and their table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tileflash.bench import Sitting, read
from tileflash.bench.host import HostSuite
from tileflash.bench.host_steps import PARTS, STEPS, host_steps_lines, measure_host_steps, steps_of
from tileflash.bench.statistic import summarize
from tileflash.bench.tables import render
from tileflash.cli import app

pytest.importorskip("triton")


@pytest.fixture
def small(device: str) -> HostSuite:
    return HostSuite(("math",), seq=16, heads=1, head_dim=16, dtype="float32", device=device, calls=1, rounds=2)


def test_every_part_is_timed_and_the_outer_ones_take_longer(small: HostSuite) -> None:
    parts = measure_host_steps(small)
    assert tuple(parts) == PARTS
    low = {name: statistic.low for name, statistic in parts.items()}
    assert all(time_us > 0 for time_us in low.values())
    for inner, outer in (("outputs", "call"), ("backward outputs", "both")):
        assert low[inner] < low[outer]


def test_steps_add_up_to_the_whole() -> None:
    """Each part counts once, whatever the parts are."""
    medians = {name: float(2**place) for place, name in enumerate(PARTS)}
    *steps, whole = steps_of(medians).values()
    assert sum(steps) == whole == medians["both"]
    assert {part for parts in STEPS.values() for _, part in parts} == set(PARTS)


def test_lines_and_table() -> None:
    parts = {name: summarize([10.0 + place]) for place, name in enumerate(PARTS)}
    sitting = Sitting.begin({"gpu": None, "cpu": "test", "commit": "abc"})
    lines = list(host_steps_lines(HostSuite(), parts, sitting))
    text = render("host-steps", lines, "en")
    assert "| forward: launch | 11.0 |" in text
    assert "| all | 18.0 |" in text
    assert "tileflash bench host --steps --calls 200" in text


def test_the_command(tmp_path: Path, device: str) -> None:
    ledger = tmp_path / "host.jsonl"
    small = [
        "--device",
        device,
        "--variants",
        "math",
        "--dtype",
        "float32",
        "--seq",
        "16",
        "--heads",
        "1",
        "--head-dim",
        "16",
    ]
    few = ["--calls", "1", "--rounds", "2", "--largest-spread", "1e6"]
    result = CliRunner().invoke(app, ["bench", "host", "--steps", *small, *few, "--output", str(ledger)])
    assert result.exit_code == 0, result.output
    assert "forward: launch" in result.stdout
    assert len(read(ledger, suite="host-steps")) == len(PARTS)


def test_a_problem_that_the_backend_does_not_serve_is_refused(small: HostSuite) -> None:
    with pytest.raises(ValueError, match="triton"):
        measure_host_steps(replace(small, head_dim=600))
