"""The random numbers of dropout in plain PyTorch, the same bits as the kernels make: which weights are kept is a fact of the problem.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011: Philox 4x32-10.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tileflash.kernels.options import drop_below

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four words for each counter; all int64 tensors that hold 32-bit words and broadcast with each other."""
    key_0, key_1 = key
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    for _ in range(_ROUNDS):
        # A product of two words wraps round in int64, but its bits are those of the unsigned one.
        product_0, product_1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product_1 >> 32) & _WORD ^ c1 ^ key_0,
            product_1 & _WORD,
            (product_0 >> 32) & _WORD ^ c3 ^ key_1,
            product_0 & _WORD,
        )
        key_0, key_1 = (key_0 + _KEY_STEPS[0]) & _WORD, (key_1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def kept(rng: Tensor, dropout_p: float, streams: Tensor, begin: int, end: int, key_length: int) -> Tensor:
    """bool [len(streams), end - begin, key_length]: which weights dropout keeps, for queries begin to end.

    `rng` is int64 [2], seed and offset; a stream is sequence * heads + head. Key j of query i gets word j mod 4 of the counter
    (j / 4, i, stream, offset), with the seed as key: nothing but positions goes in, no tile, no strip.
    """
    seed, offset = rng.unbind()
    seed = seed ^ (offset >> 32 << 32)  # the counter has room for 32 bits of the offset
    key = (seed & _WORD, (seed >> 32) & _WORD)
    device = rng.device
    quads = torch.arange(-(-key_length // 4), device=device)[None, None, :]
    rows = torch.arange(begin, end, device=device)[None, :, None]
    words = philox(key, (quads, rows, streams.to(device)[:, None, None], offset & _WORD))
    bits = torch.stack(words, 3).flatten(2)[:, :, :key_length] >> 1
    return bits >= drop_below(dropout_p)
