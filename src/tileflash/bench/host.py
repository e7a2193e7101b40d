"""Suite `host`: microseconds that one attention call keeps the host, which at small shapes is what limits a model.

On a GPU a call returns when its kernels are queued; the device is waited for between rounds, not between calls, so the figure is the
host's share, the launch included. On a CPU a call returns when it is done, and the figure is all of it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from tileflash.bench.attention_variants import Attention, attempt, attention_variant, held_variant
from tileflash.bench.ledger import CaseValue, Line
from tileflash.bench.sitting import Sitting
from tileflash.bench.statistic import Statistic, summarize

SUITE = "host"
MODES = ("forward", "forward with graph", "forward and backward")


@dataclass(frozen=True)
class HostSuite:
    """The problem and how often: `calls` in a row make one measurement, `rounds` of them, variants in random order in each. ValueError
    names what does not fit."""

    variants: tuple[str, ...] = ("tileflash-auto", "tileflash-triton", "fa2", "cudnn", "math")
    batch: int = 1
    seq: int = 128
    heads: int = 4
    head_dim: int = 64
    mask: str = "causal"
    dtype: str = "bfloat16"
    device: str = "cuda"
    calls: int = 200
    rounds: int = 9
    seed: int = 0
    fa3_library: Path | None = None

    def __post_init__(self) -> None:
        if not self.variants or len(set(self.variants)) < len(self.variants):
            raise ValueError(f"`variants` was {', '.join(self.variants)!r}; it must be at least one, each once")
        for variant in self.variants:
            attention_variant(variant)
        for name in ("batch", "seq", "heads", "head_dim", "calls", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` was {getattr(self, name)}; it must be at least 1")
        if self.mask not in ("full", "causal"):
            raise ValueError(f"`mask` was {self.mask!r}; it must be full or causal")
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"`dtype` was {self.dtype!r}; it must be bfloat16, float16 or float32")


@dataclass(frozen=True)
class HostCell:
    """Microseconds of one variant in one mode, or the flag and the reason why there are none."""

    variant: str
    mode: str
    time_us: Statistic | None
    flag: str | None = None
    reason: str = ""


def measure_host(suite: HostSuite, now: Callable[[], float] = time.perf_counter) -> list[HostCell]:
    """All variants in all modes; ratios between them are of one process and of rounds that alternate."""
    cells: dict[tuple[str, str], HostCell] = {}
    calls: dict[tuple[str, str], tuple[Callable[[], AbstractContextManager[object]], Callable[[], object]]] = {}
    for variant in suite.variants:
        hold, function = held_variant(variant, suite.fa3_library)
        for mode, call in _calls(suite, function).items():
            with hold():
                trial = attempt(lambda call=call: (call(),))  # type: ignore[misc]
            if trial.result is None:
                cells[variant, mode] = HostCell(variant, mode, None, trial.flag, trial.reason)
            else:
                calls[variant, mode] = hold, call
    for _ in range(3):  # what is made ready at a second or third call
        for hold, call in calls.values():
            with hold():
                call()
    times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    generator = random.Random(suite.seed)
    for _ in range(suite.rounds):
        order = list(calls)
        generator.shuffle(order)
        for key in order:
            hold, call = calls[key]
            wait_for(suite.device)
            with hold():
                started = now()
                for _ in range(suite.calls):
                    call()
                times[key].append((now() - started) / suite.calls * 1e6)
    wait_for(suite.device)
    for (variant, mode), values in times.items():
        cells[variant, mode] = HostCell(variant, mode, summarize(values))
    return [cells[variant, mode] for variant in suite.variants for mode in MODES]


def host_lines(suite: HostSuite, cells: list[HostCell], sitting: Sitting) -> Iterator[Line]:
    """Ledger lines: `host_us` of each variant and mode."""
    for cell in cells:
        case: Mapping[str, CaseValue] = {
            "mode": cell.mode, "batch": suite.batch, "seq": suite.seq, "heads": suite.heads, "head_dim": suite.head_dim,
            "mask": suite.mask, "dtype": suite.dtype, "calls": suite.calls,
        }  # fmt: skip
        flags = () if cell.flag is None else (cell.flag,)
        yield sitting.line(SUITE, case, cell.variant, "host_us", cell.time_us, flags=flags)


def _calls(suite: HostSuite, function: Attention) -> dict[str, Callable[[], object]]:
    generator = torch.Generator(suite.device).manual_seed(suite.seed)
    shape, dtype = (suite.batch, suite.seq, suite.heads, suite.head_dim), getattr(torch, suite.dtype)
    q, k, v, d_out = (torch.randn(shape, generator=generator, device=suite.device, dtype=dtype) for _ in range(4))
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    causal = suite.mask == "causal"

    def forward() -> object:
        with torch.no_grad():
            return function(q, k, v, causal)

    def with_graph() -> object:
        return function(leaves[0], leaves[1], leaves[2], causal)

    def both() -> object:
        return torch.autograd.grad(function(leaves[0], leaves[1], leaves[2], causal), leaves, d_out)

    return dict(zip(MODES, (forward, with_graph, both), strict=True))


def wait_for(device: str) -> None:
    """Until a GPU has done what is queued."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
