"""Tiles and choices of the Hopper kernels, as measured on an H200 (docs/kernels/hopper.md has the figures and what lost).

`banded` configurations serve everything that needs a mask: causal, windows, and lengths of keys that end inside a tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

HEAD_DIMS = (64, 128, 256)  # others are padded to the next of these: TMA reads columns that are not there as 0
SHARED_LIMIT_BYTES = 227 * 1024
_BARRIER_BYTES = 1024  # at most


@dataclass(frozen=True)
class ForwardConfiguration:
    """Consumer warpgroups of 64 query rows, keys of a tile, stages of the K and V rings, registers of a consumer's and the producer's
    thread, and whether the output leaves through the memory of Q (where there is no room for both)."""

    warpgroups: int
    block_n: int
    stages: int
    consumer_registers: int
    producer_registers: int
    out_in_q: bool = False

    @property
    def block_m(self) -> int:
        """Query rows of a program's tile."""
        return 64 * self.warpgroups

    def shared_bytes(self, head_dim: int) -> int:
        """Shared memory of the tiles; barriers come on top."""
        rows = self.block_m * (1 if self.out_in_q else 2) + 2 * self.stages * self.block_n
        return rows * head_dim * 2


@dataclass(frozen=True)
class BackwardConfiguration:
    """Query rows of a tile, stages of the Q and dO rings, how much of the next tile is started before this one's end (0: nothing,
    1: S, 2: S and dP), whether dQ leaves by TMA (else by vector reductions from registers), and whether programs are persistent."""

    block_m: int
    stages: int
    prefetch: int
    dq_by_tma: bool
    persistent: bool
    keys: int = 128  # of a program; 64 in the wide kernel

    def shared_bytes(self, head_dim: int) -> int:
        """Shared memory of the tiles; barriers come on top."""
        keys = 2 * self.keys * head_dim * 2
        queries = self.stages * self.block_m * (2 * head_dim * 2 + 2 * 4)
        # dS of two tiles; in the wide kernel P, too.
        d_logits = 2 * self.keys * self.block_m * 2 * (2 if self.keys == 64 else 1)
        return keys + queries + d_logits + (2 * 64 * 64 * 4 if self.dq_by_tma else 0)


@dataclass(frozen=True)
class QueriesConfiguration:
    """The pass that makes d_q alone (`deterministic=True`): keys of a tile, stages of the K ring (K of a tile is wanted twice, before
    and after its softmax) and of the V ring. A program has two consumer warpgroups of 64 queries."""

    block_n: int
    k_stages: int
    v_stages: int
    block_m: int = 128

    def shared_bytes(self, head_dim: int) -> int:
        """Shared memory of the tiles; barriers come on top."""
        rows = 2 * self.block_m + (self.k_stages + self.v_stages) * self.block_n
        return rows * head_dim * 2


# (padded head dimension, banded)
FORWARD: dict[tuple[int, bool], ForwardConfiguration] = {
    (64, False): ForwardConfiguration(3, 128, 2, 160, 32),
    (64, True): ForwardConfiguration(3, 128, 3, 160, 32),
    (128, False): ForwardConfiguration(2, 128, 2, 240, 24),
    (128, True): ForwardConfiguration(2, 128, 2, 240, 24),
    (256, False): ForwardConfiguration(2, 64, 2, 240, 24, out_in_q=True),
    (256, True): ForwardConfiguration(2, 64, 2, 240, 24, out_in_q=True),
}

BACKWARD: dict[tuple[int, bool], BackwardConfiguration] = {
    (64, False): BackwardConfiguration(128, 2, prefetch=1, dq_by_tma=False, persistent=False),
    (64, True): BackwardConfiguration(128, 3, prefetch=1, dq_by_tma=False, persistent=True),
    (128, False): BackwardConfiguration(64, 2, prefetch=2, dq_by_tma=True, persistent=False),
    (128, True): BackwardConfiguration(64, 2, prefetch=0, dq_by_tma=True, persistent=True),
    (256, False): BackwardConfiguration(64, 2, prefetch=0, dq_by_tma=False, persistent=False, keys=64),
    (256, True): BackwardConfiguration(64, 2, prefetch=0, dq_by_tma=False, persistent=False, keys=64),
}

