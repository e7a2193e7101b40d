"""Compile attention kernels ahead: what a first call does, for all kinds of calls that are asked for, in processes side by side.

A compiled kernel stays in Triton's cache on disk, where every process finds it. Lengths, batch and head counts are no part of a kind:
one kernel serves them all.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

DTYPES = ("bfloat16", "float16", "float32")
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (100, 0)},
}
OWN_BACKENDS = ("hopper", "triton")  # those with kernels that are compiled here
_ROWS = 256  # of the problem that is run; any number would do


@dataclass(frozen=True)
class Kind:
    """One kind of call: what kernels are compiled for. `kv_group` query heads share a K/V head; `mask` is one of MASKS."""

    backend: str
    head_dim: int
    dtype: str
    mask: str
    kv_group: int

    def __str__(self) -> str:
        grouped = "" if self.kv_group == 1 else f", {self.kv_group} query heads a K/V head"
        return f"{self.backend}: head dimension {self.head_dim}, {self.dtype}, {self.mask}{grouped}"


@dataclass(frozen=True)
class Done:
    """What came of a kind: seconds of its first forward and backward pass, or why the backend does not serve it, or failed."""

    kind: Kind
    seconds: float
    refused: str = ""
    failure: str = ""


def make_kinds(
    head_dims: Sequence[int],
    dtypes: Sequence[str],
    masks: Sequence[str],
    kv_groups: Sequence[int],
    backends: Sequence[str],
) -> list[Kind]:
    """Every combination. ValueError names what is none."""
    for name, given, known in (
        ("dtypes", dtypes, DTYPES),
        ("masks", masks, MASKS),
        ("backends", backends, OWN_BACKENDS),
    ):
        if not given or not set(given) <= set(known):
            raise ValueError(f"`{name}` was {', '.join(given)!r}; it must be some of {', '.join(known)}")
    for name, numbers in (("head-dims", head_dims), ("kv-groups", kv_groups)):
        if not numbers or min(numbers) < 1:
            raise ValueError(f"`{name}` was {', '.join(map(str, numbers))!r}; it must be numbers of at least 1")
    chosen = product(backends, head_dims, dtypes, masks, kv_groups)
    return list(dict.fromkeys(Kind(*values) for values in chosen))


def kinds_of_model(name: str, dtypes: Sequence[str], backends: Sequence[str]) -> list[Kind]:
    """What training the preset `name` calls. ValueError for a name that is none."""
    from tileflash.models.presets import model_config

    config = model_config(name)
    group = config.n_head // getattr(config, "n_kv_head", config.n_head)
    return make_kinds([config.head_dim], dtypes, ["causal"], [group], backends)


def compile_kind(kind: Kind, device: str) -> Done:
    """Run the kind once, forward and backward, on a small problem."""
    import torch

    from tileflash.attention.api import attention
    from tileflash.attention.dispatch import NoBackendError

    dtype = getattr(torch, kind.dtype)
    q = torch.zeros(1, _ROWS, kind.kv_group, kind.head_dim, dtype=dtype, device=device, requires_grad=True)
    k, v = (torch.zeros(1, _ROWS, 1, kind.head_dim, dtype=dtype, device=device, requires_grad=True) for _ in range(2))
    started = time.perf_counter()
    try:
        out = attention(q, k, v, backend=kind.backend, **MASKS[kind.mask])
    except NoBackendError as error:
        return Done(kind, 0.0, str(error).splitlines()[-1].split(": ", 1)[-1])
    torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
    if out.is_cuda:
        torch.cuda.synchronize(out.device)
    return Done(kind, time.perf_counter() - started)


def warm_up(
    kinds: Sequence[Kind], device: str, jobs: int, compile_one: Callable[[Kind, str], Done] = compile_kind
) -> Iterator[Done]:
    """Compile all kinds, at most `jobs` at a time, each as it comes; one job stays in this process.

    A kind that fails says so and the others go on; one that takes its process down takes those that had not come with it.
    """
    if jobs == 1:
        for kind in kinds:
            yield _outcome(kind, partial(compile_one, kind, device))
        return
    # Spawned: a process that has a CUDA context must not be forked.
    with ProcessPoolExecutor(min(jobs, len(kinds)), mp_context=multiprocessing.get_context("spawn")) as pool:
        pending = {pool.submit(compile_one, kind, device): kind for kind in kinds}
        try:
            for future in as_completed(pending):
                yield _outcome(pending[future], future.result)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _outcome(kind: Kind, compiled: Callable[[], Done]) -> Done:
    try:
        return compiled()
    except Exception as error:  # a compiler's errors have no common base
        return Done(kind, 0.0, failure=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
