"""Dropout that can be made again: the random number of query i and key j is a function of (seed, offset, batch, head, i, j).

The papers save the state R of a random number generator in the forward pass and set it again in the backward pass. A generator that hands
out one number after the other would then have to be asked in the same order: same loops, same block sizes. A counter-based generator has
no order. It encrypts a counter by a key, so any block can be made at any time, by any kernel. The counter and the key here are those of
the library: `tileflash.attention(..., dropout_p, dropout_seed)` drops the same entries.
"""

from typing import TypeVar

import torch
from torch import Tensor

from tileflash.kernels.options import drop_below

RandomState = tuple[int, int, int, int]  # R: 32-bit words, two of a key and two of the counter
Word = TypeVar("Word", int, Tensor)  # 32-bit words, as a number or as a tensor of int64

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_BITS = 32
_ALL_ONES = 2**_BITS - 1


def philox(c0: Word, c1: Word, c2: Word, c3: Word, key: tuple[int, int]) -> tuple[Word, Word, Word, Word]:
    """Philox-4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), which CUDA, PyTorch and Triton use as well.

    Four words of counter and two words of key make four random words. A product of two words has 64 bits. In int64 it may come out
    negative, but its bits are right, and `& _ALL_ONES` takes them.
    """
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0, product_1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((product_1 >> _BITS) & _ALL_ONES) ^ c1 ^ k0, ((product_0 >> _BITS) & _ALL_ONES) ^ c3 ^ k1
        c1, c3 = product_1 & _ALL_ONES, product_0 & _ALL_ONES
        k0, k1 = (k0 + _KEY_STEPS[0]) & _ALL_ONES, (k1 + _KEY_STEPS[1]) & _ALL_ONES
    return c0, c1, c2, c3


def random_state(seed: int, offset: int = 0, batch: int = 0, head: int = 0, heads: int = 1) -> RandomState:
    """R for one of `heads` heads of one call. `seed` is the run's, `offset` counts the calls, so that no two steps drop the same entries.

    The key is the seed; the counter's last two words are the head's number among all heads of the batch, and the offset. There is room for
    32 bits of the offset: the others change the key.
    """
    key_low, key_high = seed & _ALL_ONES, ((seed ^ offset) >> _BITS) & _ALL_ONES
    return key_low, key_high, (batch * heads + head) & _ALL_ONES, offset & _ALL_ONES


def dropout_mask(R: RandomState, p_drop: float, rows: slice, columns: slice, like: Tensor) -> Tensor:
    """Z [B_r, B_c] in the dtype and on the device of `like`: 0 with probability p_drop, else 1 / (1 - p_drop), so that the mean is 1.

    The counter (j / 4, i, head, offset) gives four words: one for each of the keys j, j + 1, j + 2 and j + 3 of query i.
    """
    if not 0 <= p_drop < 1:
        raise ValueError(f"p_drop must be at least 0 and less than 1, not {p_drop}")
    if p_drop == 0:
        return like.new_ones(rows.stop - rows.start, columns.stop - columns.start)
    key_low, key_high, head, offset = R
    first = columns.start // 4
    quads, i = torch.meshgrid(
        torch.arange(first, -(-columns.stop // 4), device=like.device),
        torch.arange(rows.start, rows.stop, device=like.device),
        indexing="xy",
    )
    words = philox(quads, i, torch.full_like(i, head), torch.full_like(i, offset), (key_low, key_high))
    word = torch.stack(words, 2).flatten(1)[:, columns.start - 4 * first : columns.stop - 4 * first]
    # A word is uniform in 0 .. 2^32 - 1; 31 bits of it are compared, for Triton's integers have a sign.
    return ((word >> 1) >= drop_below(p_drop)).to(like.dtype) / (1 - p_drop)
