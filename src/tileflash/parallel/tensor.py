"""Tensor parallelism: a model's layers cut among ranks by PyTorch's parallelize_module, and what is theirs alone.

Columns of the first, rows of the second product of each sub-layer (Shoeybi et al., 2019). With sequence parallelism
(Korthikanti et al., 2022) what lies between them, residual stream and norms, is cut along the sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.func import functional_call

from tileflash.models import GPT2, Model, ModelConfig


def qkv_order(config: ModelConfig, tensor: int) -> torch.Tensor:
    """int64 [rows of qkv]: the row that belongs at each place so that equal cuts give each rank its heads' q, k and v."""
    head = config.head_dim
    counts = (config.n_head, config.n_kv_head, config.n_kv_head)
    blocks, start = [], 0
    for heads in counts:
        blocks.append(torch.arange(start, start + heads * head).view(tensor, -1))
        start += heads * head
    return torch.cat(blocks, dim=1).flatten()


@torch.no_grad()
def cut_model(model: Model, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Leave on each rank of `mesh` (one dimension) its part of `model`, in place.

    Its layers then take and give whole activations [B, S, C], or, with `sequence_parallel`, [B, S / ranks, C]. The
    weights must be the same on all ranks.
    """
    tensor = mesh.size()
    order = qkv_order(model.config, tensor).to(model.embedding.weight.device)
    between = Shard(1) if sequence_parallel else Replicate()
    for layer in model.layers:
        attention: Any = layer.attention
        for parameter in (attention.qkv.weight, attention.qkv.bias):
            if parameter is not None:
                parameter.copy_(parameter[order])
        attention.n_head //= tensor
        if not isinstance(model, GPT2):
            attention.n_kv_head //= tensor
        parallelize_module(layer, mesh, _layer_plan(model, between))
        if sequence_parallel:
            for name in ("attention_norm", "mlp_norm"):
                setattr(layer, name, SequenceNorm(getattr(layer, name), mesh))
    # PyTorch's style for embeddings makes a gradient of the whole vocabulary on every rank.
    model.embedding = VocabularyEmbedding(model.embedding, mesh)  # type: ignore[assignment]
    if model.head is not None:
        model.head.weight = nn.Parameter(distribute_tensor(model.head.weight, mesh, [Shard(0)]))
    if sequence_parallel:
        # Learned positions are added to whole sequences; the first layer is where the cut begins.
        # (stream, nothing to be added to it yet), and for LLaMA cosines and sines, which every rank has whole.
        others = (None,) if isinstance(model, GPT2) else (None, None, None)
        cut = PrepareModuleInput(
            input_layouts=(Replicate(), *others), desired_input_layouts=(Shard(1), *others), use_local_output=True
        )
        parallelize_module(model, mesh, {"layers.0": cut})
        model.norm = SequenceNorm(model.norm, mesh)  # type: ignore[assignment]


def _layer_plan(model: Model, between: Shard | Replicate) -> dict[str, ParallelStyle]:
    gather = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
    plan: dict[str, ParallelStyle] = {
        "attention.qkv": ColwiseParallel(input_layouts=between),
        "attention.output": RowwiseParallel(output_layouts=between),
        # As one for the whole MLP: the gradients of gate and up are then summed before they are sent.
        "mlp": gather,
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=between),
    }
    if not isinstance(model, GPT2):
        plan["mlp.gate"] = ColwiseParallel()
    return plan


class SequenceNorm(nn.Module):
    """A norm of which each rank has all weights and some rows of the sequence: the weights' gradients are summed over ranks.

    PyTorch's SequenceParallel is the same for modules of one input and one output; ours add to the residual stream, too.
    """

    def __init__(self, norm: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        for name, parameter in list(norm.named_parameters()):
            self.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [Replicate()])))
        self._norm = (norm,)  # in a tuple, so that its own weights are none of this module's

    def forward(self, x: torch.Tensor, update: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(x, update) [B, S / ranks, C] as the norm itself takes and gives them."""
        weights = {name: _for_rows(parameter) for name, parameter in self.named_parameters()}
        result: tuple[torch.Tensor, torch.Tensor] = functional_call(self._norm[0], weights, (x, update))
        return result


def _for_rows(weight: torch.Tensor) -> torch.Tensor:
    """All of a weight, plain, for some rows of the sequence: the gradients that come back are summed over ranks."""
    if not isinstance(weight, DTensor):
        return weight
    return weight.redistribute(placements=[Replicate()] * weight.device_mesh.ndim).to_local(
        grad_placements=[Partial()] * weight.device_mesh.ndim
    )


class VocabularyEmbedding(nn.Module):
    """An embedding of which each rank holds some rows: it gives zeros for the others', and the ranks' sum is whole."""

    def __init__(self, whole: nn.Embedding, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(whole.weight, mesh, [Shard(0)]))
        self._mesh = mesh
        self._first = first_row(whole.num_embeddings, mesh)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens int64 [B, S] -> [B, S, C] on all ranks."""
        weight = local_part(self.weight)
        row = tokens - self._first
        here = (row >= 0) & (row < weight.shape[0])
        if weight.shape[0]:
            x = F.embedding(row.where(here, 0), weight).masked_fill(~here[..., None], 0.0)
        else:
            x = weight.sum() + weight.new_zeros(*tokens.shape, weight.shape[1])  # no rows: zeros, with their gradient
        return whole(x, self._mesh, Partial())


def first_row(rows: int, mesh: DeviceMesh) -> int:
    """The first of the `rows` that this rank holds, by torch.chunk's rule."""
    return min(mesh.get_local_rank() * -(-rows // mesh.size()), rows)


def local_part(weight: torch.Tensor) -> torch.Tensor:
    """This rank's part of a weight, with gradient."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def whole(x: torch.Tensor, mesh: DeviceMesh, placement: Partial | Replicate | Shard) -> torch.Tensor:
    """The whole of `x` as a plain tensor, of which each rank has a summand (Partial), a part (Shard) or all of it.

    The gradient that comes back is taken as whole on each rank.
    """
    return DTensor.from_local(x, mesh, [placement], run_check=False).redistribute(placements=[Replicate()]).to_local()


def whole_for_parts(x: torch.Tensor, mesh: DeviceMesh, placement: Replicate | Shard) -> torch.Tensor:
    """As `whole`, for what each rank uses in a part of its own: the gradients that come back are summed over ranks."""
    spread = DTensor.from_local(x, mesh, [placement], run_check=False).redistribute(placements=[Replicate()])
    return spread.to_local(grad_placements=[Partial()])
