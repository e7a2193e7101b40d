"""Suites at one batch: times, ratios and peaks of each length, their tables, their commands; FlashAttention 1 as a variant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tileflash
from support.clocks import SteadyClock
from support.lines import H200
from tileflash.bench import Sitting, Statistic, attention_tutorial, read
from tileflash.bench.attention_variants import attention_variant
from tileflash.bench.lengths import LengthsSuite, run_lengths
from tileflash.bench.memory import MemoryCell, MemorySuite, count_bytes
from tileflash.bench.tables import render
from tileflash.bench.timing import TimingPlan
from tileflash.bench.version_features import FEATURES, VERSIONS
from tileflash.cli import app

SMALL = LengthsSuite(
    "scaling", lengths=(16, 32), variants=("math", "tileflash-sdpa", "fa3"), batch=1, heads=2, head_dim=16, dtype="float32",
    device="cpu", timing=TimingPlan(rounds=1, target_ms=0.0, warmup_ms=0.0, pause_ms=0.0),
)  # fmt: skip
SITTING = Sitting.begin({"gpu": None, "cpu": "test", "commit": "abc"})


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that wait for one another take most of the time of operations this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_1_is_exact(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    monkeypatch.setattr(attention_tutorial, "_BLOCK", 16)
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_out = (torch.randn(2, 40, 3, 16, generator=generator, dtype=torch.float64) for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    outs = [attention_variant(name)(q, k, v, causal) for name in ("tutorial-fa1", "math")]
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*(torch.autograd.grad(out, leaves, d_out) for out in outs))


def test_flash_attention_1_in_bfloat16_is_not_judged_wrong() -> None:
    suite = replace(
        SMALL, variants=("tutorial-fa1",), lengths=(600,), dtype="bfloat16", directions=("forward", "backward"), heads=1
    )
    ((lines, reasons),) = run_lengths(suite, SITTING, SteadyClock())
    assert reasons == []
    assert {line.flags for line in lines} == {()}


def test_every_length_has_times_ratios_and_reasons() -> None:
    both = replace(SMALL, directions=("forward", "backward"))
    measured = list(run_lengths(both, SITTING, SteadyClock()))
    assert len(measured) == 2
    for (lines, reasons), seq in zip(measured, (16, 32), strict=True):
        assert {line.suite for line in lines} == {"scaling"}
        assert {(line.case["batch"], line.case["seq"]) for line in lines} == {(1, seq)}
        assert len(lines) == 2 * (3 + 1)  # three times, the ratio of the one that is not the first; no peaks on a CPU
        assert len(reasons) == 2
        assert "fa3: FlashAttention 3 is not here" in reasons[0]


def test_peaks_of_the_pass_that_the_direction_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def cells(suite: MemorySuite) -> Any:
        counted = count_bytes(suite, 16)
        for variant in suite.variants:
            flag = "out_of_memory" if variant == "fa3" else None
            for which, peak in (("forward", 10**6), ("forward and backward", 10**7)):
                yield MemoryCell(16, variant, which, counted, None if flag else peak, flag)  # type: ignore[arg-type]

    monkeypatch.setattr("tileflash.bench.lengths.measure_memory", cells)
    suite = replace(SMALL, lengths=(16,), directions=("forward", "backward"))
    ((lines, _),) = run_lengths(suite, SITTING, SteadyClock())
    peaks = {
        (line.case["direction"], line.variant): (line.median, line.flags)
        for line in lines
        if line.metric == "peak_bytes"
    }
    assert peaks["forward", "math"] == (1e6, ())
    assert peaks["backward", "tileflash-sdpa"] == (1e7, ())
    assert peaks["forward", "fa3"] == (None, ("out_of_memory",))


def test_the_budget_ends_it_in_time() -> None:
    times = iter(range(0, 1000, 10))
    suite = replace(SMALL, variants=("math",), budget_seconds=50.0)
    assert len(list(run_lengths(suite, SITTING, SteadyClock(), now=lambda: float(next(times))))) == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lengths": ()}, "`lengths` was"), ({"heads": 0}, "`heads` was 0"), ({"variants": ("fa9",)}, "`variants` named 'fa9'"),
        ({"mask": "window"}, "`masks` was 'window'"), ({"budget_seconds": -1.0}, "`budget_seconds` was -1.0"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **changed)


def _lines(suite: str) -> list[Any]:
    lines = []
    for seq in (1024, 2048):
        case = {
            "direction": "forward", "batch": 1, "heads": 32, "kv_heads": 32, "seq": seq, "head_dim": 64, "mask": "causal",
            "dtype": "bfloat16",
        }  # fmt: skip
        for variant, ms, peak in (("math", seq**2 / 2**20, seq**2), ("tileflash-auto", seq / 2**12, seq * 2**12)):
            lines.append(H200.line(suite, case, variant, "time_ms", Statistic(ms, ms, ms, 3), limit=ms / 4))
            lines.append(H200.line(suite, case, variant, "peak_bytes", Statistic(peak, peak, peak, 1)))
        ratio = Statistic(seq / 256, seq / 256, seq / 256, 3)
        lines.append(H200.line(suite, case, "tileflash-auto", "speed_ratio_to_math", ratio))
        lines.append(H200.line(suite, case, "fa3", "time_ms", None, flags=("unsupported",)))
    return lines


def test_tables() -> None:
    rows = render("scaling", _lines("scaling"), "en").splitlines()
    assert rows[2] == "| 1,024 | 0.977 | 0.244 | unsupported | 1 | 4 | unsupported | 4.00x (4.00 – 4.00) | – |"
    assert rows[3].startswith("| 2,048 | 1.95 | 0.244 | unsupported | 2 | 4 |")  # grows with the length, and does not
    assert (
        "Repeat it: `tileflash bench scaling --lengths 1024,2048 --variants math,tileflash-auto,fa3 --batch 1"
        in rows[-1]
    )
    rows = render("lengths", _lines("lengths"), "en").splitlines()
    assert rows[0] == "|  | S | math, ms | tileflash-auto, ms | fa3, ms | best speed-up |"
    assert rows[3] == "| forward | 2,048 | 4 | 0.5 | unsupported | 8.00x (tileflash-auto) |"
    rows = render("versions", _lines("versions"), "en").splitlines()
    assert "| tileflash-auto | forward | 2,048 | 0.5 | 34.4 | 25% | 8 | 8.00x (8.00 – 8.00) |" in rows
    assert "| fa3 | forward | 2,048 | unsupported | unsupported | unsupported | unsupported | – |" in rows


def test_memory_and_host_tables() -> None:
    lines = []
    for variant, peak in (("math", 2**30), ("tileflash-auto", 2**26)):
        case = {
            "pass": "forward",
            "batch": 8,
            "seq": 2048,
            "heads": 32,
            "head_dim": 64,
            "mask": "causal",
            "dtype": "bfloat16",
        }
        lines.append(H200.line("memory", case, variant, "peak_bytes", Statistic(peak, peak, peak, 1)))
    rows = render("memory", lines, "en").splitlines()
    assert rows[0].startswith("| forward | matrix, MiB (counted) | K/V cache, MiB (counted) | peak MiB, math |")
    assert rows[2] == "| S = 2,048 | 2,048 | 128.0 | 1,024 | 64 | 16.00x |"
    case = {
        "mode": "forward",
        "batch": 1,
        "seq": 128,
        "heads": 4,
        "head_dim": 64,
        "mask": "causal",
        "dtype": "bfloat16",
        "calls": 200,
    }
    host = H200.line("host", case, "tileflash-auto", "host_us", Statistic(20, 19, 21, 9))
    assert render("host", [host], "en").splitlines()[2] == "| tileflash-auto | 20.0 (19.0 – 21.0) |"


@pytest.mark.parametrize("suite", ["lengths", "scaling", "versions", "memory", "host"])
def test_the_command_below_a_table_is_understood(suite: str) -> None:
    lines = _lines(suite)
    if suite == "memory":
        lines = [replace(line, case={"pass": "forward", **line.case}) for line in lines if line.metric == "peak_bytes"]
    if suite == "host":
        lines = [replace(lines[0], metric="host_us", case={"mode": "forward", "calls": 3, **lines[0].case})]
    command = render(suite, lines, "en").splitlines()[-1].split("`")[1].split()
    result = CliRunner().invoke(app, [*command[1:], "--device", "meta"])
    assert "`device` was meta" in result.stderr, result.stderr


def test_the_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tileflash.bench.timing.clock_for", lambda device: SteadyClock())
    arguments = [
        "--device",
        "cpu",
        "--lengths",
        "16",
        "--batch",
        "1",
        "--heads",
        "2",
        "--head-dim",
        "16",
        "--dtype",
        "float32",
    ]
    for name in ("lengths", "scaling", "versions"):
        ledger = tmp_path / f"{name}.jsonl"
        more = [
            "--variants",
            "math,tutorial-fa1,fa3",
            "--rounds",
            "1",
            "--target-ms",
            "0",
            "--pause-ms",
            "0",
            "--output",
            str(ledger),
        ]
        result = CliRunner().invoke(app, ["bench", name, *arguments, *more])
        assert result.exit_code == 0, result.output
        assert "fa3: FlashAttention 3 is not here" in result.stdout
        assert {line.suite for line in read(ledger)} == {name}
    assert "sliding window" in result.stdout  # versions: their features too
    assert CliRunner().invoke(app, ["bench", "scaling", "--direction", "backward"]).exit_code == 2


def test_what_is_said_of_tileflash_is_so() -> None:
    said = {feature: values[VERSIONS.index("tileflash")] for feature, values in FEATURES.items()}
    assert all(len(values) == len(VERSIONS) for values in FEATURES.values())
    q, k, v = torch.randn(1, 8, 4, 16), torch.randn(1, 8, 2, 16), torch.randn(1, 8, 2, 16)
    options: dict[str, dict[str, Any]] = {
        "causal mask": {"causal": True}, "MQA / GQA": {}, "sliding window": {"window": (2, 0)},
        "dropout": {"dropout_p": 0.1, "dropout_seed": 1},
        "additive bias with gradient": {"bias": torch.zeros(8, 8, requires_grad=True)}, "attention sinks": {"sinks": torch.zeros(4)},
        "soft cap": {"softcap": 5.0},
    }  # fmt: skip
    for feature, option in options.items():
        assert said[feature] == "yes"
        assert tileflash.attention(q, k, v, backend="reference", **option).shape == q.shape
    assert (said["paged K/V"] == "no") is not hasattr(tileflash, "attention_decode")
