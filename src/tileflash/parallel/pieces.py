"""This rank's part of every weight: what the optimizer works on, and the way from and to the whole one.

Checkpoints hold whole tensors in the model's own order, so a run may go on in any other layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tileflash.parallel.model import ParallelModel
from tileflash.parallel.pipeline import layers_of_stages
from tileflash.parallel.ranks import Ranks
from tileflash.parallel.tensor import qkv_order


@dataclass(frozen=True)
class Piece:
    """A weight: `local` is this rank's part of it, a plain tensor that shares its memory.

    `shape`: that of the whole. `tensor_dim`: the dimension that tensor ranks cut, None: each has all of it.
    `order`: the rows of the whole in the order in which they lie here, None: their own. `copies`: how many ranks hold
    the same part.
    """

    name: str
    weight: nn.Parameter
    local: nn.Parameter
    shape: torch.Size
    tensor_dim: int | None
    order: torch.Tensor | None
    copies: int


class Pieces:
    """All weights of this rank's stages, in the model's order. `shapes` has those of the whole model, by name."""

    def __init__(self, model: ParallelModel, ranks: Ranks, shapes: dict[str, torch.Size]) -> None:
        """`shapes`: of each weight as it was before the cut."""
        self.shapes = shapes
        self._ranks, self._layout = ranks, ranks.layout
        self._layers = layers_of_stages(model.config.n_layer, self._layout)
        order = qkv_order(model.config, self._layout.tensor) if self._layout.tensor > 1 else None
        self._shared = "embedding.weight" if model.config.tied and self._layout.pipeline > 1 else None
        own: dict[str, Piece] = {}
        for stage in model.stages:
            for name, weight in stage.model.named_parameters():  # type: ignore[union-attr]
                tensor_dim = _tensor_dim(weight)
                copies = 1 if tensor_dim is not None else self._layout.tensor
                copies *= 1 if self._layout.shards_weights else self._layout.replicas
                copies *= 2 if name == self._shared else 1
                piece_order = order if ".attention.qkv." in name else None
                local = nn.Parameter(_local(weight.detach()))
                own[name] = Piece(name, weight, local, shapes[name], tensor_dim, piece_order, copies)
        self._own = {name: own[name] for name in shapes if name in own}

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._own.values())

    def get(self, name: str) -> Piece | None:
        """The piece of that weight, None: this rank's stages have none."""
        return self._own.get(name)

    def pipeline_rank(self, name: str) -> int:
        """The first pipeline rank that has the weight."""
        layout = self._layout
        if name.startswith(("norm.", "head.")):
            return layout.pipeline - 1
        if not name.startswith("layers."):
            return 0
        number = int(name.split(".")[1])
        stage = next(stage for stage, layers in enumerate(self._layers) if number in layers)
        return stage % layout.pipeline

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

    def gather(self, piece: Piece, local: torch.Tensor) -> torch.Tensor:
        """The whole of which `local` (a weight or a moment of it) is this rank's part. All ranks that have parts of it must call, one
        pipeline rank's at a time or all."""
        layout, part = self._layout, local
        if layout.shards_weights:
            part = _gathered(part, self._tensor_part_rows(piece), 0, self._ranks.replica_group, layout.replicas)
        if piece.tensor_dim is not None:
            part = _gathered(
                part, piece.shape[piece.tensor_dim], piece.tensor_dim, self._ranks.tensor_group, layout.tensor
            )
        if piece.order is not None:
            whole = torch.empty_like(part)
            whole[piece.order.to(part.device)] = part
            return whole
        return part

    def scatter(self, piece: Piece, whole: torch.Tensor, local: torch.Tensor) -> None:
        """Copy this rank's part of `whole` into `local`."""
        part = whole if piece.order is None else whole[piece.order.to(whole.device)]
        if piece.tensor_dim is not None:
            part = _cut(part, piece.tensor_dim, self._layout.tensor, self._ranks.tensor_rank)
        if self._layout.shards_weights:
            part = _cut(part, 0, self._layout.replicas, self._ranks.replica_rank)
        local.copy_(part)

    def _tensor_part_rows(self, piece: Piece) -> int:
        rows = piece.shape[0]
        if piece.tensor_dim != 0:
            return rows
        return _range(rows, self._layout.tensor, self._ranks.tensor_rank)[1]


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


def _cut(tensor: torch.Tensor, dim: int, parts: int, index: int) -> torch.Tensor:
    return tensor.narrow(dim, *_range(tensor.shape[dim], parts, index))


def _gathered(part: torch.Tensor, size: int, dim: int, group: dist.ProcessGroup, parts: int) -> torch.Tensor:
    """The parts of all ranks of `group` in their order along `dim`, `size` in all."""
    chunk = -(-size // parts)
    rows = part.detach().movedim(dim, 0)
    padded = rows.new_zeros(chunk, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    received = [torch.empty_like(padded) for _ in range(parts)]
    dist.all_gather(received, padded, group=group)
    return torch.cat(received)[:size].movedim(0, dim).contiguous()
