"""Suite `parallel`: what is run beside what, figures made of it, its table and its command; true ranks on the CPU."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from support.lines import H200
from tileflash.bench import Line, Sitting, read
from tileflash.bench.audit import audit
from tileflash.bench.parallel import ParallelSuite, run_parallel, settings_of
from tileflash.bench.parallel_cases import DEFAULT_LAYOUTS, LAYOUTS, SIZES, parallel_case
from tileflash.bench.parallel_process import Outcome, in_processes, link_and_library
from tileflash.bench.tables import render
from tileflash.cli import app
from tileflash.models import model_config
from tileflash.train import TrainConfig

SITTING = Sitting.begin({"gpu": None, "cpu": "test", "commit": "abc"})
TINY = ParallelSuite(
    tuple(parallel_case(name, "tiny", 2) for name in ("dp", "zero1", "tp")), repeats=1, steps=2, warmup=1, dtype="float32",
    device="cpu",
)  # fmt: skip
Call = tuple[int, int, str]  # ranks, runs, what is shared


def _fake(made: list[Call] | None = None, several_ms: float = 50.0, **changes: Any) -> Any:
    def execute(runs: Sequence[Mapping[str, Any]], ranks: int, limit_s: float) -> Outcome:
        first = runs[0]
        shared = "tp" if first.get("tensor_parallel") else f"dp{first.get('zero_stage', 0)}" if ranks > 1 else "one"
        if made is not None:
            made.append((ranks, len(runs), shared))
        ms = several_ms if ranks > 1 else 40.0
        found = Outcome((999.0, ms * 0.99, ms * 1.01), (5.0, 4.5, 4.0), tuple([ranks * 10**9] * ranks))
        return replace(found, **changes) if ranks > 1 else found

    return execute


def _all_lines(suite: ParallelSuite = TINY, sitting: Sitting = SITTING, execute: Any = None) -> list[Line]:
    found = run_parallel(suite, sitting, execute or _fake())
    return [line for _, lines, _ in found for line in lines]


def _figures(lines: Sequence[Line], layout: str, metric: str) -> dict[str, float | None]:
    return {line.variant: line.median for line in lines if (line.case["layout"], line.metric) == (layout, metric)}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_case_is_a_run_that_the_trainer_takes(name: str, size: str) -> None:
    """Settings are checked, the ranks are as many as were asked for, and both sides of a case have the same work."""
    case = parallel_case(name, size, 2)
    config = TrainConfig(**settings_of(replace(TINY, cases=(case,)), case))
    factors = (config.data_parallel, config.tensor_parallel, config.context_parallel, config.pipeline_parallel)
    assert math.prod(factors) == 2
    model_config(config.model, **config.model_overrides)
    once = case.work.samples * case.work.sequence_length * case.work.micro_batches
    assert config.step_tokens == once * (2 if case.scaling == "weak" else 1)
    assert config.micro_batches == case.work.micro_batches
    assert bool(case.work.overrides) == (case.work.reason is not None)


def test_cases_with_the_same_one_rank_share_it_and_the_order_turns_round() -> None:
    made: list[Call] = []
    words = [word for word, _, _ in run_parallel(replace(TINY, repeats=2), SITTING, _fake(made))]
    one_of_data, one_of_layers = (1, 2, "one"), (1, 1, "one")
    assert made[:3] == [one_of_data, (2, 1, "dp0"), (2, 1, "dp1")]
    assert made[3:5] == [one_of_layers, (2, 1, "tp")]
    assert made[5:] == [(2, 1, "dp1"), (2, 1, "dp0"), one_of_data, (2, 1, "tp"), one_of_layers]
    assert words == ["dp, zero1: 1 of 2", "tp: 1 of 2", "dp, zero1: 2 of 2", "tp: 2 of 2"]


def test_efficiency_by_its_definition() -> None:
    lines = _all_lines()
    assert _figures(lines, "dp", "efficiency") == {"flash-ranks": pytest.approx(40 / 50)}
    assert _figures(lines, "tp", "efficiency") == {"flash-ranks": pytest.approx(40 / (2 * 50))}
    # 2 samples of 32 tokens on each data rank; 4 passes of 32 tokens shared by 2 tensor ranks.
    rates = {"flash-one-rank": pytest.approx(64 / 0.040, 1e-3), "flash-ranks": pytest.approx(64 / 0.050, 1e-3)}
    assert _figures(lines, "dp", "tokens_per_s_per_rank") == rates
    shared = {"flash-one-rank": pytest.approx(128 / 0.040, 1e-3), "flash-ranks": pytest.approx(64 / 0.050, 1e-3)}
    assert _figures(lines, "tp", "tokens_per_s_per_rank") == shared
    (spread,) = (line for line in lines if line.metric == "efficiency" and line.case["layout"] == "dp")
    assert (spread.low, spread.high) == (pytest.approx(0.8 * 0.99 / 1.01), pytest.approx(0.8 * 1.01 / 0.99))
    assert audit(lines).complaints() == []


def test_efficiencies_and_rates_that_the_times_do_not_allow_are_found() -> None:
    lines = _all_lines()
    for metric in ("efficiency", "tokens_per_s_per_rank"):
        wrong = [
            replace(line, low=2.0 * line.low, median=2.0 * line.median, high=2.0 * line.high)  # type: ignore[operator]
            if line.metric == metric and line.case["layout"] == "tp"
            else line
            for line in lines
        ]
        assert {finding.flag for finding in audit(wrong).findings} == {"contradiction"}


def test_losses_that_differ_are_flagged_and_rounding_is_not() -> None:
    def of_difference(*losses: float) -> list[Line]:
        lines = _all_lines(execute=_fake(losses=losses))
        return [line for line in lines if line.metric == "loss_difference" and line.case["layout"] == "dp"]

    (line,) = of_difference(5.0, 4.50001, 4.0)
    assert (line.median, line.flags) == (pytest.approx(1e-5), ())
    (line,) = of_difference(5.0, 4.501, 4.0)
    assert (line.median, line.flags) == (pytest.approx(1e-3), ("losses_differ",))
    (line,) = of_difference(5.0, math.nan, 4.0)
    assert (line.median, line.flags) == (None, ("losses_differ",))


def test_what_has_no_memory_is_told_and_not_repeated() -> None:
    made: list[Call] = []

    def execute(runs: Sequence[Mapping[str, Any]], ranks: int, limit_s: float) -> Outcome:
        good: Outcome = _fake(made)(runs, ranks, limit_s)
        return Outcome(out_of_memory=True, reason="CUDA out of memory") if "tensor_parallel" in runs[0] else good

    found = list(run_parallel(replace(TINY, repeats=2), SITTING, execute))
    assert [call[2] for call in made].count("tp") == 1
    assert found[-1][2] == ["tp, flash-ranks: CUDA out of memory"]
    (line,) = (line for line in found[-1][1] if line.variant == "flash-ranks")
    assert line.flags == ("out_of_memory",)
    table = render("parallel", [line for _, lines, _ in found for line in lines], "en")
    assert "| tp | 2 | strong | llama3-tiny | 1 × 4 × 32 | 40 | out of memory | 3,200 | out of memory | – |" in table


def test_the_budget_ends_it_in_time() -> None:
    times = iter(range(0, 1000, 10))
    found = list(run_parallel(replace(TINY, budget_seconds=65.0), SITTING, _fake(), now=lambda: float(next(times))))
    assert [word for word, _, _ in found] == ["dp, zero1: 1 of 1"]


def test_table_of_two_h200() -> None:
    suite = ParallelSuite(
        tuple(parallel_case(name, "full", 2) for name in DEFAULT_LAYOUTS), repeats=1, steps=2, warmup=1
    )
    lines = _all_lines(suite, H200, _fake(several_ms=10.0**6))
    slow = [line for line in lines if line.variant == "flash-ranks" and line.metric == "step_ms"]
    assert all(line.limit is not None and 0 < line.limit < line.median for line in slow)  # type: ignore[operator]
    table = render("parallel", lines, "en")
    rows = {row.split(" | ")[0].strip("| "): row.split(" | ") for row in table.splitlines() if row.startswith("|")}
    assert {name: rows[name][10] for name in DEFAULT_LAYOUTS} == {
        "dp": "≥ 0.96", "zero1": "≥ 0.94", "zero3": "≥ 0.90", "tp": "≥ 0.80", "pp": "≥ 0.85", "cp-ring": "≥ 0.90",
    }  # fmt: skip
    assert rows["cp-ring"][3] == "llama3-1b, n_layer=4, vocab_size=16384"
    assert "llama3-8b, n_layer=16: all 32 layers take 128 GB" in table
    command = table.split("`")[-2].split()
    assert "`device` was 'meta'" in CliRunner().invoke(app, [*command[1:], "--device", "meta"]).stderr


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cases": ()}, "`cases` was ''"), ({"ranks": 1}, "`ranks` was 1; it must be at least 2"),
        ({"steps": 0}, "`steps` was 0"), ({"dtype": "int8"}, "`dtype` was 'int8'"),
        ({"device": "cuda:1"}, "`device` was 'cuda:1'"), ({"budget_seconds": 0.0}, "`budget_seconds` was 0.0"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **changed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "ep"], "`cases` held 'ep'; it must be some of dp, zero1"),
        (["--size", "huge"], "`size` was 'huge'; it must be full or tiny"),
        (["--device", "cuda"], "`device` was cuda, but PyTorch sees no GPU here"),
    ],
)
def test_bad_input_is_one_line(monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = CliRunner().invoke(app, ["bench", "parallel", *arguments])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert message in result.stderr


@pytest.mark.xdist_group("ranks")
def test_true_ranks_on_the_cpu(tmp_path: Path) -> None:
    """Two processes by torchrun and one alone: the losses are the same, and the figures go to the ledger."""
    ledger = tmp_path / "parallel.jsonl"
    arguments = ["--device", "cpu", "--cases", "zero1", "--repeats", "1", "--steps", "1", "--warmup", "1"]
    more = ["--attention-backend", "tiled", "--largest-spread", "100", "--ledger", str(ledger)]
    result = CliRunner().invoke(app, ["bench", "parallel", *arguments, *more])
    assert result.exit_code == 0, result.output
    lines = read(ledger, suite="parallel")
    assert lines[0].versions["link"] == link_and_library("cpu")["link"]
    figures = {(line.variant, line.metric): line for line in lines}
    difference, efficiency = figures["flash-ranks", "loss_difference"], figures["flash-ranks", "efficiency"]
    assert difference.median is not None
    assert difference.median < 1e-5
    assert efficiency.median is not None
    assert 0 < efficiency.median < 3
    assert figures["flash-ranks", "peak_bytes"].median > 10**8  # type: ignore[operator]
    assert "zero1" in result.stdout


@pytest.mark.xdist_group("ranks")
def test_a_process_that_fails_or_hangs_says_why() -> None:
    wrong = in_processes([{"model": "llama9", "device": "cpu"}], 1, 120.0)
    assert wrong.reason.startswith("exit status 1: ValueError: model is 'llama9'")
    assert "without an answer" in in_processes([{"model": "llama9"}], 1, 0.01).reason
