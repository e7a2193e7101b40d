"""Ring attention and Ulysses give what attention of the whole sequence gives, forward and backward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.context_cases import RING, ULYSSES, whole, work
from support.ranks import in_ranks
from tileflash.attention.band import Band
from tileflash.parallel.blocks import Part, blocks_between, key_head_copies

CASES = [
    (kind, name, size)
    for kind, cases in (("ring", RING), ("ulysses", ULYSSES))
    for name, case in cases.items()
    for size in case.sizes
]
NAMES = ("out", "lse", "d_q", "d_k", "d_v")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("context")
    in_ranks(4, work, directory)
    return directory


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(("kind", "name", "size"), CASES)
def test_several_ranks_give_what_one_does(results: Path, kind: str, name: str, size: int) -> None:
    case = (RING if kind == "ring" else ULYSSES)[name]
    tolerance = 1e-12 if case.dtype == torch.float64 else 2e-6
    for what, one, several in zip(NAMES, whole(case), torch.load(results / f"{kind}, {name}, {size}.pt"), strict=True):
        assert several.dtype == one.dtype
        torch.testing.assert_close(
            several, one, rtol=tolerance, atol=tolerance, msg=lambda told, at=what: f"{at}: {told}"
        )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("low", [None, -30, -7, 2])
@pytest.mark.parametrize("high", [None, 0, 5, 30])
def test_blocks_cover_what_is_visible_once(ranks: int, zigzag: bool, low: int | None, high: int | None) -> None:
    query_length, key_length = 24, 48
    for equal in (True, False):
        key_length = query_length if equal else 48
        seen = torch.zeros(query_length, key_length, dtype=torch.int64)
        for rank in range(ranks):
            queries = Part.of(query_length, rank, ranks, zigzag=zigzag)
            for owner in range(ranks):
                keys = Part.of(key_length, owner, ranks, zigzag=zigzag)
                for block in blocks_between(Band(low, high), queries, keys):
                    rows, columns = slice(*block.queries), slice(*block.keys)
                    at = queries.positions()[rows][:, None], keys.positions()[columns][None]
                    seen[at] += Band(block.low, block.high).mask(0, len(at[0]), at[1].shape[1]).long()
        assert torch.equal(seen, Band(low, high).mask(0, query_length, key_length).long())


def test_under_a_causal_mask_all_ranks_work_the_same_in_few_launches() -> None:
    parts = [Part.of(64, rank, 4, zigzag=True) for rank in range(4)]
    found = [[block for keys in parts for block in blocks_between(Band(None, 0), own, keys)] for own in parts]
    assert [len(blocks) for blocks in found] == [4] * 4
    pairs = [
        sum(
            Band(block.low, block.high).visible_pairs(
                block.queries[1] - block.queries[0], block.keys[1] - block.keys[0]
            )
            for block in blocks
        )
        for blocks in found
    ]
    assert len(set(pairs)) == 1
    assert sum(pairs) == 64 * 65 // 2


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has 36 positions: it must be a multiple of twice the number .*, 2 \* 4"):
        Part.of(36, 0, 4, zigzag=True)
    with pytest.raises(ValueError, match="has 34 positions: it must be a multiple of the 4 context ranks"):
        Part.of(34, 0, 4, zigzag=False)
    assert [key_head_copies(*heads, 4) for heads in ((4, 4), (8, 2), (8, 1), (16, 8))] == [1, 2, 4, 1]
    with pytest.raises(ValueError, match="6 heads of queries and 2 of keys for 4 context ranks"):
        key_head_copies(6, 2, 4)
