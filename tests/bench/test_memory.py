"""The memory suite: bytes counted by hand, peaks that cannot be, what cannot serve, the ledger; on a GPU the counts beside the peaks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tileflash.bench import Sitting, memory, read
from tileflash.bench.flags import OUT_OF_MEMORY, UNSUPPORTED
from tileflash.bench.memory import PASSES, MemoryCell, MemorySuite, count_bytes, measure_memory, memory_lines
from tileflash.cli import app

SMALL = MemorySuite(
    lengths=(16, 32), variants=("math", "tileflash-auto", "fa3"), batch=1, heads=2, head_dim=8, device="cpu"
)
ARGUMENTS = [
    "bench",
    "memory",
    "--device",
    "cpu",
    "--lengths",
    "16,32",
    "--batch",
    "1",
    "--heads",
    "2",
    "--head-dim",
    "8",
]


def test_counted_by_hand() -> None:
    counted = count_bytes(MemorySuite(batch=8, heads=32, head_dim=64, dtype="bfloat16", device="cpu"), 8192)
    assert counted.matrix == 32 * 2**30  # 8 * 32 * 8192^2 * 2
    assert counted.key_value_cache == 2 * counted.out == 512 * 2**20
    assert counted.gradients == 3 * counted.out
    assert counted.least("math", "forward") == counted.matrix + counted.out
    assert counted.least("tileflash-auto", "forward and backward") == 4 * counted.out
    fp32 = count_bytes(MemorySuite(dtype="float32", device="cpu"), 8192)
    assert fp32.matrix == 2 * counted.matrix


def test_all_lengths_variants_and_passes() -> None:
    cells = list(measure_memory(SMALL))
    assert [(c.length, c.variant, c.which) for c in cells] == [
        (length, variant, which) for length in SMALL.lengths for variant in SMALL.variants for which in PASSES
    ]
    assert all(cell.peak_bytes is None for cell in cells)  # a CPU counts no peaks
    assert {cell.variant for cell in cells if cell.flag == UNSUPPORTED} == {"fa3"}


def test_a_variant_without_memory_is_a_flag_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "attention_variant", lambda name, *_: name)

    def run_counted(suite: MemorySuite, function: Any, length: int, which: str) -> int:
        if function == "math" and length == 32:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 0

    monkeypatch.setattr(memory, "_run_counted", run_counted)
    flags = {
        (cell.length, cell.variant): cell.flag for cell in measure_memory(replace(SMALL, variants=("math", "fa2")))
    }
    assert flags == {(16, "math"): None, (32, "math"): OUT_OF_MEMORY, (16, "fa2"): None, (32, "fa2"): None}


@pytest.mark.parametrize(
    ("variant", "more", "possible"), [("math", 0, True), ("math", -1, False), ("tileflash-auto", -1, False)]
)
def test_a_peak_below_what_must_be_there_is_impossible(variant: str, more: int, possible: bool) -> None:
    counted = count_bytes(SMALL, 32)
    peak = counted.least(variant, "forward") + more
    assert MemoryCell(32, variant, "forward", counted, peak).is_possible is possible


def test_ledger_lines() -> None:
    counted = count_bytes(SMALL, 16)
    cells = [
        MemoryCell(16, "math", "forward", counted, 5000),
        MemoryCell(16, "tileflash-auto", "forward", counted, None),
        MemoryCell(16, "fa3", "forward", counted, None, UNSUPPORTED, "not here"),
    ]
    lines = list(memory_lines(SMALL, cells, Sitting.begin({"gpu": None, "cpu": "test", "commit": "abc"})))
    assert [(line.variant, line.median, line.flags) for line in lines] == [
        ("math", 5000.0, ()),
        ("fa3", None, (UNSUPPORTED,)),
    ]
    assert lines[0].limit == counted.least("math", "forward")
    assert lines[0].case["pass"] == "forward"


@pytest.mark.parametrize(("changed", "complaint"), [
    ({"lengths": ()}, "`lengths` was"), ({"lengths": (0,)}, "`lengths` was"), ({"variants": ("a",)}, "'a'"),
    ({"variants": ("math", "math")}, "each once"), ({"heads": 0}, "`heads` was 0"), ({"dtype": "int8"}, "`dtype` was 'int8'"),
])  # fmt: skip
def test_what_does_not_fit_is_named(changed: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match="must be") as raised:
        replace(SMALL, **changed)
    assert complaint in str(raised.value)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = tmp_path / "memory.jsonl"
    result = CliRunner().invoke(app, [*ARGUMENTS, "--variants", "math,tileflash-auto,fa3", "--output", str(ledger)])
    assert result.exit_code == 0, result.output
    assert result.stdout.count("not measured") == 8
    assert "fa3: FlashAttention 3 is not here" in result.stdout
    assert len(read(ledger, suite="memory")) == 4  # fa3's reasons alone
    monkeypatch.setattr(memory, "_is_cuda", lambda device: True)
    for name, value in (("synchronize", None), ("reset_peak_memory_stats", None), ("empty_cache", None),
                        ("memory_allocated", 100), ("max_memory_allocated", 101)):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *arguments, value=value: value)
    broken = CliRunner().invoke(app, [*ARGUMENTS, "--variants", "math"])
    assert broken.exit_code == 1
    assert "less_than_needed: memory, math, forward batch=1 seq=16 " in broken.stderr
    assert CliRunner().invoke(app, [*ARGUMENTS, "--mask", "window"]).exit_code == 2


@pytest.mark.gpu
def test_on_a_gpu_flash_holds_little_more_than_what_must_be_there() -> None:
    suite = MemorySuite(lengths=(512, 2048), variants=("math", "tileflash-triton"), batch=2, heads=8)
    for cell in measure_memory(suite):
        assert cell.flag is None, cell.reason
        assert cell.is_possible
        assert cell.peak_bytes is not None
        if cell.variant == "tileflash-triton":  # the log-sum-exp and delta, 8 bytes a row beside 128 of the output's
            assert cell.peak_bytes <= 1.25 * cell.counted.least(cell.variant, cell.which) + 2**21


def test_where_nothing_is_measured_only_the_smallest_length_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The standard lengths on a CPU: a matrix of 512 GiB."""
    lengths = []

    def variant(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        lengths.append(q.shape[1])
        return q + k + v

    monkeypatch.setattr(memory, "attention_variant", lambda name, *_: variant)
    cells = list(measure_memory(replace(SMALL, variants=("math",))))
    assert set(lengths) == {16}
    assert [(cell.length, cell.flag, cell.peak_bytes) for cell in cells] == [
        (length, None, None) for length in (16, 32) for _ in PASSES
    ]
