"""`tileflash bench lengths`, `scaling` and `versions`: attention at one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from tileflash.cli.bench_console import BenchSession, progress_line, table_console
from tileflash.cli.bench_options import (
    BudgetSeconds,
    Device,
    Dtype,
    Fa3Library,
    LargestSpread,
    Output,
    PauseMs,
    Rounds,
    TargetMs,
    Variants,
)
from tileflash.cli.comma_separated import numbers, words
from tileflash.cli.errors import friendly_errors

if TYPE_CHECKING:
    from pathlib import Path

    from tileflash.bench.lengths import LengthsSuite, Name

Lengths = Annotated[str, typer.Option(help="Sequence lengths.")]
Batch = Annotated[int, typer.Option(help="Batch.")]
Heads = Annotated[int, typer.Option(help="Heads.")]
HeadDim = Annotated[int, typer.Option(help="Head dimension.")]
Mask = Annotated[str, typer.Option(help="full or causal.")]
Direction = Annotated[str, typer.Option(help="forward, backward or both.")]


def _command(
    name: Name, text: str, *, lengths: str, variants: str, batch: int, direction: str = "forward"
) -> Callable[..., None]:
    """The command of a suite: all three have the same options and differ in their defaults. `text` is its help."""
    default_lengths, default_variants, default_batch, default_direction = lengths, variants, batch, direction

    @friendly_errors
    def run(
        lengths: Lengths = default_lengths,
        variants: Variants = default_variants,
        batch: Batch = default_batch,
        heads: Heads = 32,
        head_dim: HeadDim = 64,
        mask: Mask = "causal",
        direction: Direction = default_direction,
        dtype: Dtype = "bfloat16",
        device: Device = "cuda",
        rounds: Rounds = 3,
        target_ms: TargetMs = 100.0,
        pause_ms: PauseMs = 20.0,
        budget_seconds: BudgetSeconds = None,
        output: Output = None,
        fa3_library: Fa3Library = None,
        largest_spread: LargestSpread = 0.2,
    ) -> None:
        from tileflash.bench.lengths import LengthsSuite
        from tileflash.bench.timing import TimingPlan

        if name == "scaling" and direction != "forward":
            raise ValueError(f"`--direction` was {direction!r}; the table of time a token is of forward")
        suite = LengthsSuite(
            name, numbers("--lengths", lengths), words(variants), batch, heads, head_dim, mask,
            words(direction),  # type: ignore[arg-type]  # the suite checks the words
            dtype, device, budget_seconds, TimingPlan(rounds=rounds, target_ms=target_ms, pause_ms=pause_ms), fa3_library,
        )  # fmt: skip
        raise typer.Exit(_measure(suite, output, largest_spread))

    run.__doc__ = text
    return run


lengths = _command(
    "lengths",
    """Time of attention by length at one batch, beside the standard one: the table of batch 8, 32 heads of 64.

    Example: tileflash bench lengths --output benchmarks/results/lengths.jsonl
    On a CPU: tileflash bench lengths --device cpu --lengths 64,128 --batch 1 --heads 2 --variants math,tileflash-auto
    """,
    lengths="512,1024,2048,4096,8192",
    variants="math,fa2,fa3,fa4,cudnn,tileflash-auto",
    batch=8,
)
scaling = _command(
    "scaling",
    """Time a token and memory a token by length: what grows with the length and what does not.

    Example: tileflash bench scaling --output benchmarks/results/scaling.jsonl
    On a CPU: tileflash bench scaling --device cpu --lengths 64,128 --heads 2
    """,
    lengths="512,1024,2048,4096,8192,16384",
    variants="math,tileflash-auto",
    batch=1,
)
versions = _command(
    "versions",
    """The standard attention, FlashAttention 1 (the tutorial's), 2, 3 and 4, cuDNN and tileflash: ms, TFLOP/s, memory; their features.

    Example: tileflash bench versions --fa3-library flash_attn_3.so --output benchmarks/results/versions.jsonl
    On a CPU: tileflash bench versions --device cpu --lengths 64 --batch 1 --heads 2
    """,
    lengths="4096",
    variants="math,tutorial-fa1,fa2,fa3,fa4,cudnn,tileflash-auto",
    batch=8,
    direction="forward,backward",
)


def _measure(suite: LengthsSuite, output: Path | None, largest_spread: float) -> int:
    from tileflash.bench.lengths import run_lengths
    from tileflash.bench.version_features import features_block

    session = BenchSession(suite.name, suite.device, output, largest_spread)
    told: list[str] = []
    measured = 0
    with session:
        for lines, reasons in run_lengths(suite, session.sitting, session.clock):
            session.add(lines)
            told += reasons
            progress_line(f"{suite.name}: S={suite.lengths[measured]}")
            measured += 1
    if measured < len(suite.lengths):
        progress_line(f"time is up: lengths {', '.join(map(str, suite.lengths[measured:]))} left out")
    console = table_console()
    session.show(console, suite.name)
    if suite.name == "versions":
        from tileflash.bench.table_words import words_for
        from tileflash.cli.bench_console import print_markdown

        print_markdown(console, features_block((), words_for("en")))
    for reason in dict.fromkeys(told):
        console.print(reason, markup=False)
    return session.end(console)