# `deterministic=True`, by padded head dimension: what of BACKWARD is another choice for d_k and d_v alone (2 makes ptxas serialise all
# wgmma, 0 spills in the loop at 64), and the pass for d_q.
KEYS_ALONE_PREFETCH = {64: 1, 128: 1, 256: 0}
QUERIES: dict[int, QueriesConfiguration] = {
    64: QueriesConfiguration(128, 3, 3),
    128: QueriesConfiguration(64, 4, 3),
    256: QueriesConfiguration(32, 3, 2),
}


# With a soft cap its derivative lies beside P and dP, and what is started early is no longer free. By `banded`, at 128.
SOFT_CAP_PREFETCH = {False: 0, True: 1}


def backward_configuration(
    head_dim: int, banded: bool, with_d_q: bool, soft_cap: bool = False, packed: bool = False
) -> BackwardConfiguration:
    """Of the kernel that makes d_k and d_v, and d_q with them or not. Packed sequences have a program a tile: nobody on the host knows
    how long the tiles are."""
    configuration = BACKWARD[head_dim, banded]
    if packed:
        configuration = replace(configuration, persistent=False)
    if soft_cap and head_dim == 128:
        return replace(configuration, prefetch=SOFT_CAP_PREFETCH[banded])
    return configuration if with_d_q else replace(configuration, prefetch=KEYS_ALONE_PREFETCH[head_dim])


def padded_head_dim(head_dim: int) -> int:
    """The head dimension whose kernels serve `head_dim`."""
    return next(size for size in HEAD_DIMS if head_dim <= size)


def padded_backward(head_dim: int, soft_cap: bool) -> int:
    """The same for the backward pass: its tiles of 128 queries at 64 leave no registers for the derivative of a soft cap."""
    return max(128 if soft_cap else 0, padded_head_dim(head_dim))


def describe(
    head_dim: int,
    full: bool,
    with_gradients: bool,
    deterministic: bool = False,
    soft_cap: bool = False,
    packed: bool = False,
) -> list[str]:
    """What is launched for a head dimension, for people to read: a line a kernel. `full`: nothing is masked (and the keys fill tiles)."""
    padded = padded_head_dim(head_dim)
    full = full and not packed  # the end of a sequence is masked
    forward = FORWARD[padded, not full]
    lines = ["tables of the sequences' tiles, and zeros in rows that see nothing"] if packed else []
    programs = "a program a tile" if packed else "persistent programs"
    lines += [
        f"forward: tiles of {forward.block_m} queries and {forward.block_n} keys, head dimension padded to {padded}, "
        f"{forward.warpgroups} consumer warpgroups and a producer warp, {programs}"
    ]
    if with_gradients:
        padded = padded_backward(head_dim, soft_cap)
        backward = BACKWARD[padded, not full]
        persistent = backward.persistent and not packed
        programs = "persistent programs" if persistent else f"a program for {backward.keys} keys"
        if deterministic:
            queries = QUERIES[padded]
            lines += [
                "backward, 1 of 4: delta",
                f"backward, 2 of 4: dK and dV, {backward.keys} keys against tiles of {backward.block_m} queries, 2 consumer warpgroups "
                f"and a producer warp, {programs}",
                f"backward, 3 of 4: dQ in fp32, {queries.block_m} queries against tiles of {queries.block_n} keys, 2 consumer warpgroups "
                f"and a producer warp, {'a program a tile' if packed else 'persistent programs'}; no additions without an order",
                "backward, 4 of 4: dQ in its dtype",
            ]
            return lines
        lines += [
            "backward, 1 of 3: delta, and zeros for the sum of dQ",
            f"backward, 2 of 3: {backward.keys} keys against tiles of {backward.block_m} queries, 2 consumer warpgroups and a producer "
            f"warp, {programs}; dQ by atomic additions",
            "backward, 3 of 3: dQ from its fp32 sum",
        ]
    return lines


def check_configuration(
    configuration: ForwardConfiguration | BackwardConfiguration | QueriesConfiguration, head_dim: int
) -> None:
    """A shape that does not fit aborts the process inside the compiler, so look before. Raises ValueError."""
    used = configuration.shared_bytes(head_dim)
    if used + _BARRIER_BYTES > SHARED_LIMIT_BYTES:
        raise ValueError(f"{configuration} for head dimension {head_dim} takes {used} bytes of shared memory for tiles")
    if configuration.block_m % 64:
        raise ValueError(f"{configuration}: a warpgroup has 64 query rows")


TYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
