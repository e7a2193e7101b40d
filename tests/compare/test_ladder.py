"""The ladder over a fake trainer: which rungs there are, what they are called as, and what the table says."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from tileflash.compare.ladder import climb, ladder_table, plan_ladder
from tileflash.compare.plan import RUNGS, CompareConfig, Run, Setting, train_arguments
from tileflash.compare.results import Outcome, RunResult

MakeConfig = Callable[..., CompareConfig]


def test_each_rung_has_the_flags_of_the_one_before() -> None:
    *climbing, alone = RUNGS.values()
    for lower, higher in itertools.pairwise(climbing):
        assert set(lower) - {"--no-cuda-graph"} < set(higher)
    assert set(climbing[-1]) - set(alone) == {"--compile"}
    assert climbing[0] == ("--no-cuda-graph",)


def test_rungs_are_those_that_the_setting_can_have(small_config: MakeConfig) -> None:
    config = small_config(lengths=(64,), repeats=2)
    with_graph, without = (plan_ladder(replace(config, cuda_graph=graph)) for graph in (True, False))
    assert [run.scheme for run in with_graph] == [*RUNGS, *RUNGS]
    assert [run.scheme for run in without[:5]] == list(RUNGS)[:5]
    in_fp32 = plan_ladder(replace(config, cuda_graph=False, dtype="float32", repeats=1))
    assert "ladder-split" not in [run.scheme for run in in_fp32]
    for run in in_fp32:
        assert not any("split" in argument for argument in train_arguments(replace(config, cuda_graph=False), run))
    arguments = train_arguments(replace(config, cuda_graph=True, attention_backend="triton"), with_graph[1])
    assert arguments[-4:] == ["--no-cuda-graph", "--flash", "--attention-backend", "triton"]


def test_it_is_measured_and_told(small_config: MakeConfig, fake_trainer: Callable[..., list[str]]) -> None:
    config = small_config(lengths=(64,), repeats=2)
    shown = io.StringIO()
    assert climb(config, command=fake_trainer(), console=Console(file=shown, width=200)) == 0
    text = (config.output / "ladder.md").read_text()
    assert text.strip() in shown.getvalue()
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| rung", "| ---"))]
    logs = list((config.output / "runs").glob("*.jsonl"))
    assert len(logs) == 2 * len(rows)
    assert rows[0].startswith("| baseline: ")
    assert "| 1.00x |" in rows[0]  # no spread where there is none to be seen
    assert all(
        json.loads(log.read_text().splitlines()[0])["config"]["flash"] == ("baseline" not in log.name) for log in logs
    )
    assert "--ladder`" in text


@pytest.mark.parametrize("how", ["out_of_memory", "crash"])
def test_a_rung_that_ends_otherwise_says_so(
    small_config: MakeConfig, fake_trainer: Callable[..., list[str]], how: str
) -> None:
    config = small_config(lengths=(64,), repeats=1)
    status = climb(config, command=fake_trainer(**{how: ["flash:64"]}), console=Console(file=io.StringIO()))
    assert status == (1 if how == "crash" else 0)
    text = (config.output / "ladder.md").read_text()
    assert f"| + tileflash.attention | {'failed' if how == 'crash' else 'OOM'} |" in text


def test_figures_are_those_of_the_runs(
    small_config: MakeConfig, make_setting: Callable[..., Setting], make_result: Callable[..., RunResult]
) -> None:
    config = replace(small_config(lengths=(64,), repeats=2), cuda_graph=False)
    setting = make_setting()
    results: dict[Run, RunResult] = {}
    for repeat, slower in ((1, 0.0), (2, 2.0)):
        for scheme, ms, loss, peak in (("ladder-baseline", 20.0, 5.0, 200), ("ladder-flash", 10.0, 5.25, 100)):
            result = make_result(
                setting, scheme, repeat, (99.0, *[ms + slower] * 3), losses=[loss] * 4, peak=peak * 2**20
            )
            results[result.run] = result
    results[Run(setting, "ladder-fused", 1)] = make_result(setting, "ladder-fused", outcome=Outcome.TIMED_OUT)
    baseline, flash, fused, split, *_ = ladder_table(setting, config, results).rows
    assert [cell.text for cell in baseline[1:]] == ["21.00", "12,218", "1.00x", "200.0", "100.0 %", "0"]
    assert [cell.text for cell in flash[1:]] == ["11.00", "23,467", "1.92x", "100.0", "50.0 %", "2.5e-01"]
    assert flash[1].spread == "10.00–12.00"
    assert (fused[1].text, split[1].text) == ("timed out", "not run")
