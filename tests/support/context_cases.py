"""Attention over several ranks beside that of the whole sequence: what each rank does, and what it is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import tileflash


@dataclass(frozen=True)
class Case:
    """One problem. `documents`: where the documents of each sample begin."""

    heads: int = 2
    key_heads: int = 2
    length: int = 32
    key_length: int = 32
    options: dict[str, Any] = field(default_factory=dict)
    documents: tuple[tuple[int, ...], ...] = ()
    zigzag: bool = True
    dtype: torch.dtype = torch.float32
    backend: str = "tiled"
    sizes: tuple[int, ...] = (2, 4)


CAUSAL = {"causal": True}
DOCUMENTS = ((0, 5, 21), (0, 17))
RING: dict[str, Case] = {
    "full": Case(),
    "causal": Case(options=CAUSAL),
    "causal, runs": Case(options=CAUSAL, zigzag=False),
    "causal, grouped heads": Case(heads=4, key_heads=1, options=CAUSAL),
    "causal, documents": Case(options=CAUSAL, documents=DOCUMENTS),
    "documents, grouped heads": Case(heads=4, options={}, documents=DOCUMENTS),
    "window": Case(options={"window": (3, 2)}),
    "causal window, documents": Case(options={"causal": True, "window": (9, None)}, documents=DOCUMENTS),
    "causal window, runs": Case(options={"causal": True, "window": (9, None)}, zigzag=False),
    "fewer queries, bottom-right": Case(length=16, options={"causal": "bottom-right"}),
    "fewer queries, top-left": Case(length=16, options={"causal": "top-left"}),
    # The first queries see no key.
    "fewer keys, bottom-right": Case(key_length=16, options={"causal": "bottom-right"}),
    "fewer keys, top-left, scale": Case(key_length=16, options={"causal": "top-left", "scale": 0.3}),
    "causal, float64": Case(options=CAUSAL, dtype=torch.float64),
    # In Triton's interpreter on the CPU, which is slow: the contract with the kernels that GPUs run.
    "causal, documents, triton": Case(heads=4, options=CAUSAL, documents=DOCUMENTS, backend="triton", sizes=(2,)),
}
ULYSSES: dict[str, Case] = {
    "full": Case(heads=4, key_heads=4),
    "causal, grouped heads": Case(heads=8, key_heads=4, options=CAUSAL),
    "causal, fewer key heads than ranks": Case(heads=8, key_heads=2, options=CAUSAL),
    "causal window, documents": Case(
        heads=4, key_heads=1, options={"causal": True, "window": (9, None)}, documents=DOCUMENTS
    ),
}


def inputs(case: Case) -> list[torch.Tensor]:
    """q, k, v and the gradients of out and of lse, whole; the same on all ranks."""
    generator = torch.Generator().manual_seed(3)
    rows, keys = (2, case.length, case.heads, 8), (2, case.key_length, case.key_heads, 8)
    shapes = [rows, keys, (*keys[:3], 4), (*rows[:3], 4), (2, case.heads, case.length)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype) for shape in shapes]


def document_ids(case: Case) -> torch.Tensor | None:
    """int32 [B, S]."""
    if not case.documents:
        return None
    ids = torch.zeros(2, case.length, dtype=torch.int32)
    for row, starts in zip(ids, case.documents, strict=True):
        for start in starts:
            row[start:] += 1
    return ids


def whole(case: Case) -> list[torch.Tensor]:
    """out, lse, d_q, d_k, d_v of one rank that has everything."""
    q, k, v, d_out, d_lse = inputs(case)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    results = tileflash.attention(
        *leaves, **case.options, document_ids=document_ids(case), return_lse=True, backend="reference"
    )
    return _finish(results, leaves, d_out, d_lse)


def work(rank: int, directory: Path) -> None:
    """All cases, on rings of 2 and of 4 ranks; what the ranks get, whole again, goes into files of the first."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    world = dist.get_world_size()
    for size in (2, 4):
        mesh = init_device_mesh("cpu", (world // size, size), mesh_dim_names=("other", "context"))["context"]
        for kind, cases in (("ring", RING), ("ulysses", ULYSSES)):
            for name, case in cases.items():
                results = _on_a_ring(case, mesh, kind) if size in case.sizes else None
                if rank == 0 and results is not None:
                    torch.save(results, directory / f"{kind}, {name}, {size}.pt")


def _on_a_ring(case: Case, mesh: Any, kind: str) -> list[torch.Tensor]:
    from tileflash.parallel.context import context_positions, ring_attention, ulysses_attention

    zigzag = kind == "ring" and case.zigzag
    rows, keys = (context_positions(length, mesh, zigzag=zigzag) for length in (case.length, case.key_length))
    q, k, v, d_out, d_lse = inputs(case)
    leaves = [tensor[:, at].requires_grad_() for tensor, at in ((q, rows), (k, keys), (v, keys))]
    ids = document_ids(case)
    options = {
        **case.options,
        "document_ids": None if ids is None else ids[:, rows],
        "return_lse": True,
        "backend": case.backend,
    }
    if kind == "ring":
        results = ring_attention(*leaves, mesh, **options, zigzag=case.zigzag)
    else:
        results = ulysses_attention(*leaves, mesh, **options)
    parts = _finish(results, leaves, d_out[:, rows], d_lse[:, :, rows])
    places = [(1, rows), (2, rows), (1, rows), (1, keys), (1, keys)]
    return [_together(part, *place, mesh) for part, place in zip(parts, places, strict=True)]


def _finish(results: Any, leaves: list[torch.Tensor], d_out: torch.Tensor, d_lse: torch.Tensor) -> list[torch.Tensor]:
    out, lse = results
    seen = lse != -torch.inf
    gradients = torch.autograd.grad([out, lse], leaves, [d_out, d_lse.where(seen, 0.0)])
    return [out.detach(), lse.detach(), *gradients]


def _together(part: torch.Tensor, dim: int, positions: torch.Tensor, mesh: Any) -> torch.Tensor:
    import torch.distributed as dist

    parts: list[Any] = [None] * mesh.size()
    dist.all_gather_object(parts, (part, positions), group=mesh.get_group())
    result = torch.empty_like(torch.cat([tensor for tensor, _ in parts], dim))
    for tensor, at in parts:
        result.index_copy_(dim, at, tensor)
    return result
