"""Where the host's time of a call goes: each part of backend `triton`'s way timed alone, and the parts between them by difference."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

import tileflash
from tileflash.attention.ops import kernels_of
from tileflash.bench.host import HostSuite, wait_for
from tileflash.bench.ledger import CaseValue, Line
from tileflash.bench.sitting import Sitting
from tileflash.bench.statistic import Statistic, summarize
from tileflash.kernels.buffers import empty_contiguous, empty_out

SUITE, VARIANT = "host-steps", "tileflash-triton"

# What is timed, and what a call does in order: each step is a sum of timed parts (+) and of parts that are in them (-).
PARTS = (
    "outputs",
    "launch",
    "kernels",
    "call",
    "call with graph",
    "backward outputs",
    "backward launches",
    "backward kernels",
    "both",
)
STEPS: dict[str, tuple[tuple[int, str], ...]] = {
    "forward: arguments, choice of the backend": ((1, "call"), (-1, "kernels")),
    "forward: out and lse made": ((1, "outputs"),),
    "forward: the prepared launch looked up": ((1, "kernels"), (-1, "outputs"), (-1, "launch")),
    "forward: launch": ((1, "launch"),),
    "autograd's Function": ((1, "call with graph"), (-1, "call")),
    "autograd's engine, saved tensors": ((1, "both"), (-1, "call with graph"), (-1, "backward kernels")),
    "backward: d_q, d_k, d_v and delta made": ((1, "backward outputs"),),
    "backward: the prepared launches looked up": ((1, "backward kernels"), (-1, "backward outputs"), (-1, "backward launches")),
    "backward: launches": ((1, "backward launches"),),
    "all": ((1, "both"),),
}  # fmt: skip


def measure_host_steps(suite: HostSuite, now: Callable[[], float] = time.perf_counter) -> dict[str, Statistic]:
    """Microseconds of each of PARTS, in rounds of random order.

    ValueError: backend `triton` does not serve the problem here; the message has its reasons.
    """
    parts = _parts(suite)
    times: dict[str, list[float]] = {name: [] for name in PARTS}
    generator = random.Random(suite.seed)
    for _ in range(suite.rounds):
        for name in generator.sample(PARTS, len(PARTS)):
            part = parts[name]
            wait_for(suite.device)
            started = now()
            for _ in range(suite.calls):
                part()
            times[name].append((now() - started) / suite.calls * 1e6)
    wait_for(suite.device)
    return {name: summarize(values) for name, values in times.items()}


def steps_of(medians: Mapping[str, float]) -> dict[str, float]:
    """Microseconds of each of STEPS from the medians of PARTS; all but the last add up to the last."""
    return {step: sum(sign * medians[part] for sign, part in parts) for step, parts in STEPS.items()}


def host_steps_lines(suite: HostSuite, parts: Mapping[str, Statistic], sitting: Sitting) -> Iterator[Line]:
    """Ledger lines: `host_us` of each part."""
    for name, statistic in parts.items():
        case: Mapping[str, CaseValue] = {
            "part": name, "batch": suite.batch, "seq": suite.seq, "heads": suite.heads, "head_dim": suite.head_dim,
            "mask": suite.mask, "dtype": suite.dtype, "calls": suite.calls,
        }  # fmt: skip
        yield sitting.line(SUITE, case, VARIANT, "host_us", statistic)


def _parts(suite: HostSuite) -> dict[str, Callable[[], object]]:
    from tileflash.kernels.triton import attention as launches

    generator = torch.Generator(suite.device).manual_seed(suite.seed)
    shape, dtype = (suite.batch, suite.seq, suite.heads, suite.head_dim), getattr(torch, suite.dtype)
    q, k, v, d_out = (torch.randn(shape, generator=generator, device=suite.device, dtype=dtype) for _ in range(4))
    leaves: Sequence[torch.Tensor] = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    causal = suite.mask == "causal"

    def call(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return tileflash.attention(*inputs, causal=causal, backend="triton")

    def both() -> object:
        return torch.autograd.grad(call(leaves), leaves, d_out)

    both()  # a call that cannot be served is refused here, and kernels are compiled
    band, kernels = (suite.head_dim**-0.5, None, 0 if causal else None), kernels_of("triton")
    launches._forward_launches.clear()
    launches._backward_launches.clear()
    out, lse = kernels.forward(q, k, v, *band)
    gradients = kernels.backward(d_out, None, q, k, v, out, lse, *band)[:3]
    delta = torch.empty_like(lse)
    (forward_launch,) = launches._forward_launches.values()
    ((query_launch, *key_launches),) = launches._backward_launches.values()
    index = q.get_device()

    def without_graph() -> object:
        with torch.no_grad():
            return call((q, k, v))

    def backward_outputs() -> object:
        return empty_contiguous(q), empty_contiguous(k), empty_contiguous(v), torch.empty_like(lse)

    def backward_launches() -> None:
        query_launch((q, k, v, out, d_out, lse, delta, delta, gradients[0], delta), index, ((), ()))
        for launch in key_launches:
            launch((q, k, v, d_out, lse, delta, *gradients[1:]), index, ((), ()))

    parts = (
        lambda: empty_out(q, v),
        lambda: forward_launch((q, k, v, out, lse), index, ((), ())),
        lambda: kernels.forward(q, k, v, *band),
        without_graph,
        lambda: call(leaves),
        backward_outputs,
        backward_launches,
        lambda: kernels.backward(d_out, None, q, k, v, out, lse, *band),
        both,
    )
    for part in parts:
        for _ in range(3):  # what is made ready at a second or third call
            part()
    return dict(zip(PARTS, parts, strict=True))
