"""Tile sizes of the portable attention kernels: measured on an H200 for Hopper, compiled and counted for everything else.

The order of a measurement: every candidate compiled, those that spilled or did not fit dropped, the rest timed at 16,384 tokens and
2,048 columns (docs/kernels.md has the figures). Keys are (kernel, head dimension padded to a power of two).
"""

from typing import Literal, NamedTuple

import torch

Kernel = Literal["forward", "dkdv", "dk", "dv", "dq", "bias"]

# From this padded head dimension on, d_k and d_v are made by a pass each: both accumulators together would spill.
SPLIT_KEY_PASS_FROM = 256


AMD = (0, 1)  # a capability that no NVIDIA GPU has, for gfx90a says 9.0 as Hopper does


class Tile(NamedTuple):
    """Query rows and key rows of a tile, warps of a program, stages of the software pipeline, registers of a thread (0: any number).

    Registers are bounded where a few less let one more program run on a multiprocessor.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int = 0


# Hopper has 227 KB of shared memory and wgmma. (full, banded) where the two differ.
HOPPER: dict[tuple[Kernel, int], tuple[Tile, Tile]] = {
    ("forward", 64): (Tile(64, 64, 4, 3), Tile(64, 64, 4, 3, 128)),
    ("forward", 128): (Tile(128, 64, 8, 3), Tile(64, 64, 4, 3)),
    ("forward", 256): (Tile(128, 64, 8, 2), Tile(128, 64, 8, 2)),
    ("dkdv", 64): (Tile(128, 64, 4, 2), Tile(64, 64, 4, 2)),
    ("dkdv", 128): (Tile(64, 128, 8, 2), Tile(32, 64, 4, 2)),
    ("dk", 256): (Tile(32, 128, 8, 2), Tile(32, 128, 8, 2)),
    ("dv", 256): (Tile(64, 128, 8, 2), Tile(64, 128, 8, 2)),
    ("dq", 64): (Tile(128, 64, 8, 3, 128), Tile(64, 64, 4, 3, 168)),
    ("dq", 128): (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    ("dq", 256): (Tile(128, 64, 8, 1), Tile(128, 64, 8, 1)),
}

# With options, logits take more registers: tiles that do not spill with all of them on.
HOPPER_WITH_OPTIONS: dict[tuple[Kernel, int], Tile] = {
    ("forward", 64): Tile(64, 64, 4, 2),
    ("forward", 128): Tile(64, 64, 4, 2),
    ("forward", 256): Tile(64, 64, 8, 2),
    ("dkdv", 64): Tile(64, 64, 8, 2),
    ("dkdv", 128): Tile(64, 64, 8, 2),
    ("dk", 256): Tile(32, 64, 8, 1),
    ("dv", 256): Tile(32, 64, 8, 1),
    ("dq", 64): Tile(64, 64, 8, 2),
    ("dq", 128): Tile(64, 64, 8, 2),
    ("dq", 256): Tile(64, 32, 8, 1),
}

# Everything else: at most 64 KB of shared memory (AMD CDNA 3; NVIDIA's consumer parts have 99 KB).
PORTABLE: dict[tuple[Kernel, int], Tile] = {
    ("forward", 64): Tile(64, 64, 4, 2),
    ("forward", 128): Tile(64, 32, 4, 2),
    ("forward", 256): Tile(64, 32, 8, 1),
    ("dkdv", 64): Tile(32, 64, 4, 2),
    ("dkdv", 128): Tile(32, 64, 4, 1),
    ("dk", 256): Tile(16, 32, 4, 1),
    ("dv", 256): Tile(16, 32, 4, 1),
    ("dq", 64): Tile(64, 32, 4, 2),
    ("dq", 128): Tile(64, 32, 4, 1),
    ("dq", 256): Tile(32, 16, 4, 1),
    ("bias", 64): Tile(32, 32, 4, 1),
    ("bias", 128): Tile(32, 32, 4, 1),
    ("bias", 256): Tile(32, 32, 4, 1),
    ("forward", 512): Tile(32, 16, 8, 1),
    ("dk", 512): Tile(16, 16, 8, 1),
    ("dv", 512): Tile(16, 16, 8, 1),
    ("dq", 512): Tile(16, 16, 8, 1),
    ("bias", 512): Tile(16, 16, 4, 1),
}

# fp32 goes through FMA units: small tiles and many warps keep the operands in registers. (forward, backward)
FLOAT32: dict[int, tuple[Tile, Tile]] = {
    64: (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    128: (Tile(16, 32, 8, 1), Tile(16, 16, 8, 1)),
    256: (Tile(16, 32, 8, 1), Tile(16, 16, 8, 1)),
    512: (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}

# With options a product must sum over 32 elements or more: over the keys of a tile in the forward pass and d_q, over its queries in d_k
# and d_v (`offline.narrow_products` says why). These take the place of tiles above where options are on; on AMD, whose layouts are
# others, 64 KB of shared memory are too few for them.
SUMS_OVER_32: dict[tuple[Kernel, int], Tile] = {
    ("dk", 256): Tile(32, 16, 4, 1),
    ("dv", 256): Tile(32, 16, 4, 1),
    ("dq", 256): Tile(16, 32, 4, 1),
    ("forward", 512): Tile(16, 32, 8, 1),
    ("dk", 512): Tile(32, 16, 8, 1),
    ("dv", 512): Tile(32, 16, 8, 1),
    ("dq", 512): Tile(16, 32, 8, 1),
}
TF32_WITH_OPTIONS: dict[int, tuple[Tile, Tile]] = {
    64: (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    128: (Tile(16, 32, 8, 1), Tile(32, 32, 8, 1)),
}


def select_tile(
    kernel: Kernel, block_d: int, dtype: torch.dtype, capability: tuple[int, int], banded: bool, features: int = 0,
    tf32: bool = False,
) -> Tile:  # fmt: skip
    """The tile for one kernel.

    `block_d` is the head dimension padded to a power of two (16 to 512), `capability` the CUDA compute capability (AMD; (0, 0) in the
    interpreter, which gets small tiles so that tests cross tile borders), `banded` whether the band has a bound (causal, window),
    `features` the options' bits (0: none), `tf32` whether products of fp32 are made of TF32 (see `has_tf32`).
    """
    measured_d = max(64, block_d)  # narrower heads take the tiles of 64
    if dtype is torch.float32:
        if tf32 and features:
            return TF32_WITH_OPTIONS[measured_d][kernel != "forward"]
        return FLOAT32[measured_d][kernel != "forward"]
    if capability == (0, 0):
        return Tile(32, 32, 4, 1)
    if kernel == "bias" or measured_d > 256 or capability != (9, 0):
        tile = PORTABLE[kernel, measured_d]
        if not features:
            return tile
        # On AMD the pipeline of loops that load a bias does not compile (Triton 3.6: an assertion in applyLinearLayout).
        return tile._replace(num_stages=1) if capability == AMD else SUMS_OVER_32.get((kernel, measured_d), tile)
    if features:
        return HOPPER_WITH_OPTIONS[kernel, measured_d]
    return HOPPER[kernel, measured_d][banded]


def has_tf32(block_d: int, features: int) -> bool:
    """Whether there are tiles for TF32 products: with options, wide heads have none and are computed in true fp32."""
    return not features or max(64, block_d) in TF32_WITH_OPTIONS
