"""The judge of `tileflash fuzz`, as tests ask it: a backend's results on a problem with options, held against fp64."""

from __future__ import annotations

from dataclasses import replace

from tileflash.fuzz.drawing import Drawn, draw
from tileflash.fuzz.judge import examine
from tileflash.fuzz.problems import BIASES, OPTIONS, OTHERS, Problem

__all__ = ["BIASES", "OPTIONS", "OTHERS", "Drawn", "Problem", "check", "draw"]


def check(problem: Problem, backend: str, device: str, with_lse: bool = True) -> None:
    """Forward and backward of a backend against fp64: out, lse, and the gradients of every differentiable tensor."""
    if not with_lse:
        problem = replace(problem, with_lse=False, loss="out")
    wrong = examine(problem, backend, device)
    assert not wrong, "\n".join(f"{one} [{problem}]" for one in wrong)
