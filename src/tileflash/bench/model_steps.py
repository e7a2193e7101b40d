"""Suites `training` (a model's forward and backward by batch and length) and `models` (whole models at one batch): baseline against flash.

Each configuration is a fresh process (`model_worker`), both schemes back to back; the first passes are not counted. Out of memory is a
result, and is not repeated.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Literal

from tileflash.bench.flags import FAILED, OUT_OF_MEMORY
from tileflash.bench.ledger import CaseValue, Line
from tileflash.bench.model_shapes import model_shape
from tileflash.bench.model_worker import BASELINE, FLASH, Answer, Request, read_answer
from tileflash.bench.sitting import Sitting
from tileflash.bench.statistic import Statistic, summarize
from tileflash.gpu_peaks import find_gpu
from tileflash.models import flops_per_token

Name = Literal["training", "models"]
SCHEMES = (BASELINE, FLASH)


@dataclass(frozen=True)
class StepsCase:
    """A model, and the batch and length of its steps."""

    model: str
    batch: int
    seq: int

    def __str__(self) -> str:
        return f"{self.model} {self.batch} x {self.seq}"


@dataclass(frozen=True)
class StepsSuite:
    """The cases, in the order in which they are measured, and how. ValueError names what does not fit."""

    name: Name
    cases: tuple[StepsCase, ...]
    repeats: int = 1
    steps: int = 5
    warmup: int = 2
    dtype: str = "bfloat16"
    device: str = "cuda"
    timeout_seconds: float = 300.0
    budget_seconds: float | None = None

    def __post_init__(self) -> None:
        if not self.cases or len(set(self.cases)) < len(self.cases):
            raise ValueError(f"`cases` was {[*map(str, self.cases)]}; it must be at least one, each once")
        for case in self.cases:
            config = model_shape(case.model)
            if case.batch < 1 or not 1 <= case.seq <= config.max_sequence_length:
                raise ValueError(
                    f"`cases` held {case}; batch must be at least 1, and the length 1 to {config.max_sequence_length}"
                )
        for name in ("repeats", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` was {getattr(self, name)}; it must be at least 1")
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"`dtype` was {self.dtype!r}; it must be bfloat16 or float32")
        for name in ("timeout_seconds", "budget_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"`{name}` was {value}; it must be above 0")


Execute = Callable[[Request, float], Answer]


def in_a_process(request: Request, limit_s: float) -> Answer:
    """The answer of a fresh process, which is ended after `limit_s`."""
    command = [sys.executable, "-m", "tileflash.bench.model_worker", json.dumps(asdict(request))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return Answer(reason=f"ended after {limit_s:.0f} s without an answer")
    try:
        return read_answer(done.stdout)
    except ValueError as error:
        last = (done.stderr.strip().splitlines() or [str(error)])[-1]
        # -9: the host's own memory ran out, and the kernel chose this process.
        return Answer(out_of_memory=done.returncode == -9, reason=f"exit status {done.returncode}: {last[:300]}")


def run_steps(
    suite: StepsSuite, sitting: Sitting, execute: Execute = in_a_process, now: Callable[[], float] = time.monotonic
) -> Iterator[tuple[StepsCase, list[Line], list[str]]]:
    """Case by case: ledger lines (`step_ms`, `samples_per_s`, `tokens_per_s`, `peak_bytes`, `millijoule_per_token`) and
    reasons. With `budget_seconds` it stops
    before a case that would not end in time, taken to need as long as the longest so far."""
    begin, longest = now(), 0.0
    for case in suite.cases:
        started = now()
        if suite.budget_seconds is not None and started + longest - begin >= suite.budget_seconds:
            return
        answers: dict[str, list[Answer]] = {scheme: [] for scheme in SCHEMES}
        for repeat in range(suite.repeats):
            for scheme in SCHEMES if repeat % 2 == 0 else reversed(SCHEMES):
                if not any(answer.reason for answer in answers[scheme]):  # it would only end the same way again
                    request = Request(
                        case.model, case.batch, case.seq, scheme, suite.dtype, suite.device, suite.warmup, suite.steps
                    )
                    answers[scheme].append(execute(request, suite.timeout_seconds))
        lines = [line for scheme in SCHEMES for line in _lines(suite, case, scheme, answers[scheme], sitting)]
        reasons = [f"{case}, {scheme}: {a.reason}" for scheme in SCHEMES for a in answers[scheme] if a.reason]
        yield case, lines, reasons
        longest = max(longest, now() - started)


def _lines(
    suite: StepsSuite, case: StepsCase, scheme: str, answers: Sequence[Answer], sitting: Sitting
) -> Iterator[Line]:
    record: Mapping[str, CaseValue] = {
        "model": case.model, "batch": case.batch, "seq": case.seq, "pass": "forward and backward", "dtype": suite.dtype,
    }  # fmt: skip
    failed = next((answer for answer in answers if answer.reason), None)
    if failed is not None:
        flag = OUT_OF_MEMORY if failed.out_of_memory else FAILED
        yield sitting.line(suite.name, record, scheme, "step_ms", None, flags=(flag,))
        return
    # Of one process its steps are the repeats; of several their medians.
    step_ms = list(answers[0].step_ms) if len(answers) == 1 else [median(answer.step_ms) for answer in answers]
    config, gpu = model_shape(case.model), find_gpu(sitting.gpu) if suite.dtype == "bfloat16" else None
    flops = flops_per_token(config, case.seq) * case.batch * case.seq
    limit = None if gpu is None else flops / (gpu.bf16_tflops * 1e12) * 1e3
    yield sitting.line(suite.name, record, scheme, "step_ms", summarize(step_ms), limit=limit)
    for metric, amount in (("samples_per_s", case.batch), ("tokens_per_s", case.batch * case.seq)):
        yield sitting.line(suite.name, record, scheme, metric, summarize([amount / ms * 1e3 for ms in step_ms]))
    peaks = [float(answer.peak_bytes) for answer in answers if answer.peak_bytes is not None]
    if peaks:
        middle = float(median(peaks))
        yield sitting.line(
            suite.name, record, scheme, "peak_bytes", Statistic(middle, min(peaks), max(peaks), len(peaks))
        )
    energies = [1e3 * answer.energy_j / len(answer.step_ms) for answer in answers if answer.energy_j is not None]
    if energies:
        energy = summarize([each / (case.batch * case.seq) for each in energies])
        yield sitting.line(suite.name, record, scheme, "millijoule_per_token", energy)
