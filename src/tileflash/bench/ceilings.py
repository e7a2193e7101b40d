"""What this very GPU reaches at best, measured at the start of a sitting: a large matrix product, and a copy. Published peaks are what no
kernel can beat; these are what is there to be had, with this board's power limit and temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

import torch

from tileflash.bench.gpu_watch import SUITE
from tileflash.bench.ledger import Line
from tileflash.bench.sitting import Sitting
from tileflash.bench.statistic import summarize
from tileflash.bench.timing import Clock

MATMUL, COPY = "matmul_tflops", "copy_gb_per_s"
_ROUNDS, _CALLS = 3, 5


def ceiling_lines(
    device: str, clock: Clock, sitting: Sitting, suite: str, size: int = 8192, copy_bytes: int = 2**30
) -> Iterator[Line]:
    """Ledger lines of the suite `device`: bf16 TFLOP/s of a product of two random `size` x `size` matrices, and GB/s (read and written) of
    a copy of `copy_bytes`."""
    product = summarize([2.0 * size**3 / ms / 1e9 for ms in _product_ms(device, clock, size)])
    yield sitting.line(SUITE, {"suite": suite, "size": size}, "gpu", MATMUL, product)
    copy = summarize([2.0 * copy_bytes / ms / 1e6 for ms in _copy_ms(device, clock, copy_bytes)])
    yield sitting.line(SUITE, {"suite": suite, "bytes": copy_bytes}, "gpu", COPY, copy)
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()  # whoever measures memory next starts from nothing


def _product_ms(device: str, clock: Clock, size: int) -> list[float]:
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return _times(lambda: a @ b, clock)


def _copy_ms(device: str, clock: Clock, copy_bytes: int) -> list[float]:
    source = torch.empty(copy_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return _times(lambda: target.copy_(source), clock)


def _times(call: Callable[[], object], clock: Clock) -> list[float]:
    clock.measure(call, 3)
    return [median(clock.measure(call, _CALLS)) for _ in range(_ROUNDS)]
