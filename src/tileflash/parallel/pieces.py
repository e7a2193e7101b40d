"""This rank's part of every weight: what the optimizer works on, and where in the whole one it lies.

Checkpoints hold tensors in the model's own order, each rank's boxes of them, so a run may go on in any other layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tileflash.parallel.box import Box
from tileflash.parallel.model import ParallelModel
from tileflash.parallel.ranks import Ranks
from tileflash.parallel.tensor import qkv_order

# Of ranks that have the same part each writes some rows to a checkpoint; at least so many numbers, or files of many ranks would
# consist of crumbs.
_LEAST_SHARE = 4096


@dataclass(frozen=True)
class Piece:
    """A weight: `local` is this rank's part of it, a plain tensor that shares its memory.

    `shape`: that of the whole. `tensor_dim`: the dimension that tensor ranks cut, None: each has all of it.
    `order`: the rows of the whole in the order in which they lie here, None: their own. `copies`: how many ranks hold
    the same part. `writer`: which of these is the first that writes some of it to a checkpoint.
    """

    name: str
    weight: nn.Parameter
    local: nn.Parameter
    shape: torch.Size
    tensor_dim: int | None
    order: torch.Tensor | None
    copies: int
    writer: int


class Pieces:
    """All weights of this rank's stages, in the model's order."""

    def __init__(self, model: ParallelModel, ranks: Ranks, shapes: dict[str, torch.Size]) -> None:
        """`shapes`: of each weight as it was before the cut."""
        self._ranks, self._layout = ranks, ranks.layout
        order = qkv_order(model.config, self._layout.tensor) if self._layout.tensor > 1 else None
        self._shared = "embedding.weight" if model.config.tied and self._layout.pipeline > 1 else None
        own: dict[str, Piece] = {}
        writers = _Writers()
        for stage in model.stages:
            for name, weight in stage.model.named_parameters():  # type: ignore[union-attr]
                tensor_dim = _tensor_dim(weight)
                holders = 1 if tensor_dim is not None else self._layout.tensor
                holders *= 1 if self._layout.shards_weights else self._layout.replicas
                copies = holders * (2 if name == self._shared else 1)
                piece_order = order if ".attention.qkv." in name else None
                local = nn.Parameter(_local(weight.detach()))
                writer = writers.next(local.numel(), holders)
                own[name] = Piece(name, weight, local, shapes[name], tensor_dim, piece_order, copies, writer)
        self._own = {name: own[name] for name in shapes if name in own}

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._own.values())

    def take_gradients(self) -> None:
        """Move the gradients from the model's weights to the parts that the optimizer works on."""
        for piece in self:
            gradient = piece.weight.grad
            if isinstance(gradient, DTensor):
                assert isinstance(piece.weight, DTensor)
                if gradient.placements != piece.weight.placements:  # a sum over ranks that is still to be made
                    gradient = gradient.redistribute(placements=piece.weight.placements)
            piece.local.grad = None if gradient is None else _local(gradient)
            piece.weight.grad = None
        self._add_shared()

    def _add_shared(self) -> None:
        """The first and the last stage each have a part of a tied embedding's gradient: both get the sum, with the same bits."""
        piece = None if self._shared is None else self._own.get(self._shared)
        if piece is not None:
            assert piece.local.grad is not None  # both stages always use it
            dist.all_reduce(piece.local.grad, group=self._ranks.tied_group)

    def gradient_norm_and_loss(self, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of the whole gradient, loss of all ranks), fp32, the same bits on all ranks.

        `loss`: this rank's tokens' part, the same on its tensor ranks and 0 on all pipeline ranks but one. One message for both; every
        number of the gradient counts once, however many ranks hold it.
        """
        sums = torch.zeros(2, dtype=torch.float64, device=loss.device)
        sums[0] = loss / self._layout.tensor
        for copies in {piece.copies for piece in self}:
            gradients = [p.local.grad for p in self if p.copies == copies and p.local.grad is not None]
            if gradients:
                norms = torch.stack(torch._foreach_norm(gradients))
                sums[1] += norms.double().square().sum() / copies
        dist.all_reduce(sums)
        return sums[1].sqrt().float(), sums[0].float()

    def boxes(self, piece: Piece, local: torch.Tensor) -> list[Box]:
        """Where `local`, this rank's part of a weight or of a moment of it, lies in the whole: views of it, one a run of rows."""
        return self._boxes(piece, local, 0, local.shape[0])

    def boxes_to_write(self, piece: Piece, local: torch.Tensor) -> list[Box]:
        """Those of `boxes` that this rank writes to a checkpoint: ranks that have the same part share its rows among them."""
        layout, ranks = self._layout, self._ranks
        if piece.name == self._shared and ranks.pipeline_rank > 0:
            return []
        copy = 0 if layout.shards_weights else ranks.replica_rank
        if piece.tensor_dim is None:
            copy = copy * layout.tensor + ranks.tensor_rank
        holders = piece.copies // 2 if piece.name == self._shared else piece.copies
        shares, share = _shares(local.numel(), holders), (copy - piece.writer) % holders
        return self._boxes(piece, local, *_range(local.shape[0], shares, share)) if share < shares else []

    def writes_once(self, piece: Piece) -> bool:
        """Whether this is the rank that writes what all ranks with that weight have alike, its step count."""
        ranks = self._ranks
        first = ranks.replica_rank == ranks.tensor_rank == 0
        return first and not (piece.name == self._shared and ranks.pipeline_rank > 0)

    def _boxes(self, piece: Piece, local: torch.Tensor, start: int, length: int) -> list[Box]:
        """Of the rows of `local` from `start` on, `length` of them."""
        layout, ranks = self._layout, self._ranks
        columns = [0] * (len(piece.shape) - 1)
        rows, first = piece.shape[0], 0  # this rank's, in the order in which tensor ranks cut them
        if piece.tensor_dim == 0:
            first, rows = _range(rows, layout.tensor, ranks.tensor_rank)
        elif piece.tensor_dim is not None:
            columns[piece.tensor_dim - 1] = _range(piece.shape[piece.tensor_dim], layout.tensor, ranks.tensor_rank)[0]
        if layout.shards_weights:
            first += _range(rows, layout.replicas, ranks.replica_rank)[0]
        boxes = []
        for at, row, size in _runs(piece.order, first + start, length):
            part = local.detach().narrow(0, at - first, size)
            boxes.append(Box(part, (row, *columns), piece.shape))
        return boxes


