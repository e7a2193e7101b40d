"""The gradient of sinks, from what the backward pass leaves."""

from __future__ import annotations

import torch
from torch import Tensor

from tileflash.kernels.options import NO_GRADIENTS, OptionGradients, Options

_LOG2_E = 1.4426950408889634


def sink_gradient(options: Options, d_lse: Tensor | None, stats: Tensor | None, batch: int) -> OptionGradients:
    """The gradient of the sinks. `d_lse` [B, Hq, rows] is that of rows that see no key, which goes to the sink whole. `stats` [B * Hq *
    tiles, 2 * rows] are the others' lse * log2(e) and delta: a sink is a key whose dP is 0, so its dS is exp(sink - lse) * (0 - delta).
    """
    sinks = options.sinks
    if sinks is None:
        return NO_GRADIENTS
    d_sinks = torch.zeros(sinks.shape, dtype=torch.float32, device=sinks.device)
    if d_lse is not None:
        d_sinks += d_lse.sum((0, 2))
    if stats is not None:
        # [B, Hq, tiles, rows] each. Where a tile has no row lse is +inf, so that the weight is 0.
        lse_log2, delta = stats.view(batch, sinks.shape[0], -1, 2, stats.shape[1] // 2).unbind(3)
        d_sinks -= (torch.exp2(sinks.float()[None, :, None, None] * _LOG2_E - lse_log2) * delta).sum((0, 2, 3))
    return OptionGradients(None, None, d_sinks.to(sinks.dtype))
