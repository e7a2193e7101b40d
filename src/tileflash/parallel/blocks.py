"""Which parts of a sequence a rank holds, and what of the attention between two ranks' parts is to be computed."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from tileflash.attention.band import Band


class Part(NamedTuple):
    """A rank's positions of a sequence: runs of `size` neighbours each, that begin at `starts` and lie one behind the other."""

    starts: tuple[int, ...]
    size: int

    @staticmethod
    def of(length: int, rank: int, ranks: int, *, zigzag: bool) -> Part:
        """Part `rank` of `ranks` of a sequence of `length`; ValueError where it has no equal parts.

        With `zigzag` the sequence is cut into 2 * ranks chunks, of which rank r has numbers r and 2 * ranks - 1 - r: an early and a late
        one, so that all ranks have the same work under a causal mask. Without it rank r has run r of `ranks`.
        """
        chunks = 2 * ranks if zigzag else ranks
        if length % chunks:
            twice = f"twice the number of context ranks, 2 * {ranks}" if zigzag else f"the {ranks} context ranks"
            raise ValueError(f"the sequence has {length} positions: it must be a multiple of {twice}")
        size = length // chunks
        numbers = (rank, chunks - 1 - rank) if zigzag else (rank,)
        return Part(tuple(number * size for number in numbers), size)

    def positions(self, device: torch.device | str | None = None) -> torch.Tensor:
        """int64 [positions of this part]: where in the sequence each of them stands."""
        return torch.cat([torch.arange(start, start + self.size, device=device) for start in self.starts])


class Block(NamedTuple):
    """Attention of the queries at `queries` to the keys at `keys`, (begin, end) within their ranks' parts: the key at place j of the
    block is visible to its query i where `low <= j - i <= high`."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    low: int | None
    high: int | None

    @property
    def is_full(self) -> bool:
        return self.low is None and self.high is None


def blocks_between(band: Band, queries: Part, keys: Part) -> list[Block]:
    """The blocks in which queries of one part see keys of another; `band` is that of the whole sequences.

    Few and large ones, for each is a launch: neighbours that are seen whole are one block.
    """
    if queries == keys and band.low is None and band.high == 0:
        # The order of the positions is all that a causal mask asks for.
        length = len(queries.starts) * queries.size
        return [Block((0, length), (0, length), None, 0)]
    found: list[Block] = []
    for row, query_start in enumerate(queries.starts):
        for column, key_start in enumerate(keys.starts):
            distance = key_start - query_start
            low = None if band.low is None else band.low - distance
            high = None if band.high is None else band.high - distance
            if (low is not None and low >= keys.size) or (high is not None and high <= -queries.size):
                continue
            low = None if low is not None and low <= 1 - queries.size else low
            high = None if high is not None and high >= keys.size - 1 else high
            rows = (row * queries.size, (row + 1) * queries.size)
            columns = (column * keys.size, (column + 1) * keys.size)
            _add(found, Block(rows, columns, low, high))
    # What was joined along the keys is joined along the queries.
    joined: list[Block] = []
    for block in found:
        _add(joined, block)
    return joined


def _add(blocks: list[Block], block: Block) -> None:
    """Append `block`, or let one that is there take it up."""
    for index, other in enumerate(blocks):
        if not (block.is_full and other.is_full):
            continue
        if other.queries == block.queries and other.keys[1] == block.keys[0]:
            blocks[index] = other._replace(keys=(other.keys[0], block.keys[1]))
            return
        if other.keys == block.keys and other.queries[1] == block.queries[0]:
            blocks[index] = other._replace(queries=(other.queries[0], block.queries[1]))
            return
    blocks.append(block)


def key_head_copies(query_heads: int, key_heads: int, ranks: int) -> int:
    """On how many ranks of Ulysses each K/V head is; ValueError where the heads cannot be shared out."""
    copies = ranks // math.gcd(key_heads, ranks)
    if query_heads % (key_heads * copies):
        raise ValueError(
            f"there are {query_heads} heads of queries and {key_heads} of keys for {ranks} context ranks: with Ulysses the heads of "
            "queries must be a multiple of the ranks, and each rank's must have whole heads of keys; use ring attention"
        )
    return copies
