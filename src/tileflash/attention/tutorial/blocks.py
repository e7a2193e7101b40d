"""What both algorithms share: cutting into blocks, masks, and the care that -inf needs."""

from collections.abc import Callable

import torch
from torch import Tensor

# Given query numbers i [B_r, 1] and key numbers j [1, B_c], a bool [B_r, B_c]: True where query i sees key j.
Mask = Callable[[Tensor, Tensor], Tensor]


def blocks(N: int, B: int) -> list[slice]:
    """The rows 0 .. N in blocks of B; the last block is shorter where B does not divide N."""
    if B < 1:
        raise ValueError(f"a block must have at least 1 row, not {B}")
    return [slice(begin, min(begin + B, N)) for begin in range(0, N, B)]


def block_sizes(M: int, d: int) -> tuple[int, int]:
    """(B_r, B_c) as the FlashAttention paper sets them (Algorithm 1, line 1) for an on-chip memory of M numbers: K_j, V_j, Q_i and O_i
    fit in it together."""
    B_c = -(-M // (4 * d))  # rounded up
    return min(B_c, d), B_c


def causal(query_length: int, key_length: int) -> Mask:
    """A query sees its own position and what came before; the last query stands at the last key."""
    shift = key_length - query_length
    return lambda i, j: j <= i + shift


def visible_block(mask: Mask | None, rows: slice, columns: slice, device: torch.device) -> Tensor:
    """bool [B_r, B_c]: which keys of a block its queries see. Made from the numbers of rows and columns; no N x N mask exists."""
    i = torch.arange(rows.start, rows.stop, device=device)[:, None]
    j = torch.arange(columns.start, columns.stop, device=device)[None, :]
    return torch.ones_like(i + j, dtype=torch.bool) if mask is None else mask(i, j)


def finite(maximum: Tensor) -> Tensor:
    """What may be subtracted from a row: its maximum, or 0 where the row has seen no key yet and the maximum is -inf.

    The papers write exp(S - m). Where a whole row of a block is masked this is exp(-inf - (-inf)) = exp(NaN), and one NaN in a running
    sum stays for ever. With 0 in place of -inf it is exp(-inf - 0) = 0, which is what a masked key shall weigh.
    """
    return torch.where(maximum == -torch.inf, 0.0, maximum)


def nonzero(total: Tensor) -> Tensor:
    """What a row may be divided by: its sum, or 1 where the row has seen no key: 0 / 1 = 0, but 0 / 0 = NaN."""
    return torch.where(total == 0, 1.0, total)
