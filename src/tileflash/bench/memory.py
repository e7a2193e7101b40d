"""Suite `memory`: what attention holds in memory by sequence length: bytes counted by hand beside the peak that was measured.

Counted is what must be there: the S x S matrix where it is made, the output, the K and V that a decoder would keep. Measured is
the peak above the inputs on a GPU, in a fresh region of the allocator; the CPU has no such counter, and its cells are empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from tileflash.bench.attention_variants import Attention, attempt, attention_variant
from tileflash.bench.ledger import CaseValue, Line
from tileflash.bench.sitting import Sitting
from tileflash.bench.statistic import Statistic

SUITE = "memory"
Pass = Literal["forward", "forward and backward"]
PASSES: tuple[Pass, ...] = get_args(Pass)
_DTYPES = ("bfloat16", "float16", "float32")
_WITH_MATRIX = ("math", "reference", "tileflash-reference", "tileflash-sdpa-math")


@dataclass(frozen=True)
class MemorySuite:
    """Lengths, variants and the shape. The largest standard case is beyond any GPU: its cell says so, and the count stays."""

    lengths: tuple[int, ...] = (512, 2048, 8192, 32768)
    variants: tuple[str, ...] = ("math", "tileflash-auto", "fa2", "cudnn")
    batch: int = 8
    heads: int = 32
    head_dim: int = 64
    causal: bool = True
    dtype: str = "bfloat16"
    device: str = "cuda"
    fa3_library: Path | None = None

    def __post_init__(self) -> None:
        if not self.variants or len(set(self.variants)) < len(self.variants):
            raise ValueError(f"`variants` was {', '.join(self.variants)!r}; it must be at least one, each once")
        for variant in self.variants:
            attention_variant(variant)
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"`lengths` was {self.lengths}; each must be at least 1")
        for name in ("batch", "heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` was {getattr(self, name)}; it must be at least 1")
        if self.dtype not in _DTYPES:
            raise ValueError(f"`dtype` was {self.dtype!r}; it must be one of {', '.join(_DTYPES)}")


@dataclass(frozen=True)
class CountedBytes:
    """Bytes that must be there for one length: `matrix` is one [B, H, S, S] in the inputs' dtype, `key_value_cache` K and V, `out` the
    output, `gradients` those of q, k and v."""

    matrix: int
    key_value_cache: int
    out: int
    gradients: int

    def least(self, variant: str, which: Pass) -> int:
        """What a variant needs above its inputs: the output, gradients of the backward pass, and the matrix where it is made."""
        needed = self.out + (self.gradients if which != "forward" else 0)
        return needed + (self.matrix if variant in _WITH_MATRIX else 0)


def count_bytes(suite: MemorySuite, length: int) -> CountedBytes:
    """By hand, from the shape alone."""
    size = getattr(torch, suite.dtype).itemsize
    one = suite.batch * suite.heads * length * suite.head_dim * size
    return CountedBytes(
        matrix=suite.batch * suite.heads * length * length * size,
        key_value_cache=2 * one,
        out=one,
        gradients=3 * one,
    )


@dataclass(frozen=True)
class MemoryCell:
    """One length, variant and pass: the measured peak in bytes above the inputs, or the flag and reason why there is none."""

    length: int
    variant: str
    which: Pass
    counted: CountedBytes
    peak_bytes: int | None
    flag: str | None = None
    reason: str = ""

    @property
    def is_possible(self) -> bool:
        """A peak below what must be there says that the counter or the variant is broken."""
        return self.peak_bytes is None or self.peak_bytes >= self.counted.least(self.variant, self.which)


def measure_memory(suite: MemorySuite) -> Iterator[MemoryCell]:
    """All lengths, variants and passes, each as it comes. Every variant is called once before at the smallest length: what is allocated
    once and for ever (workspaces, compiled kernels) is not counted.

    Where nothing can be measured, only the smallest length is run, to learn which variants serve: the matrix of the standard lengths
    would fill the host's memory for nothing."""
    functions = {variant: attention_variant(variant, suite.fa3_library) for variant in suite.variants}
    for function in functions.values():
        attempt(lambda function=function: _run(suite, function, min(suite.lengths), "forward and backward"))  # type: ignore[misc]
    for length in suite.lengths:
        counted = count_bytes(suite, length)
        for variant, function in functions.items():
            for which in PASSES:
                peaks: list[int] = []

                def run(
                    function: Attention = function, length: int = length, which: Pass = which, peaks: list[int] = peaks
                ) -> tuple[torch.Tensor, ...]:
                    peaks.append(_run_counted(suite, function, length, which))
                    return ()

                trial = attempt(run)
                _release(suite.device)
                if trial.result is None:
                    yield MemoryCell(length, variant, which, counted, None, trial.flag, trial.reason)
                else:
                    peak = peaks[0] if _is_cuda(suite.device) else None
                    yield MemoryCell(length, variant, which, counted, peak)


def memory_lines(suite: MemorySuite, cells: list[MemoryCell], sitting: Sitting) -> Iterator[Line]:
    """Ledger lines: `peak_bytes` measured, with the least possible as `limit`; nothing is written for what was not measured."""
    for cell in cells:
        if cell.peak_bytes is None and cell.flag is None:
            continue
        case: Mapping[str, CaseValue] = {
            "pass": cell.which, "batch": suite.batch, "seq": cell.length, "heads": suite.heads, "head_dim": suite.head_dim,
            "mask": "causal" if suite.causal else "full", "dtype": suite.dtype,
        }  # fmt: skip
        peak = None if cell.peak_bytes is None else float(cell.peak_bytes)
        figure = None if peak is None else Statistic(peak, peak, peak, 1)
        flags = () if cell.flag is None else (cell.flag,)
        limit = float(cell.counted.least(cell.variant, cell.which))
        yield sitting.line(SUITE, case, cell.variant, "peak_bytes", figure, limit=limit, flags=flags)


def _run_counted(suite: MemorySuite, function: Attention, length: int, which: Pass) -> int:
    if not _is_cuda(suite.device):
        _run(suite, function, min(suite.lengths), which)
        return 0
    inputs = _inputs(suite, length)
    torch.cuda.synchronize(suite.device)
    torch.cuda.reset_peak_memory_stats(suite.device)
    before = torch.cuda.memory_allocated(suite.device)
    _call(suite, function, inputs, which)
    torch.cuda.synchronize(suite.device)
    return torch.cuda.max_memory_allocated(suite.device) - before


def _run(suite: MemorySuite, function: Attention, length: int, which: Pass) -> tuple[torch.Tensor, ...]:
    return _call(suite, function, _inputs(suite, length), which)


def _inputs(suite: MemorySuite, length: int) -> list[torch.Tensor]:
    shape = (suite.batch, length, suite.heads, suite.head_dim)
    dtype = getattr(torch, suite.dtype)
    return [torch.randn(shape, device=suite.device, dtype=dtype).requires_grad_(i < 3) for i in range(4)]


def _call(suite: MemorySuite, function: Attention, inputs: list[torch.Tensor], which: Pass) -> tuple[torch.Tensor, ...]:
    q, k, v, d_out = inputs
    if which == "forward":
        with torch.no_grad():
            return (function(q, k, v, suite.causal),)
    out = function(q, k, v, suite.causal)
    return (out, *torch.autograd.grad(out, (q, k, v), d_out))


def _is_cuda(device: str) -> bool:
    return torch.device(device).type == "cuda"


def _release(device: str) -> None:
    """Give freed memory back: after an out-of-memory the pieces that are left would fail the next variant."""
    if _is_cuda(device):
        torch.cuda.empty_cache()
