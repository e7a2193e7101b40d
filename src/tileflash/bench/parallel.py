"""Suite `parallel`: training steps of several ranks beside those of one, by the trainer itself.

Efficiency is tokens/s of N ranks / (N x tokens/s of one rank). Weak scaling (data ranks): each rank has the batch that the one rank has,
so it is t1 / tN. Strong scaling (tensor, pipeline, context ranks): N ranks share the one rank's batch, so it is t1 / (N tN).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from tileflash.bench.flags import FAILED, LOSSES_DIFFER, OUT_OF_MEMORY
from tileflash.bench.ledger import CaseValue, Line
from tileflash.bench.parallel_cases import STRONG, WEAK, ParallelCase, Work
from tileflash.bench.parallel_process import Outcome, in_processes
from tileflash.bench.sitting import Sitting
from tileflash.bench.statistic import Statistic, summarize
from tileflash.compare.losses import LossDifference
from tileflash.gpu_peaks import find_gpu
from tileflash.models import flops_per_token, model_config

SUITE = "parallel"
ONE, SEVERAL = "flash-one-rank", "flash-ranks"


@dataclass(frozen=True)
class ParallelSuite:
    """The cases, in the order in which they are measured, and how. ValueError names what does not fit.

    `steps` that count after `warmup` of each process; `repeats` processes of each. `attention_backend`: as of `tileflash train`.
    """

    cases: tuple[ParallelCase, ...]
    ranks: int = 2
    repeats: int = 2
    steps: int = 4
    warmup: int = 2
    dtype: str = "bfloat16"
    device: str = "cuda"
    attention_backend: str = "auto"
    timeout_seconds: float = 300.0
    budget_seconds: float | None = None

    def __post_init__(self) -> None:
        names = [case.name for case in self.cases]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"`cases` was {', '.join(names)!r}; it must be at least one, each once")
        for name, least in (("ranks", 2), ("repeats", 1), ("steps", 1), ("warmup", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` was {getattr(self, name)}; it must be at least {least}")
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"`dtype` was {self.dtype!r}; it must be bfloat16 or float32")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"`device` was {self.device!r}; it must be cpu, or cuda, where rank r takes GPU r")
        for name in ("timeout_seconds", "budget_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"`{name}` was {value}; it must be above 0")


Execute = Callable[[Sequence[Mapping[str, Any]], int, float], Outcome]


@dataclass
class _Measured:
    """What the processes of one run left, by repeat."""

    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def failed(self) -> Outcome | None:
        return next((outcome for outcome in self.outcomes if outcome.reason), None)


def run_parallel(
    suite: ParallelSuite, sitting: Sitting, execute: Execute = in_processes, now: Callable[[], float] = time.monotonic
) -> Iterator[tuple[str, list[Line], list[str]]]:
    """Group by group of cases that share their one rank, and repeat by repeat: a word on what was done, the lines of all repeats so far,
    and reasons. What ended without a figure is not repeated.

    With `budget_seconds` it stops before a process that would not end in time, taken to need as long as the longest so far.
    """
    begin, longest = now(), 0.0
    one: dict[int, _Measured] = {}
    several: dict[str, _Measured] = {}
    groups = _groups(suite.cases)
    for repeat in range(suite.repeats):
        for number, group in enumerate(groups):
            turns: list[ParallelCase | None] = [None, *group]
            for case in turns if repeat % 2 == 0 else reversed(turns):
                found = (
                    one.setdefault(number, _Measured()) if case is None else several.setdefault(case.name, _Measured())
                )
                if found.failed is not None:
                    continue
                started = now()
                left = math.inf if suite.budget_seconds is None else suite.budget_seconds - (started - begin)
                if left <= longest:
                    return
                runs, ranks = (
                    (_one_rank(suite, group), 1) if case is None else ([settings_of(suite, case)], suite.ranks)
                )
                found.outcomes.append(execute(runs, ranks, min(suite.timeout_seconds, left)))
                longest = max(longest, now() - started)
            lines: list[Line] = []
            reasons: list[str] = []
            for case in group:
                pair = {ONE: one[number], SEVERAL: several[case.name]}
                lines += _lines(suite, case, pair, sitting)
                reasons += [
                    f"{case.name}, {name}: {f.reason}" for name, m in pair.items() if (f := m.failed) is not None
                ]
            yield f"{', '.join(case.name for case in group)}: {repeat + 1} of {suite.repeats}", lines, reasons


def _groups(cases: Sequence[ParallelCase]) -> list[list[ParallelCase]]:
    """Cases with the same one rank beside them, together."""
    groups: dict[str, list[ParallelCase]] = {}
    for case in cases:
        groups.setdefault(f"{case.work}", []).append(case)
    return list(groups.values())


def settings_of(suite: ParallelSuite, case: ParallelCase) -> dict[str, Any]:
    """The settings of a case's run of several ranks."""
    passes = case.work.micro_batches * (suite.ranks if case.scaling == WEAK else 1)
    return {**_settings(suite, case.work, passes), **case.settings}


def _one_rank(suite: ParallelSuite, group: Sequence[ParallelCase]) -> list[dict[str, Any]]:
    """The one rank's runs. Where several ranks have more work than it, a second run does all of it, for the losses alone."""
    work = group[0].work
    runs = [_settings(suite, work, work.micro_batches)]
    if group[0].scaling == WEAK:
        runs.append(_settings(suite, work, work.micro_batches * suite.ranks))
    return runs


