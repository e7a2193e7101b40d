"""An fp32 master weight as a bf16 weight and 16 more bits: nothing of it is lost, and the model computes with the bf16 part."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_NAN_BITS = 0x7FC00000


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 -> (bf16, int16) of the same shape: the master rounded to the nearest, ties away from zero, and its low 16 bits.

    Ties away, not to even: then `join_master` has one answer. A NaN becomes the standard one.
    """
    bits = torch.where(master.isnan(), _NAN_BITS, master.contiguous().view(torch.int32))
    high = (bits + 0x8000) >> 16  # the largest that is no NaN, Inf, does not run over
    return high.to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def join_master(weight: Tensor, low_bits: Tensor) -> Tensor:
    """The fp32 master that `split_master` took apart, bit for bit. `weight` bf16, `low_bits` int16, read as a signed number."""
    return ((weight.detach().view(torch.int16).to(torch.int32) << 16) + low_bits.to(torch.int32)).view(torch.float32)


def widen_stream(model: nn.Module) -> None:
    """Let the embedding of a model with bf16 weights give fp32, so that the residual stream is summed in fp32, as it is under
    autocast with fp32 weights."""
    embedding = model.get_submodule("embedding")
    embedding.register_forward_hook(lambda module, inputs, output: output.float())
