"""Random attention problems against fp64: `tileflash fuzz`.

from tileflash.fuzz import Problem, examine

examine(Problem(options=("sinks",), sq=3, sk=5, causal=True), "triton", "cuda")  # what is wrong, [] for nothing
"""

from tileflash.fuzz.judge import Mismatch, examine
from tileflash.fuzz.problems import Problem

__all__ = ["Mismatch", "Problem", "examine"]
