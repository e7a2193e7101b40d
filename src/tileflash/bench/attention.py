"""Suite `attention`: forward and backward speed of attention, ours and PyTorch's backends on the same inputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import get_args

import torch

from tileflash.bench.attention_check import Judge, complaint_of_inputs
from tileflash.bench.attention_variants import Attention, Trial, attempt, attention_variant
from tileflash.bench.audit import Audit
from tileflash.bench.flags import FAILED, FASTER_THAN_LIMIT, TIMER_DISAGREES, TRIVIAL_INPUT, WRONG_RESULT
from tileflash.bench.ledger import CaseValue, Line
from tileflash.bench.roofline import AttentionWork, Direction, attention_work
from tileflash.bench.sitting import Sitting
from tileflash.bench.timing import Clock, Timing, TimingPlan, clock_for, compare, impossible
from tileflash.gpu_peaks import find_gpu

SUITE = "attention"
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
MASKS = ("full", "causal")
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class AttentionSuite:
    """What to measure: every mask, head dimension, length and direction; batch = tokens / length and heads = width /
    head dimension, so that all cases hold equally many elements. ValueError names what does not fit."""

    head_dims: tuple[int, ...] = (64, 128, 256)
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    masks: tuple[str, ...] = MASKS
    directions: tuple[Direction, ...] = DIRECTIONS
    variants: tuple[str, ...] = ("tileflash-triton", "fa2", "cudnn")
    tokens: int = 16384
    width: int = 2048
    dtype: str = "bfloat16"
    device: str = "cuda"
    baseline: str = "fa2"
    seed: int = 0
    budget_seconds: float | None = None
    timing: TimingPlan = field(default_factory=TimingPlan)
    fa3_library: Path | None = None

    def __post_init__(self) -> None:
        choices = (("masks", MASKS), ("directions", DIRECTIONS), ("variants", None))
        for name, allowed in choices:
            values = getattr(self, name)
            if not values or len(set(values)) < len(values) or (allowed and not set(values) <= set(allowed)):
                expected = f"some of {', '.join(allowed)}" if allowed else "at least one, each once"
                raise ValueError(f"`{name}` was {', '.join(values)!r}; it must be {expected}")
        for variant in self.variants:
            attention_variant(variant)
        for name, total in (("lengths", self.tokens), ("head_dims", self.width)):
            values = getattr(self, name)
            whole = "tokens" if name == "lengths" else "width"
            if total < 1:
                raise ValueError(f"`{whole}` was {total}; it must be at least 1")
            if not values or any(value < 1 or total % value for value in values):
                raise ValueError(f"`{name}` was {values}; each must be at least 1 and divide `{whole}` = {total}")
        if self.dtype not in _DTYPES:
            raise ValueError(f"`dtype` was {self.dtype!r}; it must be one of {', '.join(_DTYPES)}")
        if self.budget_seconds is not None and not self.budget_seconds > 0:
            raise ValueError(f"`budget_seconds` was {self.budget_seconds}; it must be above 0")

    def cases(self) -> list[AttentionCase]:
        """All cases in the order in which they are measured: both directions of a shape together."""
        return [
            AttentionCase(direction, self.tokens // seq, self.width // dim, seq, dim, mask, self.dtype)
            for dim, mask, seq, direction in product(self.head_dims, self.masks, self.lengths, self.directions)
        ]


@dataclass(frozen=True)
class AttentionCase:
    """One cell of the table; q, k, v are [batch, seq, heads, head_dim]."""

    direction: Direction
    batch: int
    heads: int
    seq: int
    head_dim: int
    mask: str
    dtype: str

    def record(self) -> dict[str, CaseValue]:
        """The `case` of a ledger line."""
        return {
            "direction": self.direction,
            "batch": self.batch,
            "heads": self.heads,
            "kv_heads": self.heads,
            "seq": self.seq,
            "head_dim": self.head_dim,
            "mask": self.mask,
            "dtype": self.dtype,
        }

    def work(self) -> AttentionWork:
        """FLOPs and bytes of the case."""
        return work_of(self.record())

    def __str__(self) -> str:
        return f"{self.direction} d={self.head_dim} {self.mask} S={self.seq}"


def work_of(case: Mapping[str, CaseValue]) -> AttentionWork:
    """The work of a ledger line's case."""
    return attention_work(
        batch=int(case["batch"]),
        heads=int(case["heads"]),
        kv_heads=int(case["kv_heads"]),
        seq_q=int(case["seq"]),
        seq_k=int(case["seq"]),
        head_dim=int(case["head_dim"]),
        causal=case["mask"] == "causal",
        direction="forward" if case["direction"] == "forward" else "backward",
        itemsize=4 if case["dtype"] == "float32" else 2,
    )


