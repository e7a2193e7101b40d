"""Options that the benchmarks' commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

Device: TypeAlias = Annotated[str, typer.Option(help="cuda, cuda:1, cpu.")]
Dtype: TypeAlias = Annotated[str, typer.Option(help="bfloat16, float16 or float32.")]
Rounds: TypeAlias = Annotated[int, typer.Option(help="How often each variant has its turn.")]
TargetMs: TypeAlias = Annotated[float, typer.Option(help="Calls of this many ms a variant and round.")]
PauseMs: TypeAlias = Annotated[float, typer.Option(help="Pause before each turn.")]
Variants: TypeAlias = Annotated[str, typer.Option(help="As for `bench attention`.")]
Output: TypeAlias = Annotated[Path | None, typer.Option(help="Ledger to append to (JSON lines).")]
BudgetSeconds: TypeAlias = Annotated[float | None, typer.Option(help="Stop in time; says what was left out.")]
Fa3Library: TypeAlias = Annotated[
    Path | None, typer.Option(help="File of FlashAttention 3's compiled operators, where no package brings them.")
]
LargestSpread: TypeAlias = Annotated[
    float,
    typer.Option(help="Flag figures whose highest and lowest are further apart than this share of the median."),
]
