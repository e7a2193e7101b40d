"""Which program works on which tiles, and when: longest first, so that programs of unequal tiles end together."""

from __future__ import annotations

import heapq

import numpy as np

# What K and V of the heads worked on together may fill of the L2 cache.
_L2_SHARE_BYTES = 32 * 2**20
# Up to here tiles are scheduled one by one: about a microsecond each, once for a shape.
_LISTED_TILES = 1 << 14


def heads_in_l2(rows: int, bytes_per_row: int, heads: int) -> int:
    """How many heads' `rows` rows of `bytes_per_row` fit the L2 cache together; at least 1, at most all `heads`."""
    return max(1, min(heads, _L2_SHARE_BYTES // max(1, rows * bytes_per_row)))


def visible_counts(
    tiles: int, rows: int, length: int, other_length: int, other_rows: int, low: int | None, high: int | None
) -> np.ndarray:
    """For each of `tiles` tiles of `rows` rows, how many tiles of `other_rows` rows of the other side it sees (int64 [tiles]).

    Row i sees row j of the other side where low <= j - i <= high: the band of queries looking at keys; keys looking at queries pass -high
    and -low.
    """
    first = np.arange(tiles, dtype=np.int64) * rows
    last = np.minimum(first + rows, length) - 1
    begin = np.zeros(tiles, np.int64)
    end = np.full(tiles, -(-other_length // other_rows), np.int64)
    if low is not None:
        begin = np.maximum(first + low, 0) // other_rows
    if high is not None:
        end = -(-np.minimum(last + high + 1, other_length) // other_rows)
    return np.maximum(end - begin, 0)


def longest_first(costs: np.ndarray, heads: int, heads_together: int, programs: int) -> np.ndarray:
    """The tiles of each program in order: int32 [items, programs], -1 where a program has no more. Tile t of head h is h * len(costs) + t.

    Heads come in groups of `heads_together`, whose K and V share the L2 cache; in a group all heads' longest tiles come first. Each tile
    goes to the program that has least so far (a list schedule: Graham 1969). Where there are so many tiles that this takes long and
    matters little, a row of tiles is dealt out at a time.
    """
    order = np.argsort(-costs, kind="stable")
    groups = [np.arange(begin, min(begin + heads_together, heads)) for begin in range(0, heads, heads_together)]
    tiles = np.concatenate([(group[None, :] * len(costs) + order[:, None]).reshape(-1) for group in groups])
    tile_costs = costs[tiles % len(costs)]
    if len(tiles) <= _LISTED_TILES:
        programs_of = _list_schedule(tile_costs.tolist(), programs)
    else:
        programs_of = _dealt_in_rows(tile_costs, programs)
    items_of = np.bincount(programs_of, minlength=programs)
    by_program = np.argsort(programs_of, kind="stable")
    item = np.arange(len(tiles)) - np.repeat(np.cumsum(items_of) - items_of, items_of)
    table = np.full((int(items_of.max()), programs), -1, np.int32)
    table[item, programs_of[by_program]] = tiles[by_program]
    return table


def _list_schedule(costs: list[float], programs: int) -> np.ndarray:
    loads = [(0.0, program) for program in range(programs)]
    chosen = np.empty(len(costs), np.int64)
    for i, cost in enumerate(costs):
        load, program = loads[0]
        heapq.heapreplace(loads, (load + cost, program))
        chosen[i] = program
    return chosen


def _dealt_in_rows(costs: np.ndarray, programs: int) -> np.ndarray:
    """The longest tile of each row to the program that has least so far, and so on."""
    loads = np.zeros(programs)
    chosen = np.empty(len(costs), np.int64)
    for begin in range(0, len(costs), programs):
        row = costs[begin : begin + programs]
        longest = np.argsort(-row, kind="stable")
        least = np.argsort(loads, kind="stable")[: len(row)]
        chosen[begin + longest] = least
        loads[least] += row[longest]
    return chosen
