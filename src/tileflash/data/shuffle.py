"""A permutation of range(n) that is computed, not stored: the same for ever for the same seed and epoch."""

from __future__ import annotations

import numpy as np

_ROUNDS = 6
_MASK64 = 2**64 - 1


def permute(index: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Where a permutation of range(size), chosen by (seed, epoch), sends each of `index` [n] (int64, < size).

    A Feistel network over the next even number of bits, walked until the value falls inside range(size) (Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002). NumPy's own shuffles may change between its versions and
    hold the whole epoch in memory; this does neither, so a run can be resumed anywhere, exactly.
    """
    half_bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    keys = [_mix_int(_mix_int(_mix_int(seed) ^ epoch) ^ number) for number in range(_ROUNDS)]
    out = _feistel(index.astype(np.uint64), half_bits, keys)
    # At most 3 of 4 values lie outside, and each walk is a cycle that comes back inside, so this ends.
    while (outside := out >= size).any():
        out[outside] = _feistel(out[outside], half_bits, keys)
    return out.astype(np.int64)


def _feistel(value: np.ndarray, half_bits: int, keys: list[int]) -> np.ndarray:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = value >> shift, value & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ np.uint64(key)) & mask)
    return (left << shift) | right


def _mix(value: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014), on uint64; products wrap as they must."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _mix_int(value: int) -> int:
    # The increment first: the finalizer alone sends 0 to 0.
    return int(_mix(np.array([(value + 0x9E3779B97F4A7C15) & _MASK64], dtype=np.uint64))[0])
