"""One whole model in a process of its own: `python -m tileflash.bench.model_worker REQUEST` measures forward and backward passes and prints
one line of JSON. So neither its memory nor its compiled kernels are another's.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tileflash.bench.gpu_watch import energy_counter
from tileflash.bench.model_shapes import SHAPES
from tileflash.models import AttentionFunction, unfused_attention

BASELINE, FLASH = "baseline", "flash"
_LONG_ENOUGH_MS = 1000.0  # ten looks of the energy counter


@dataclass(frozen=True)
class Request:
    """What to measure: `steps` passes after `warmup` that do not count; parameters and gradients are of `dtype`, there is no optimizer."""

    model: str
    batch: int
    seq: int
    scheme: str
    dtype: str = "bfloat16"
    device: str = "cuda"
    warmup: int = 2
    steps: int = 5
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """Milliseconds of each step and the highest use of GPU memory (None on a CPU), or why there are none. `energy_j`: of the counted
    steps together, None where the GPU does not count it or they were too short for its counter."""

    step_ms: tuple[float, ...] = ()
    peak_bytes: int | None = None
    energy_j: float | None = None
    out_of_memory: bool = False
    reason: str = ""


def scheme_attention(scheme: str) -> AttentionFunction:
    """The attention of `baseline` (a chain of small operators) or `flash` (tileflash.attention)."""
    if scheme == BASELINE:
        return unfused_attention
    from tileflash.attention.api import attention

    return attention


def measure(request: Request) -> Answer:
    """Build the model, and time its steps one by one."""
    import torch.nn.functional as F

    from tileflash.models import empty_model, initialize_weights

    device, config = torch.device(request.device), SHAPES[request.model]
    on_gpu = device.type == "cuda"
    try:
        model = empty_model(config, scheme_attention(request.scheme), device, getattr(torch, request.dtype))
        initialize_weights(model, request.seed)
        generator = torch.Generator(device).manual_seed(request.seed)
        tokens = torch.randint(config.vocab_size, (request.batch, request.seq + 1), generator=generator, device=device)
        times = []
        energy = energy_counter(request.device)
        before_j = 0.0
        for step in range(request.warmup + request.steps):
            if energy is not None and step == request.warmup:
                before_j = energy()
            model.zero_grad(set_to_none=True)
            _wait(device)
            started = time.perf_counter()
            logits = model(tokens[:, :-1])
            F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
            _wait(device)
            times.append((time.perf_counter() - started) * 1e3)
            del logits
    except torch.OutOfMemoryError as error:
        return Answer(out_of_memory=True, reason=str(error).split("\n")[0][:300])
    counted_ms = times[request.warmup :]
    return Answer(
        tuple(counted_ms),
        torch.cuda.max_memory_allocated(device) if on_gpu else None,
        energy() - before_j if energy is not None and sum(counted_ms) >= _LONG_ENOUGH_MS else None,
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def read_answer(printed: str) -> Answer:
    """The answer among what the process printed; ValueError where there is none."""
    for line in reversed(printed.splitlines()):
        if line.startswith('{"step_ms"'):
            record: dict[str, Any] = json.loads(line)
            return Answer(**{**record, "step_ms": tuple(record["step_ms"])})
    raise ValueError("the process printed no answer")


if __name__ == "__main__":
    print(json.dumps(asdict(measure(Request(**json.loads(sys.argv[1]))))))
