"""Ring attention: keys and values go round, queries stay, and no rank ever holds the keys of more than two others.

Liu et al., "Ring Attention with Blockwise Transformers", 2023. Forward, each rank merges what its queries get from one part of
the keys after the other by their log-sum-exps. Backward, the keys go round once more with their gradients behind them; the kernels
take the log-sum-exp of the whole row, so that nothing is merged there, and nothing of a block is kept between the two.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tileflash.attention.backends.base import KernelBackend
from tileflash.attention.band import Band
from tileflash.attention.dispatch import BACKENDS, NoBackendError, first_that_serves, order_of
from tileflash.attention.ops import Kernels, kernels_of
from tileflash.attention.problem import AttentionProblem, compute_dtype
from tileflash.kernels.options import PLAIN, Options
from tileflash.parallel.blocks import Block, Part, blocks_between

_KEYS, _GRADIENTS = 0, 1  # tags of messages: both kinds are on their way at a time


class RingProblem(NamedTuple):
    """What all ranks of `group` compute together. `query_parts`, `key_parts`: of each rank, in their order.

    `problem` is that of the whole sequences; `document_ids`: int32 [B, positions of a part] of each rank's queries and keys, or None.
    """

    group: dist.ProcessGroup
    problem: AttentionProblem
    query_parts: tuple[Part, ...]
    key_parts: tuple[Part, ...]
    document_ids: tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]] | None
    backend: str

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def ranks(self) -> int:
        return len(self.key_parts)

    def owner(self, step: int) -> int:
        """Whose keys are here at a step."""
        return (self.rank - step) % self.ranks

    def blocks(self, owner: int) -> list[tuple[Block, Kernels, Options]]:
        """What this rank's queries see of the keys of `owner`, and the kernels for it."""
        found = []
        for block in blocks_between(self.problem.band, self.query_parts[self.rank], self.key_parts[owner]):
            options = PLAIN
            if self.document_ids is not None:
                of_queries, of_keys = (
                    ids[rank] for ids, rank in zip(self.document_ids, (self.rank, owner), strict=True)
                )
                # Kernels read them as they lie in memory.
                options = Options(
                    query_ids=of_queries[:, slice(*block.queries)].contiguous(),
                    key_ids=of_keys[:, slice(*block.keys)].contiguous(),
                )
            problem = dataclasses.replace(
                self.problem,
                query_length=block.queries[1] - block.queries[0],
                key_length=block.keys[1] - block.keys[0],
                band=Band(block.low, block.high),
            )
            found.append((block, kernels_for(problem, self.backend), options))
        return found


def kernels_for(problem: AttentionProblem, backend: str) -> Kernels:
    """The kernels of the first backend that serves; NoBackendError with all reasons where none does. A name under which kernels are
    registered without a backend (`tileflash.plan`) gives those."""
    if backend != "auto" and backend not in BACKENDS:
        return kernels_of(backend)
    deterministic = torch.are_deterministic_algorithms_enabled()  # the backends' own reasons ask for it
    return kernels_of(_name_for(problem, backend, deterministic))


@lru_cache(maxsize=4096)
def _name_for(problem: AttentionProblem, backend: str, deterministic: bool) -> str:
    order = order_of(backend)
    chosen = first_that_serves(problem, tuple(name for name in order if isinstance(BACKENDS[name], KernelBackend)))
    if chosen is not None:
        return chosen.name
    details = "\n".join(
        f"  {name}: {'; '.join(BACKENDS[name].reasons(problem)) or 'takes no log-sum-exp from outside'}"
        for name in order
    )
    raise NoBackendError(
        f"backend {backend!r} cannot serve a block of ring attention of {problem.describe()}:\n{details}"
    )


