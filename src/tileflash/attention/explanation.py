"""What `explain` says: the choice, the reasons against every other backend, the work, its limit on this GPU, and what is launched."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tileflash.attention.dispatch import BACKENDS, FAMILIES, first_that_serves, order_of
from tileflash.attention.problem import AttentionProblem
from tileflash.gpu_peaks import Gpu, find_gpu

# Options of which the problem knows that they are there, and not which keys they make visible.
_CHANGES_WORK = {"document ids", "mask", "packed sequences", "prefix lengths"}


@dataclass(frozen=True)
class Explanation:
    """What would run for a problem, how and why; `print` it.

    `choice` is None when nothing serves; `reasons` has every backend's reasons, an empty list for those that could serve; `plan`
    describes what the chosen backend launches, a line a kernel.
    """

    problem: AttentionProblem
    asked_for: str
    choice: str | None
    reasons: dict[str, list[str]]
    plan: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"attention of {self.problem.describe()}"]
        lines.append(f"backend {self.asked_for!r} -> {self.choice or 'none can serve'}")
        width = max(map(len, self.reasons))
        for name in self.reasons:
            lines.append(f"  {name:<{width}}  {BACKENDS[name].summary}: {self._verdict(name)}")
        lines += [f"  {line}" for line in work_lines(self.problem)]
        if self.choice is not None:
            lines += [f"what {self.choice} launches", *(f"  {line}" for line in self.plan)]
        return "\n".join(lines)

    def _verdict(self, name: str) -> str:
        if name == self.choice:
            return "chosen"
        if self.reasons[name]:
            return "cannot: " + "; ".join(self.reasons[name])
        if name in FAMILIES.get(self.asked_for, (self.asked_for,)):
            why = BACKENDS[name].stands_back(self.problem) or f"stands after {self.choice} in the order"
            return f"could serve, {why}"
        memory = "" if BACKENDS[name].linear_memory else " (needs O(Sq * Sk) memory)"
        return "could serve, only when named" + memory


def explain_problem(problem: AttentionProblem, backend: str) -> Explanation:
    """What `choose` would do, every backend's reasons, and the plan of the one chosen."""
    order = order_of(backend, problem.second_derivative)
    reasons = {name: candidate.reasons(problem) for name, candidate in BACKENDS.items()}
    chosen = first_that_serves(problem, order)
    if chosen is None:
        return Explanation(problem, backend, None, reasons)
    return Explanation(problem, backend, chosen.name, reasons, chosen.plan(problem))


def backward_flops(problem: AttentionProblem) -> int:
    """FLOPs of the backward pass: five matrix products over the visible pairs (scores again, d_v, d_p, d_q, d_k)."""
    pairs = problem.band.visible_pairs(problem.query_length, problem.key_length)
    return 2 * problem.batch * problem.heads * pairs * (3 * problem.head_dim + 2 * problem.head_dim_v)


def backward_bytes(problem: AttentionProblem) -> int:
    """Bytes the backward pass must move at least: q, k, v, out, d_out, lse read once, d_q, d_k, d_v written once."""
    queries = problem.batch * problem.query_length * problem.heads
    keys = problem.batch * problem.key_length * problem.kv_heads
    return 2 * (queries + keys) * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize + 4 * queries


def work_lines(problem: AttentionProblem) -> list[str]:
    """FLOPs, bytes and the roofline time of each pass; where no roofline is known, why not."""
    if unknown := sorted(problem.features & _CHANGES_WORK):
        return [f"FLOPs, bytes and their limit are not known: they depend on the contents of {', '.join(unknown)}"]
    gpu, why_not = _gpu_of(problem)
    lines = [_work_line("forward", problem.flops, problem.bytes, gpu)]
    if problem.needs_grad:
        lines.append(_work_line("backward", backward_flops(problem), backward_bytes(problem), gpu))
    if gpu is None:
        return [*lines, f"no roofline is known for {why_not}"]
    return [*lines, f"roofline of {gpu.name}: {gpu.bf16_tflops:,g} TFLOP/s, {gpu.memory_gb_per_s:,g} GB/s"]


def _work_line(direction: str, flops: int, moved_bytes: int, gpu: Gpu | None) -> str:
    line = f"{direction}: {flops:,} FLOPs, at least {moved_bytes:,} bytes moved"
    if gpu is None:
        return line
    arithmetic_ms = flops / (gpu.bf16_tflops * 1e9)
    memory_ms = moved_bytes / (gpu.memory_gb_per_s * 1e6)
    limit = "arithmetic" if arithmetic_ms >= memory_ms else "memory"
    return f"{line}; not below {max(arithmetic_ms, memory_ms):.4g} ms on {gpu.name} ({limit} is the limit)"


def _gpu_of(problem: AttentionProblem) -> tuple[Gpu | None, str]:
    """The peaks to hold the problem against, or None and what they are not known for."""
    if problem.device.type != "cuda":
        return None, f"device {problem.device.type}"
    name = torch.cuda.get_device_name(problem.device)
    gpu = find_gpu(name)
    if gpu is None:
        return None, f"{name} (tileflash/gpu_peaks.py has the GPUs that are)"
    if problem.dtype.itemsize != 2:
        return None, f"{str(problem.dtype).removeprefix('torch.')} on {name} (the table holds peaks of 16-bit types)"
    return gpu, ""
