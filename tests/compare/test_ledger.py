"""What a comparison adds to a ledger: each figure once, of one sitting, and never to a file that is none."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tileflash.bench.ledger import Line, read
from tileflash.compare.ledger import ledger_lines
from tileflash.compare.plan import CompareConfig, plan
from tileflash.compare.report import Findings
from tileflash.compare.results import RunResult
from tileflash.compare.session import compare

MakeConfig = Callable[..., CompareConfig]
FakeTrainer = Callable[..., list[str]]


def _compare(config: CompareConfig, command: list[str]) -> tuple[int, str]:
    """Exit status and what was shown."""
    shown = io.StringIO()
    return compare(config, command=command, console=Console(file=shown, width=200)), shown.getvalue()


def test_the_ledger_gets_each_figure_once(small_config: MakeConfig, fake_trainer: FakeTrainer, tmp_path: Path) -> None:
    ledger = tmp_path / "results" / "train.jsonl"
    config = small_config(ledger=ledger, resume=True, cuda_graph=False)
    command = fake_trainer(out_of_memory=["baseline:256"])
    assert _compare(config, command)[0] == 0
    lines = read(ledger)
    assert len(lines) == 2 * 2 * 3  # lengths, schemes, metrics
    assert {line.suite for line in lines} == {"train"}
    assert {line.gpu for line in lines} == {"Fake GPU"}
    assert len({line.run for line in lines}) == 1
    of_64 = _line(lines, 64, "baseline", "step_ms")
    assert of_64.case == {"model": "gpt2", "batch": 4, "seq": 64, "dtype": "bfloat16", "cuda_graph": False}
    assert all(line.case["cuda_graph"] is False for line in lines), "of out of memory as well"
    # 10 + 4 * 1 + 64^2 / 65536 = 14.0625 ms, one per cent less in the first repeat.
    assert of_64.median == pytest.approx(14.0625 * 0.995)
    assert (of_64.low, of_64.high) == (pytest.approx(14.0625 * 0.99), pytest.approx(14.0625))
    assert of_64.repeats == 2
    assert _line(lines, 64, "flash", "tokens_per_s").median is not None
    out_of_memory = _line(lines, 256, "baseline", "peak_bytes")
    assert (out_of_memory.median, out_of_memory.flags) == (None, ("out_of_memory",))

    status, shown = _compare(config, command)
    assert status == 0
    assert "0 lines added" in shown
    assert read(ledger) == lines


def test_a_comparison_taken_up_adds_to_its_sitting(
    small_config: MakeConfig, fake_trainer: FakeTrainer, tmp_path: Path
) -> None:
    ledger = tmp_path / "train.jsonl"
    for repeats in (1, 2):
        assert _compare(small_config(ledger=ledger, resume=True, repeats=repeats), fake_trainer())[0] == 0
    lines = read(ledger)
    assert [line.repeats for line in lines] == [1] * 12 + [2] * 12
    assert len({line.run for line in lines}) == 1


def test_runs_with_and_without_a_graph_are_not_one_sitting(
    make_result: Callable[..., RunResult], small_config: MakeConfig
) -> None:
    config = small_config(lengths=(64,), repeats=1)
    first, second = plan(config)
    results = {
        run: make_result(run.setting, run.scheme, cuda_graph=run is first, step_ms=(9.0,) * 5)
        for run in (first, second)
    }
    with pytest.raises(ValueError, match="the runs differ in cuda_graph; the ledger takes those of one sitting"):
        ledger_lines(Findings(config, results, 2))
    unknown = {run: replace(result, cuda_graph=None) for run, result in results.items()}
    assert all("cuda_graph" not in line.case for line in ledger_lines(Findings(config, unknown, 2)))
    captured = {run: replace(result, cuda_graph=True) for run, result in results.items()}
    assert {line.case["cuda_graph"] for line in ledger_lines(Findings(config, captured, 2))} == {True}


def _line(lines: list[Line], length: int, variant: str, metric: str) -> Line:
    found = [li for li in lines if li.case["seq"] == length and (li.variant, li.metric) == (variant, metric)]
    assert len(found) == 1
    return found[0]


def test_an_interrupted_comparison_leaves_the_ledger_alone(
    small_config: MakeConfig, fake_trainer: FakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tileflash.compare.session.execute", interrupt)
    config = small_config(ledger=tmp_path / "train.jsonl")
    assert _compare(config, fake_trainer())[0] == 130
    assert not (tmp_path / "train.jsonl").exists()


@pytest.mark.parametrize("content", [b"years of work\n", b"\xff\xfe\x00", b'{"event": "start"}\n', None])
def test_a_ledger_that_is_none_is_refused_before_the_first_run(
    small_config: MakeConfig, fake_trainer: FakeTrainer, tmp_path: Path, content: bytes | None
) -> None:
    ledger = tmp_path / "notes"
    ledger.mkdir() if content is None else ledger.write_bytes(content)
    config = small_config(ledger=ledger)
    with pytest.raises(ValueError, match="notes is no ledger that lines could be appended to"):
        _compare(config, fake_trainer())
    assert not config.output.exists()
    assert content is None or ledger.read_bytes() == content
