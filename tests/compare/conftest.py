"""Builders that the tests of the comparison share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tileflash.compare.figures import Comparison, compare_setting
from tileflash.compare.plan import BASELINE, FLASH, CompareConfig, Run, Setting, train_arguments
from tileflash.compare.report import Findings
from tileflash.compare.results import Outcome, Record, RunResult

MEBIBYTE = 2**20


@pytest.fixture
def make_setting() -> Callable[..., Setting]:
    def make(model: str = "gpt2", length: int = 64, dtype: str = "bfloat16", steps: int = 4, batch: int = 4) -> Setting:
        return Setting(model, batch, length, steps, dtype)

    return make


@pytest.fixture
def make_result() -> Callable[..., RunResult]:
    def make(
        setting: Setting,
        scheme: str,
        repeat: int = 1,
        step_ms: Sequence[float] = (100.0, 10.0, 10.0, 10.0),
        losses: Sequence[float] | None = None,
        peak: int | None = 100 * MEBIBYTE,
        outcome: Outcome = Outcome.FINISHED,
        exit_status: int = 0,
        cuda_graph: bool | None = True,
    ) -> RunResult:
        run = Run(setting, scheme, repeat)
        losses = [5.0 - 0.5 * step for step in range(len(step_ms))] if losses is None else losses
        finished = outcome is Outcome.FINISHED
        return RunResult(
            run=run,
            outcome=outcome,
            record=Record((), exit_status, 1.0, outcome is Outcome.TIMED_OUT, "last words"),
            steps=tuple(range(1, len(step_ms) + 1)) if finished else (),
            step_ms=tuple(step_ms) if finished else (),
            train_loss=tuple(losses) if finished else (),
            peak_used_bytes=peak if finished else None,
            cuda_graph=cuda_graph if finished else None,
            environment={"gpu": "Some GPU", "torch": "2.11", "date": "2026-11-30T09:00:00Z"},
            message="" if finished else "why",
        )

    return make


@pytest.fixture
def make_comparison(
    make_setting: Callable[..., Setting], make_result: Callable[..., RunResult]
) -> Callable[..., Comparison]:
    """A comparison from the latencies and peaks of its repeats; "oom" in place of latencies is out of memory."""

    def make(
        baseline: Sequence[float] | str,
        flash: Sequence[float] | str,
        *,
        model: str = "gpt2",
        length: int = 64,
        dtype: str = "bfloat16",
        peaks: tuple[float | None, float | None] = (100.0, 100.0),
        losses: tuple[Sequence[float] | None, Sequence[float] | None] = (None, None),
    ) -> Comparison:
        setting = make_setting(model, length, dtype)
        results: dict[Run, RunResult] = {}
        for scheme, latencies, peak, loss in zip((BASELINE, FLASH), (baseline, flash), peaks, losses, strict=True):
            if latencies == "oom":
                result = make_result(setting, scheme, outcome=Outcome.OUT_OF_MEMORY, exit_status=3)
                results[result.run] = result
                continue
            for repeat, latency in enumerate(latencies, start=1):
                bytes_used = None if peak is None else int(peak * MEBIBYTE)
                steps = (1000.0, latency, latency, latency)
                result = make_result(setting, scheme, repeat, steps, loss, bytes_used)
                results[result.run] = result
        return compare_setting(setting, results)

    return make


@pytest.fixture
def fake_trainer() -> Callable[..., list[str]]:
    """The command of a trainer that ends as asked: `fake_trainer(out_of_memory=["baseline:256"], ...)`."""

    def command(**behaviour: list[str]) -> list[str]:
        return [sys.executable, str(Path(__file__).with_name("fake_trainer.py")), json.dumps(behaviour)]

    return command


@pytest.fixture
def small_config(tmp_path: Path) -> Callable[..., CompareConfig]:
    """Two lengths and two repeats of one model, without the public setting, below a temporary directory."""

    def make(**changes: object) -> CompareConfig:
        settings: dict[str, object] = {
            "models": ("gpt2",),
            "lengths": (64, 256),
            "repeats": 2,
            "num_iteration": 5,
            "public_setting": False,
            "cuda_graph": False,
            "output": tmp_path / "report",
        }
        return CompareConfig(**{**settings, **changes})  # type: ignore[arg-type]

    return make


@pytest.fixture
def write_log(tmp_path: Path) -> Callable[..., Path]:
    """Write a run's log from events and, last, the record of how its process ended."""

    def write(
        config: CompareConfig,
        run: Run,
        events: Sequence[object],
        exit_status: int = 0,
        timed_out: bool = False,
        record: bool = True,
    ) -> Path:
        log = tmp_path / f"{run.name}.jsonl"
        lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
        ended = Record(tuple(train_arguments(config, run)), exit_status, 12.0, timed_out, "last words")
        log.write_text("\n".join(lines) + "\n" + (ended.as_line() if record else ""))
        return log

    return write


@pytest.fixture
def findings(make_result: Callable[..., RunResult]) -> Callable[..., Findings]:
    """gpt2 at 64 (faster), 256 (flash failed once), 1024 (baseline out of memory), 4096 (both), 8192 (not run)."""

    def make(language: str = "en", **changes: object) -> Findings:
        settings: dict[str, object] = {
            "lengths": (64, 256, 1024, 4096, 8192), "repeats": 2, "num_iteration": 4, "cuda_graph": True,
        }  # fmt: skip
        config = CompareConfig(models=("gpt2",), language=language, **{**settings, **changes})  # type: ignore[arg-type]
        by_length = {s.sequence_length: s for s in config.length_settings("gpt2")}
        public = config.public_settings()
        results = []
        for setting in {*public, by_length[64]}:
            for repeat in (1, 2):
                results.append(
                    make_result(setting, BASELINE, repeat, (99.0, *[20.0 + repeat] * (setting.num_iteration - 1)))
                )
                results.append(
                    make_result(setting, FLASH, repeat, (99.0, *[10.0 + repeat] * (setting.num_iteration - 1)))
                )
        results += [make_result(by_length[256], BASELINE), make_result(by_length[256], FLASH)]
        results.append(make_result(by_length[256], FLASH, 2, outcome=Outcome.FAILED, exit_status=1))
        results.append(make_result(by_length[1024], BASELINE, outcome=Outcome.OUT_OF_MEMORY, exit_status=3))
        results.append(make_result(by_length[1024], FLASH))
        results += [make_result(by_length[4096], s, outcome=Outcome.OUT_OF_MEMORY) for s in (BASELINE, FLASH)]
        return Findings(config, {result.run: result for result in results}, 24)

    return make
