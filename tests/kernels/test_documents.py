"""Tiles of different documents are left out, and none that holds a visible pair."""

import torch
import triton
import triton.language as tl

from tileflash.kernels.triton.features import documents_meet


@triton.jit
def meet_kernel(query_ids, key_ids, meets, query_length, key_length, tiles, BLOCK: tl.constexpr):
    operands = (0, 0, 0, 0.0, 0.0, 0, 0, 0, query_ids, key_ids, 0, 1.0, 0, 1.0, 0, 0, 0)
    i_tile, j_tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    found = documents_meet(i_tile * BLOCK, j_tile * BLOCK, query_length, key_length, operands, BLOCK, BLOCK)
    tl.store(meets + tl.program_id(0), found.to(tl.int32))


def _meets(query_ids: torch.Tensor, key_ids: torch.Tensor, block: int) -> torch.Tensor:
    rows, columns = (-(-len(ids) // block) for ids in (query_ids, key_ids))
    meets = torch.full((rows, columns), -1, dtype=torch.int32, device=query_ids.device)
    meet_kernel[(rows * columns,)](query_ids, key_ids, meets, len(query_ids), len(key_ids), columns, block)
    return meets


def _share(query_ids: torch.Tensor, key_ids: torch.Tensor, block: int) -> torch.Tensor:
    same = (query_ids[:, None] == key_ids[None, :]).int()
    rows, columns = (-(-len(ids) // block) * block for ids in (query_ids, key_ids))
    padded = torch.zeros(rows, columns, dtype=torch.int32, device=query_ids.device)
    padded[: len(query_ids), : len(key_ids)] = same
    return padded.view(rows // block, block, columns // block, block).amax((1, 3))


def test_documents_behind_each_other_leave_out_every_hidden_tile(device: str) -> None:
    lengths = torch.tensor([40, 3, 50, 16, 7])
    ids = torch.repeat_interleave(torch.arange(5, dtype=torch.int32), lengths).to(device)
    assert torch.equal(_meets(ids, ids, 16), _share(ids, ids, 16))
    assert _meets(ids, ids, 16).sum() < _meets(ids, ids, 16).numel() / 2


def test_numbers_in_any_order_leave_out_no_visible_pair(device: str) -> None:
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        query_ids, key_ids = (
            torch.randint(-3, 4, (n,), generator=generator, dtype=torch.int32).to(device) for n in (37, 50)
        )
        assert (_meets(query_ids, key_ids, 16) >= _share(query_ids, key_ids, 16)).all()


def test_numbers_beyond_32_bits_leave_out_no_visible_pair(device: str) -> None:
    lengths = torch.tensor([20, 3, 25, 16, 7])
    numbers = torch.tensor([-(2**62), -(2**40), 5, 2**40, 2**62])
    ids = torch.repeat_interleave(numbers, lengths).to(device)
    for query_ids, key_ids in ((ids, ids), (ids[3:40], ids.flip(0)), (ids, ids + 2**32)):
        assert (_meets(query_ids, key_ids, 16) >= _share(query_ids, key_ids, 16)).all()
