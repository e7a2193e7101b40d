"""Attention of a sequence that is cut among ranks: a ring of keys, or an exchange of the sequence for heads (Ulysses).

PyTorch's own context_parallel (torch.distributed.tensor.experimental) replaces scaled_dot_product_attention, which has no documents
and no window; the messages here are PyTorch's, the attention is tileflash's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tileflash.attention.api import attention as tileflash_attention
from tileflash.attention.api import to_autocast_dtype
from tileflash.attention.band import Band, Causal
from tileflash.attention.problem import Window, make_problem
from tileflash.parallel.blocks import Part, key_head_copies
from tileflash.parallel.ring import RingAttention, RingProblem


def context_positions(length: int, mesh: DeviceMesh, *, zigzag: bool) -> torch.Tensor:
    """int64 [length / ranks] on the CPU: the positions of a sequence of `length` that belong on this rank of `mesh` (one dimension).

    `zigzag`: the layout of `ring_attention` by default; False: that of `ulysses_attention`, runs of neighbours. ValueError where
    `length` is no multiple of the ranks, or with `zigzag` of twice their number.
    """
    return Part.of(length, mesh.get_local_rank(), mesh.size(), zigzag=zigzag).positions()


class Positions:
    """`context_positions` on a device, made once for each length: a copy to a GPU would make the host wait in every pass."""

    def __init__(self, mesh: DeviceMesh, *, zigzag: bool) -> None:
        self._mesh, self._zigzag = mesh, zigzag
        self._made: dict[tuple[int, torch.device], torch.Tensor] = {}

    def __call__(self, length: int, device: torch.device) -> torch.Tensor:
        """int64 [length / ranks]; ValueError as there."""
        found = self._made.get((length, device))
        if found is None:
            found = context_positions(length, self._mesh, zigzag=self._zigzag).to(device)
            self._made[length, device] = found
        return found


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mesh: DeviceMesh,
    *,
    causal: Causal = False,
    window: Window = (None, None),
    scale: float | None = None,
    document_ids: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    zigzag: bool = True,
    return_lse: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`tileflash.attention` of whole sequences of which each rank of `mesh` holds a part, differentiable once.

    Every rank calls it, forward and backward. Each keeps its queries while keys and values go round; a message is on its way while the
    part before it is computed. Memory is O(S / ranks). Blocks that the mask hides are not computed.

    Args:
        q: queries [B, Sq / ranks, Hq, D], fp16, bf16, fp32 or fp64: those at `context_positions(Sq, mesh, zigzag=zigzag)`.
        k, v: keys [B, Sk / ranks, Hkv, D] and values [B, Sk / ranks, Hkv, Dv] at the positions of the same rule; Hq a multiple of Hkv.
        mesh: of one dimension; its ranks hold the parts in their order.
        causal, window, scale: as in `tileflash.attention`, of the whole sequences.
        document_ids: int32 [B, S / ranks] of this rank's positions, or a pair of them, of queries and of keys: a query sees keys with its
            own number only, on whatever rank they are.
        zigzag: see `context_positions`; with a causal mask each rank then has the same work.
        return_lse: also return the log-sum-exp of each row, differentiable.
        backend: "auto", or a backend of tileflash's own kernels ("hopper", "triton", "tiled"): the others take no log-sum-exp.

    Returns:
        out [B, Sq / ranks, Hq, Dv] in q's dtype; with `return_lse` also lse [B, Hq, Sq / ranks] in fp32 (fp64 for fp64).

    Raises:
        ValueError: an argument is wrong, or no backend serves.
    """
    q, k, v = to_autocast_dtype(q, k, v)
    problem = make_problem(q, k, v, causal, window, scale, return_lse=True)
    group, ranks = mesh.get_group(), mesh.size()
    query_length, key_length = q.shape[1] * ranks, k.shape[1] * ranks
    ids = None
    features = problem.features
    if document_ids is not None:
        both = document_ids if isinstance(document_ids, tuple) else (document_ids, document_ids)
        _check_ids(both, q, k)
        of_queries = _from_all(both[0], group)
        ids = (of_queries, of_queries if both[1] is both[0] else _from_all(both[1], group))
        features = features | {"document ids"}
    ring = RingProblem(
        group,
        # Whether or not there is a backward now: blocks need the log-sum-exp, and the same kernels as with one.
        dataclasses.replace(
            problem,
            query_length=query_length,
            key_length=key_length,
            band=Band.of(causal, window, query_length, key_length),
            needs_grad=True,
            last_dim_contiguous=True,
            features=features,
        ),
        tuple(Part.of(query_length, rank, ranks, zigzag=zigzag) for rank in range(ranks)),
        tuple(Part.of(key_length, rank, ranks, zigzag=zigzag) for rank in range(ranks)),
        ids,
        backend,
    )
    out, lse = RingAttention.apply(q.contiguous(), k.contiguous(), v.contiguous(), ring)
    return (out, lse) if return_lse else out


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mesh: DeviceMesh,
    *,
    document_ids: torch.Tensor | None = None,
    return_lse: bool = False,
    attention: Callable[..., Any] = tileflash_attention,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of whole sequences of which each rank of `mesh` holds a run: every rank computes some heads of all of it.

    Jacobs et al., "DeepSpeed Ulysses", 2023. Each tensor is exchanged once, there and back; memory is O(S) for Hq / ranks heads.

    Args:
        q: queries [B, Sq / ranks, Hq, D]; rank r holds run r. Hq must be a multiple of the number of ranks.
        k, v: keys [B, Sk / ranks, Hkv, D] and values [B, Sk / ranks, Hkv, Dv]. Fewer heads than ranks are sent to several of them.
        document_ids: int32 [B, S / ranks], as in `ring_attention`.
        attention: what computes the whole sequence, called as `tileflash.attention`; `options` are for it.

    Returns:
        out [B, Sq / ranks, Hq, Dv]; with `return_lse` also lse [B, Hq, Sq / ranks].

    Raises:
        ValueError: the heads do not divide, or what `attention` raises.
    """
    repeats = key_head_copies(q.shape[2], k.shape[2], mesh.size())
    if repeats > 1:
        k, v = (tensor.repeat_interleave(repeats, dim=2) for tensor in (k, v))
    whole = [_exchange(tensor, mesh, 1, 2) for tensor in (q, k, v)]
    if document_ids is not None:
        options["document_ids"] = torch.cat(_from_all(document_ids, mesh.get_group()), dim=1)
    if not return_lse:
        return _exchange(attention(*whole, **options), mesh, 2, 1)
    out, lse = attention(*whole, return_lse=True, **options)
    return _exchange(out, mesh, 2, 1), _exchange(lse, mesh, 1, 2)


def _exchange(x: torch.Tensor, mesh: DeviceMesh, before: int, after: int) -> torch.Tensor:
    """`x`, of which this rank holds a part along dimension `before`, cut along `after` instead."""
    spread = DTensor.from_local(x, mesh, [Shard(before)], run_check=False)
    return spread.redistribute(placements=[Shard(after)]).to_local()


def _from_all(ids: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
    received = [torch.empty_like(ids, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, ids.contiguous(), group=group)
    return tuple(received)


def _check_ids(ids: tuple[torch.Tensor, ...], q: torch.Tensor, k: torch.Tensor) -> None:
    for name, one, of in (("queries", ids[0], q), ("keys", ids[1], k)):
        if not isinstance(one, torch.Tensor) or one.dtype != torch.int32 or one.shape != of.shape[:2]:
            got = f"{one.dtype} {list(one.shape)}" if isinstance(one, torch.Tensor) else type(one).__name__
            raise ValueError(
                f"document_ids of the {name} must be int32 {list(of.shape[:2])}, of this rank's positions, got {got}"
            )