@dataclass(frozen=True)
class Cell:
    """What came of one variant in one case: a timing, or a flag and the reason why there is none."""

    variant: str
    timing: Timing | None
    flags: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class CaseResult:
    """One case: a cell for each variant, and the time no kernel can beat on this GPU (None where unknown)."""

    case: AttentionCase
    cells: tuple[Cell, ...]
    limit_ms: float | None

    def lines(self, sitting: Sitting, baseline: str, suite: str = SUITE) -> Iterator[Line]:
        """Ledger lines: `time_ms` of each variant and `speed_ratio_to_BASELINE` where it was measured."""
        for cell in self.cells:
            time_ms = cell.timing.time_ms if cell.timing else None
            yield sitting.line(
                suite, self.case.record(), cell.variant, "time_ms", time_ms, limit=self.limit_ms, flags=cell.flags
            )
            ratio = cell.timing.speed_ratio if cell.timing else None
            if ratio is not None and cell.variant != baseline:
                metric = f"speed_ratio_to_{baseline}"
                yield sitting.line(suite, self.case.record(), cell.variant, metric, ratio, flags=cell.flags)


def with_flags(results: list[CaseResult], audit: Audit) -> list[CaseResult]:
    """The results with the flags that an audit of their lines has added."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for line in audit.lines:
        if line.suite == SUITE:
            found.setdefault((str(line.case), line.variant), {}).update(dict.fromkeys(line.flags))
    return [
        replace(
            result,
            cells=tuple(
                replace(cell, flags=tuple(found.get((str(result.case.record()), cell.variant), cell.flags)))
                for cell in result.cells
            ),
        )
        for result in results
    ]


def run_suite(
    suite: AttentionSuite,
    *,
    gpu_name: str | None = None,
    clock: Clock | None = None,
    now: Callable[[], float] = time.monotonic,
) -> Iterator[CaseResult]:
    """Measure case by case. With `budget_seconds` it stops before a case that would not end in time, judged by the
    longest so far; what is then missing was left out. `gpu_name` finds the physical limit."""
    clock = clock or clock_for(suite.device)
    gpu = find_gpu(gpu_name) if suite.dtype != "float32" else None  # the peaks are those of 16-bit types
    functions = {name: attention_variant(name, suite.fa3_library) for name in suite.variants}
    begin, longest = now(), 0.0
    for case in suite.cases():
        started = now()
        if suite.budget_seconds is not None and started + longest - begin >= suite.budget_seconds:
            return
        yield CaseResult(case, _measure(case, functions, suite, clock, limit := case.work().limit_ms(gpu)), limit)
        longest = max(longest, now() - started)


def _measure(
    case: AttentionCase,
    functions: Mapping[str, Attention],
    suite: AttentionSuite,
    clock: Clock,
    limit_ms: float | None,
) -> tuple[Cell, ...]:
    q, k, v, d_out = _inputs(case, suite)
    if complaint := complaint_of_inputs(q=q, k=k, v=v, d_out=d_out):
        return tuple(Cell(name, None, (TRIVIAL_INPUT,), complaint) for name in functions)
    judge = Judge(q, k, v, d_out, case.mask == "causal")  # the same right answer for every variant
    cells: dict[str, Cell] = {}
    calls: dict[str, Callable[[], object]] = {}
    for name, function in functions.items():
        call, trial = _prepare(case, function, q, k, v, d_out)
        if trial.result is None:
            cells[name] = Cell(name, None, (trial.flag or FAILED,), trial.reason)
            continue
        names = ("out",) if case.direction == "forward" else ("dq", "dk", "dv")
        complaint = judge.complaint(**dict(zip(names, trial.result, strict=True)))
        if complaint:
            cells[name] = Cell(name, None, (WRONG_RESULT,), complaint)
        else:
            calls[name] = call
    del judge
    if calls:
        for name, timing in compare(calls, clock, baseline=suite.baseline, plan=suite.timing).items():
            reasons = {}
            if impossible(timing.time_ms.low, limit_ms):
                reasons[FASTER_THAN_LIMIT] = f"{timing.time_ms.low:.4g} ms, faster than the limit of {limit_ms:.4g} ms"
            if timing.disagrees:
                reasons[TIMER_DISAGREES] = (
                    f"{timing.time_ms.median:.4g} ms, but {timing.wall_ms:.4g} ms a call by the host's clock"
                )
            cells[name] = Cell(name, timing, tuple(reasons), "; ".join(reasons.values()))
    return tuple(cells[name] for name in functions)


def _inputs(case: AttentionCase, suite: AttentionSuite) -> list[torch.Tensor]:
    """q, k, v, d_out: standard normal, the same for every variant and for both directions of a shape."""
    generator = torch.Generator(suite.device).manual_seed(suite.seed)
    shape = (case.batch, case.seq, case.heads, case.head_dim)
    dtype = getattr(torch, case.dtype)
    return [torch.randn(shape, generator=generator, device=suite.device, dtype=dtype) for _ in range(4)]


def _prepare(
    case: AttentionCase,
    function: Attention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    d_out: torch.Tensor,
) -> tuple[Callable[[], tuple[torch.Tensor, ...]], Trial]:
    """The call to time and what came of it once. A backward call is the gradients alone: the graph is kept."""
    causal = case.mask == "causal"
    if case.direction == "forward":

        def call() -> tuple[torch.Tensor, ...]:
            with torch.no_grad():
                return (function(q, k, v, causal),)

        return call, attempt(call)
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    forward = attempt(lambda: (function(leaves[0], leaves[1], leaves[2], causal),))
    if forward.result is None:
        return lambda: (), forward
    out = forward.result[0]

    def gradients() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, leaves, d_out, retain_graph=True)

    return gradients, attempt(gradients)