class RingAttention(torch.autograd.Function):
    """(q, k, v of this rank, RingProblem) -> (out [B, Sq, Hq, Dv], lse [B, Hq, Sq])."""

    @staticmethod
    def forward(
        context: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: RingProblem
    ) -> tuple[torch.Tensor, torch.Tensor]:
        compute = compute_dtype(q.dtype)
        out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=compute)
        lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=compute)
        here = _Keys(k, v)
        for step in range(ring.ranks):
            coming = _pass_on(here.both, ring.group, _KEYS) if step + 1 < ring.ranks else None
            for block, kernels, options in ring.blocks(ring.owner(step)):
                rows, columns = slice(*block.queries), slice(*block.keys)
                part, part_lse = kernels.forward(
                    q[:, rows],
                    here.k[:, columns],
                    here.v[:, columns],
                    ring.problem.scale,
                    block.low,
                    block.high,
                    options,
                )
                _merge(out[:, rows], lse[:, :, rows], part, part_lse)
            if coming is not None:
                here = here.replaced(coming.wait())
        result = out.to(q.dtype)
        context.save_for_backward(q, k, v, result, lse)
        context.ring = ring
        context.set_materialize_grads(False)
        return result, lse

    @staticmethod
    def backward(
        context: Any, d_out: torch.Tensor | None, d_lse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = context.saved_tensors
        ring: RingProblem = context.ring
        d_out = torch.zeros_like(out) if d_out is None else d_out
        compute = compute_dtype(q.dtype)
        d_q = torch.zeros_like(q, dtype=compute, memory_format=torch.contiguous_format)
        here, behind = _Keys(k, v), None
        for step in range(ring.ranks):
            coming = _pass_on(here.both, ring.group, _KEYS) if step + 1 < ring.ranks else None
            gradients = _Keys.zeros(k, v, compute)
            for block, kernels, options in ring.blocks(ring.owner(step)):
                rows, columns = slice(*block.queries), slice(*block.keys)
                part_q, part_k, part_v, _ = kernels.backward(
                    d_out[:, rows].contiguous(), None if d_lse is None else d_lse[:, :, rows].contiguous(),
                    q[:, rows], here.k[:, columns], here.v[:, columns], out[:, rows].contiguous(), lse[:, :, rows].contiguous(),
                    ring.problem.scale, block.low, block.high, options,
                )  # fmt: skip
                d_q[:, rows] += part_q
                gradients.k[:, columns] += part_k
                gradients.v[:, columns] += part_v
            if behind is not None:
                gradients.both.add_(behind.wait())  # what the ranks before this one found for the same keys
            behind = _pass_on(gradients.both, ring.group, _GRADIENTS)
            if coming is not None:
                here = here.replaced(coming.wait())
        assert behind is not None
        own = gradients.replaced(behind.wait())
        return d_q.to(q.dtype), own.k.to(k.dtype), own.v.to(v.dtype), None


class _Keys:
    """Keys and values as one piece of memory, `both`, for one message."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, both: torch.Tensor | None = None) -> None:
        self.both = torch.cat([k.reshape(-1), v.reshape(-1)]) if both is None else both
        self.k = self.both[: k.numel()].view(k.shape)
        self.v = self.both[k.numel() :].view(v.shape)

    @staticmethod
    def zeros(k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> _Keys:
        return _Keys(k, v, k.new_zeros(k.numel() + v.numel(), dtype=dtype))

    def replaced(self, both: torch.Tensor) -> _Keys:
        return _Keys(self.k, self.v, both)


class _Coming:
    """A tensor on its way from the rank before this one, while this rank's goes to the next."""

    def __init__(self, works: list[dist.Work], sent: torch.Tensor, received: torch.Tensor) -> None:
        self._works, self._sent, self._received = works, sent, received

    def wait(self) -> torch.Tensor:
        for work in self._works:
            work.wait()
        return self._received


def _pass_on(tensor: torch.Tensor, group: dist.ProcessGroup, tag: int) -> _Coming:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    received = torch.empty_like(tensor)
    if ranks == 1:
        return _Coming([], tensor, received.copy_(tensor))
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor, group=group, tag=tag, group_peer=(rank + 1) % ranks),
            dist.P2POp(dist.irecv, received, group=group, tag=tag, group_peer=(rank - 1) % ranks),
        ]
    )
    return _Coming(works, tensor, received)


def _merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Add to the rows `out` [B, S, H, D] and `lse` [B, H, S], in place, what they get from other keys."""
    both = torch.logaddexp(lse, part_lse)
    finite = both.masked_fill(both == -torch.inf, 0.0)  # rows that have seen no key yet: exp(-inf - 0) is 0

    def share(of: torch.Tensor) -> torch.Tensor:
        return (of - finite).exp().transpose(1, 2)[..., None]

    out.mul_(share(lse)).add_(part * share(part_lse))
    lse.copy_(both)
