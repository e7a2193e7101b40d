"""The log line to the letter, peak memory against what is allocated, the environment's keys."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys

import torch

import tileflash
from tileflash.environment import environment
from tileflash.train import resident_memory
from tileflash.train.metrics import StepMetrics, peak_memory

METRICS = StepMetrics(
    step=3,
    train_loss=10.812345,
    learning_rate=1e-4,
    gradient_norm=1.5,
    step_ms=12.34,
    tokens_per_s=20745.4,
    peak_used_bytes=1914 * 2**20 + 5,
    peak_reserved_bytes=2010 * 2**20,
    skipped=0,
)


def test_the_log_line_is_the_designs() -> None:
    assert METRICS.line(10) == (
        "step 3/10 | train loss 10.812345 | lr 1.00e-04 | (12.34 ms | 20745 tok/s | peak used: 1914 MB | "
        "peak reserved: 2010 MB, DP=1, TP=1, SP=1, PP=1)"
    )


def test_the_event_has_the_contracts_keys() -> None:
    assert METRICS.event() == {
        "event": "step",
        "step": 3,
        "train_loss": 10.812345,
        "learning_rate": 1e-4,
        "gradient_norm": 1.5,
        "step_ms": 12.34,
        "tokens_per_s": 20745.4,
        "peak_used_bytes": 1914 * 2**20 + 5,
        "peak_reserved_bytes": 2010 * 2**20,
        "skipped": 0,
    }


def _grow(queue) -> None:
    before = peak_memory(torch.device("cpu"))[0]
    block = torch.ones(64 * 2**20 // 4)  # 64 MiB
    del block
    queue.put((before, *peak_memory(torch.device("cpu"))))


def test_peak_memory_of_the_cpu_is_the_highest_resident_size() -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=_grow, args=(queue,))
    child.start()
    before, used, reserved = queue.get(timeout=60)
    child.join()
    assert used == reserved
    assert 60 * 2**20 < used - before < 80 * 2**20


def test_a_large_parent_is_not_counted() -> None:
    """getrusage would: a child begins with its parent's maximum. A child of 10 MB must not tell of 300 MB."""
    ballast = torch.ones(300 * 2**20 // 4)
    # Without PyTorch, which is larger than what the test could then tell apart.
    code = f"import runpy; print(runpy.run_path({resident_memory.__file__!r})['peak_resident_bytes']())"
    found = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert ballast.sum() > 0
    assert found < 100 * 2**20


def test_environment_of_the_cpu() -> None:
    facts = environment("cpu")
    assert facts["torch"] == torch.__version__
    assert facts["gpu"] is None
    assert facts["tileflash"] == tileflash.__version__
    assert set(facts) == {
        "gpu", "driver", "cuda", "compute_capability", "gpu_memory_bytes", "torch", "triton", "python", "numpy", "cpu",
        "commit", "tileflash", "date",
    }  # fmt: skip