def _settings(suite: ParallelSuite, work: Work, passes: int) -> dict[str, Any]:
    return {
        "model": work.model,
        "model_overrides": dict(work.overrides),
        "flash": True,
        "attention_backend": suite.attention_backend,
        "tokenizer": "bytes",  # the demo corpus by a tokenizer that needs no file
        "batch_size": work.samples,
        "sequence_length": work.sequence_length,
        "total_batch_size": work.samples * work.sequence_length * passes,
        "num_iteration": suite.warmup + suite.steps,
        # Small, so that the first steps do not throw the loss about, where rounding alone would part two runs.
        "learning_rate": 2e-5,
        "final_learning_rate_fraction": 1.0,
        "device": suite.device,
        "dtype": suite.dtype,
        "tensorboard": False,
        "rank_timeout": max(suite.timeout_seconds, 1.0),
    }


def _lines(suite: ParallelSuite, case: ParallelCase, pair: Mapping[str, _Measured], sitting: Sitting) -> Iterator[Line]:
    work = case.work
    record: dict[str, CaseValue] = {
        "layout": case.name, "ranks": suite.ranks, "scaling": case.scaling, "model": work.model,
        **{name: value for name, value in work.overrides.items() if isinstance(value, int)},
        "batch": work.samples, "micro_batches": work.micro_batches, "seq": work.sequence_length, "dtype": suite.dtype,
        "steps": suite.steps,
    }  # fmt: skip
    for variant, found in pair.items():
        if found.failed is not None:
            flag = OUT_OF_MEMORY if found.failed.out_of_memory else FAILED
            yield sitting.line(SUITE, record, variant, "step_ms", None, flags=(flag,))
            continue
        ranks = suite.ranks if variant == SEVERAL else 1
        times = _times(suite, found)
        tokens = work.samples * work.micro_batches * work.sequence_length
        of_all = tokens * (ranks if case.scaling == WEAK else 1)
        yield sitting.line(
            SUITE, record, variant, "step_ms", summarize(times), limit=_limit(suite, work, of_all, ranks, sitting)
        )
        rates = summarize([of_all / ranks / ms * 1e3 for ms in times])
        yield sitting.line(SUITE, record, variant, "tokens_per_s_per_rank", rates)
        peaks = [float(max(outcome.peak_bytes)) for outcome in found.outcomes]
        yield sitting.line(SUITE, record, variant, "peak_bytes", summarize(peaks))
    if any(found.failed is not None for found in pair.values()):
        return
    yield sitting.line(SUITE, record, SEVERAL, "efficiency", _efficiency(suite, case, pair))
    difference = _loss_difference(suite, pair)
    flags = () if difference.agrees else (LOSSES_DIFFER,)
    if not math.isfinite(difference.size):
        yield sitting.line(SUITE, record, SEVERAL, "loss_difference", None, flags=(LOSSES_DIFFER,))
        return
    for metric, value in (("loss_difference", difference.size), ("loss_tolerance", difference.tolerance)):
        figure = Statistic(value, value, value, len(pair[SEVERAL].outcomes))
        yield sitting.line(SUITE, record, SEVERAL, metric, figure, flags=flags)


def _times(suite: ParallelSuite, found: _Measured) -> list[float]:
    """Of one process its steps are the repeats; of several their medians."""
    counted = [outcome.step_ms[suite.warmup :] for outcome in found.outcomes]
    return list(counted[0]) if len(counted) == 1 else [median(times) for times in counted]


def _efficiency(suite: ParallelSuite, case: ParallelCase, pair: Mapping[str, _Measured]) -> Statistic:
    """Formed within repeats; with a single one as far apart as the steps of both allow."""
    share = suite.ranks if case.scaling == STRONG else 1
    of_one, of_several = ([o.step_ms[suite.warmup :] for o in pair[name].outcomes] for name in (ONE, SEVERAL))
    if len(of_one) == 1:
        (one,), (many,) = of_one, of_several
        return Statistic(
            median(one) / median(many) / share, min(one) / max(many) / share, max(one) / min(many) / share, 1
        )
    return summarize([median(a) / median(b) / share for a, b in zip(of_one, of_several, strict=True)])


def _loss_difference(suite: ParallelSuite, pair: Mapping[str, _Measured]) -> LossDifference:
    """Where the losses of one rank and of several are furthest apart, in what rounding explains."""
    pairs = zip(pair[ONE].outcomes, pair[SEVERAL].outcomes, strict=True)
    return max(
        (
            LossDifference.between(a, b, step, suite.dtype)
            for one, several in pairs
            for step, (a, b) in enumerate(zip(one.losses, several.losses, strict=True), 1)
        ),
        key=lambda difference: difference.in_tolerances,
    )


def _limit(suite: ParallelSuite, work: Work, tokens: int, ranks: int, sitting: Sitting) -> float | None:
    gpu = find_gpu(sitting.gpu) if suite.dtype == "bfloat16" else None
    if gpu is None:
        return None
    config = model_config(work.model, **work.overrides)
    return flops_per_token(config, work.sequence_length) * tokens / (ranks * gpu.bf16_tflops * 1e12) * 1e3
