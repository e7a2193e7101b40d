"""A run of every kernel at small shapes for NVIDIA's compute-sanitizer, which sees what no comparison of numbers does.

    compute-sanitizer --tool memcheck --error-exitcode 1 python3 tests/kernels/sanitized.py triton
    compute-sanitizer --tool racecheck --error-exitcode 1 python3 tests/kernels/sanitized.py hopper

Reads and writes outside of a tensor, and two threads that meet in shared memory without a barrier. Takes minutes, most of them
for compiling: run it without the sanitizer first, the compiled kernels stay. PyTorch hands out memory from a pool, in which a
read behind a tensor's end finds another tensor; PYTORCH_NO_CUDA_MEMORY_CACHING=1 gives each its own.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import tileflash
from tileflash.fuzz import Problem
from tileflash.fuzz.drawing import draw

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROWS: dict[str, Any] = {"sq": 150, "sk": 133, "batch": 1, "heads": 2}
PACKED: dict[str, Any] = {"lengths": ((70, 60), (0, 3), (5, 0), (40, 71)), "slack": 3}
PROBLEMS = {
    "triton": [
        Problem(**ROWS, d=64, dv=64, dtype=BF16, causal=True),
        Problem(**ROWS, d=72, dv=40, dtype=FP16, window=(9, 3), kv_heads=1),
        Problem(**ROWS, d=128, dv=128, dtype=BF16),
        Problem(**ROWS, d=256, dv=256, dtype=BF16, causal="top-left"),
        Problem(**ROWS, d=64, dv=64, dtype=FP32, causal=True),
        Problem(**ROWS, d=320, dv=320, dtype=BF16),
        Problem(**ROWS, d=64, dv=64, dtype=BF16, options=("bias", "alibi", "softcap", "sinks", "dropout"), causal=True),
        Problem(**ROWS, d=64, dv=64, dtype=BF16, options=("bias_queries", "documents")),
        Problem(**ROWS, d=64, dv=64, dtype=BF16, options=("bias_one", "prefix"), causal=True),
        Problem(**ROWS, d=128, dv=128, dtype=FP16, options=("mask", "alibi_batch"), poison="hidden-nan"),
        Problem(**PACKED, d=64, dv=64, dtype=BF16, causal=True, kv_heads=1),
        Problem(**PACKED, d=64, dv=64, dtype=BF16, options=("bias_heads", "documents", "dropout"), window=(30, 5)),
    ],
    "hopper": [
        Problem(**ROWS, d=64, dv=64, dtype=BF16, causal=True, kv_heads=1),
        Problem(**ROWS, d=80, dv=64, dtype=FP16, window=(9, 3)),
        Problem(**ROWS, d=128, dv=128, dtype=BF16, causal="top-left"),
        Problem(sq=700, sk=513, batch=1, d=128, dv=128, dtype=BF16),
        Problem(**ROWS, d=256, dv=256, dtype=BF16, causal=True),
        Problem(sq=300, sk=700, batch=1, d=256, dv=256, dtype=BF16),
    ],
}  # fmt: skip


def run(problem: Problem, backend: str) -> None:
    """Forward and backward once; the results are not looked at."""
    drawn = draw(problem, "cuda")
    function: Any = tileflash.attention if problem.lengths is None else tileflash.attention_varlen
    arguments = {**drawn.arguments, **drawn.tensors, "causal": problem.causal, "window": problem.window}
    out, lse = function(**arguments, backend=backend, return_lse=True)
    torch.autograd.grad((out, lse), list(drawn.tensors.values()), (drawn.d_out.to(out.dtype), torch.ones_like(lse)))


def main() -> None:
    names = sys.argv[1:]
    if not names or not set(names) <= set(PROBLEMS):
        sys.exit(f"usage: python3 tests/kernels/sanitized.py {'|'.join(PROBLEMS)} [...]")
    for name in names:
        for problem in PROBLEMS[name]:
            run(problem, name)
            torch.cuda.synchronize()
            print(f"{name}: {problem}", flush=True)


if __name__ == "__main__":
    main()
