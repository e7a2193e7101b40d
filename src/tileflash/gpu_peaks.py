"""Published peaks of GPUs: what a roofline is drawn with. Imports nothing, so that every room may use it."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """Published peaks of a GPU: dense bf16/fp16 tensor throughput (fp32 accumulation) and memory bandwidth."""

    name: str
    bf16_tflops: float
    memory_gb_per_s: float


# (words that the name must hold, words that it must not hold, peaks); the first that fits counts. From NVIDIA's data
# sheets, without sparsity. Where a name covers several memory sizes the highest bandwidth stands: a limit that is too
# low would call honest figures impossible.
_GPUS: tuple[tuple[frozenset[str], frozenset[str], Gpu], ...] = tuple(
    (frozenset(words.split()), frozenset(without.split()), Gpu(name, tflops, bandwidth))
    for words, without, name, tflops, bandwidth in (
        ("B200", "", "B200", 2250.0, 8000.0),
        ("H200 NVL", "", "H200 NVL", 835.5, 4800.0),
        ("H200", "", "H200", 989.4, 4800.0),
        ("H100 PCIE", "", "H100 PCIe", 756.5, 2039.0),
        ("H100 NVL", "", "H100 NVL", 835.5, 3938.0),
        ("H100", "", "H100", 989.4, 3352.0),
        ("A100", "", "A100", 312.0, 2039.0),
        ("A10G", "", "A10G", 70.0, 600.0),
        ("L4", "", "L4", 121.0, 300.0),
        ("RTX 4090", "D LAPTOP", "RTX 4090", 165.2, 1008.0),
    )
)


def find_gpu(name: str | None) -> Gpu | None:
    """Peaks of the GPU that the driver calls `name`, matched by whole words ("GH200" is no H200, "L40" no L4).

    None for a GPU that is not in the table, and for a part of one (MIG): no limit is better than a wrong one.
    """
    words = frozenset(re.split(r"[^A-Z0-9]+", (name or "").upper()))
    if "MIG" in words:
        return None
    return next((gpu for needed, without, gpu in _GPUS if needed <= words and not without & words), None)