def _local(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _tensor_dim(weight: torch.Tensor) -> int | None:
    if not isinstance(weight, DTensor):
        return None
    names = weight.device_mesh.mesh_dim_names or ()
    if "tensor" not in names:
        return None
    placement = weight.placements[names.index("tensor")]
    return placement.dim if placement.is_shard() else None  # type: ignore[attr-defined]


def _range(size: int, parts: int, index: int) -> tuple[int, int]:
    """(start, length) of part `index`, by torch.chunk's rule: all of one length but the last ones."""
    chunk = -(-size // parts)
    start = min(index * chunk, size)
    return start, min(chunk, size - start)


def _shares(numbers: int, holders: int) -> int:
    """How many of the ranks that hold so many numbers alike write a part of them each."""
    return max(1, min(holders, numbers // _LEAST_SHARE))


class _Writers:
    """Deals out what several ranks hold alike, so that each writes about as much. All of them come to the same result."""

    def __init__(self) -> None:
        self._loads: dict[int, list[int]] = {}  # by the number of holders, for others hold other pieces alike

    def next(self, numbers: int, holders: int) -> int:
        """Which of the holders is the first that writes a share."""
        loads = self._loads.setdefault(holders, [0] * holders)
        first, shares = loads.index(min(loads)), _shares(numbers, holders)
        for share in range(shares):
            loads[(first + share) % holders] += numbers // shares
        return first


def _runs(order: torch.Tensor | None, start: int, length: int) -> list[tuple[int, int, int]]:
    """(place in `order`, row of the whole, rows) of each run of neighbours in `length` places of `order` from `start` on."""
    if length == 0:
        return []
    if order is None:
        return [(start, start, length)]
    rows = order[start : start + length]
    breaks = ((rows.diff() != 1).nonzero().flatten() + 1).tolist()
    return [(start + begin, int(rows[begin]), end - begin) for begin, end in itertools.pairwise([0, *breaks, length])]
