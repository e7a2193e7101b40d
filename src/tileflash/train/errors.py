"""How a run can end early, other than by bad input (ValueError): each with a message that says what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from tileflash.train.config import TrainConfig


class TrainingStoppedError(RuntimeError):
    """The run cannot go on: too many skipped steps, weights that are not finite."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none could be read."""


class TrainingOutOfMemoryError(RuntimeError):
    """The device's (or the host's) memory did not suffice."""


class GraphCaptureError(RuntimeError):
    """The step could not be captured in a CUDA graph, for a reason other than memory; eager steps may well be possible."""


class RankLostError(RuntimeError):
    """Another rank has ended or does not answer, so this one cannot go on."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` means that memory ran out, on a GPU or on the CPU (for which PyTorch has no class of its own)."""
    import torch

    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)):
        return True
    # The second is CUDA's own, of what does not pass through PyTorch's allocator: a graph's instantiation, say.
    if isinstance(error, RuntimeError) and any(
        told in str(error) for told in ("can't allocate memory", "CUDA error: out of memory")
    ):
        return True
    # A CUDA graph whose capture ran out of memory fails once more when the capture is ended, and that error comes out.
    return error.__context__ is not None and is_out_of_memory(error.__context__)


def out_of_memory_message(error: BaseException, config: TrainConfig, device: torch.device) -> str:
    """What was asked for, what there is, and what to lower, with the numbers."""
    import torch

    asked = re.search(r"[Tt]ried to allocate ([\d.]+ ?\w+)", str(error))
    lines = [f"out of memory on {device}" + (f": {asked.group(1)} more were asked for" if asked else "")]
    if device.type == "cuda" and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info(device)
        used = torch.cuda.memory_allocated(device)
        lines[0] += f"; this run holds {used / 2**30:.2f} of {total / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free"
    return "\n  ".join([f"{lines[0]}. What would need less:", *_remedies(config)])


def _remedies(config: TrainConfig) -> list[str]:
    remedies = []
    if not config.flash:
        remedies.append("--flash (no matrix of sequence length x sequence length is held)")
    smaller = next((size for size in range(config.batch_size // 2, 0, -1) if config.batch_size % size == 0), None)
    if smaller is not None:
        remedies.append(
            f"--batch-size {smaller} --total-batch-size {config.step_tokens} (now {config.batch_size}: the same step "
            f"in {config.step_samples // smaller} parts)"
        )
    if config.sequence_length > 1:
        remedies.append(f"a shorter --sequence-length (now {config.sequence_length})")
    if config.dtype == "float32":
        remedies.append("--dtype bfloat16")
    return [*remedies, "a smaller model"]


def causes_of(error: BaseException) -> Iterator[tuple[int | None, BaseException]]:
    """`error` and all that led to it, each with the rank that it is of; torch.distributed.checkpoint and torch.save wrap
    errors in their own."""
    pending: list[tuple[int | None, BaseException | None]] = [(None, error)]
    seen: set[int] = set()
    while pending:
        rank, current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        yield rank, current
        failures: Iterable[tuple[int, Any]] = getattr(current, "failures", {}).items()  # (error, its traceback)
        pending += [(rank, current.__cause__), (rank, current.__context__)]
        pending += [(number, failure[0]) for number, failure in failures]
