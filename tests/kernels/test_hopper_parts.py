"""The parts of the Hopper backend that need no GPU: what is seen, the schedule, the kernels before and after the backward one."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from tileflash.attention.band import Band
from tileflash.kernels.hopper import configurations
from tileflash.kernels.hopper.attention_backward_ends import finish_kernel, prepare_kernel
from tileflash.kernels.hopper.launch import forward_call
from tileflash.kernels.hopper.schedule import _dealt_in_rows, heads_in_l2, longest_first, visible_counts
from tileflash.kernels.hopper.seen import Seen

BOUNDS = [None, -7, -3, -1, 0, 1, 4, 9]


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 9), (9, 3), (1, 6), (6, 1)])
def test_what_is_seen_is_a_rectangle_in_which_every_row_and_column_sees_something(queries: int, keys: int) -> None:
    for low, high in itertools.product(BOUNDS, BOUNDS):
        mask = Band(low, high).mask(0, queries, keys)
        seen = Seen.of(queries, keys, low, high)
        if not mask.any():
            assert (seen.queries, seen.keys) == (0, 0), (low, high)
            continue
        rows, columns = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()
        assert (seen.query_begin, seen.query_end) == (int(rows[0]), int(rows[-1]) + 1), (low, high)
        assert (seen.key_begin, seen.key_end) == (int(columns[0]), int(columns[-1]) + 1), (low, high)
        inside = mask[seen.query_begin : seen.query_end, seen.key_begin : seen.key_end]
        assert torch.equal(Band(seen.low, seen.high).mask(0, seen.queries, seen.keys), inside), (low, high)


@pytest.mark.parametrize(("low", "high"), [(None, None), (None, 0), (-30, 0), (-10, 20), (5, 60), (-100, None)])
def test_counts_of_visible_tiles(low: int | None, high: int | None) -> None:
    queries, keys, rows, other_rows = 150, 200, 16, 32
    mask = Band(low, high).mask(0, queries, keys)
    tiles = -(-queries // rows)
    counts = visible_counts(tiles, rows, queries, keys, other_rows, low, high)
    for i in range(tiles):
        own = mask[i * rows : (i + 1) * rows]
        expected = sum(bool(own[:, j : j + other_rows].any()) for j in range(0, keys, other_rows))
        assert counts[i] == expected, i


@pytest.mark.parametrize(("tiles", "heads", "together", "programs"), [(16, 24, 5, 132), (1, 7, 7, 3), (40, 6, 1, 10)])
def test_a_schedule_has_every_tile_once_and_is_even(tiles: int, heads: int, together: int, programs: int) -> None:
    costs = np.arange(1, tiles + 1) + 0.5
    table = longest_first(costs, heads, together, programs)
    assert table.dtype == np.int32
    assert sorted(table[table >= 0].tolist()) == list(range(tiles * heads))
    loads = np.where(table >= 0, costs[table % tiles], 0).sum(0)
    assert loads.max() <= costs.sum() * heads / programs + costs.max()
    assert not ((table[1:] >= 0) & (table[:-1] < 0)).any()  # no gaps: -1 only at the end


def test_a_large_schedule_is_dealt_out_in_rows_and_as_even() -> None:
    costs = np.tile(np.arange(64, 0, -1), 100).astype(float)
    loads = np.bincount(_dealt_in_rows(costs, 132), weights=costs)
    assert loads.max() <= 1.03 * loads.mean() + 64


def test_heads_that_share_the_cache() -> None:
    assert heads_in_l2(1024, 512, 100) == 64
    assert heads_in_l2(1 << 30, 512, 100) == 1
    assert heads_in_l2(1, 1, 3) == 3


def test_a_configuration_that_does_not_fit_is_found_before_the_compiler_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    key = (128, True)
    too_deep = dataclasses.replace(configurations.FORWARD[key], stages=4)
    monkeypatch.setitem(configurations.FORWARD, key, too_deep)
    with pytest.raises(ValueError, match="stages=4"):
        forward_call(128, torch.bfloat16, "high")


@pytest.mark.parametrize(("head_dim", "padded"), [(1, 64), (64, 64), (65, 128), (128, 128), (136, 256), (256, 256)])
def test_head_dimensions_are_padded_to_the_next_that_is_there(head_dim: int, padded: int) -> None:
    assert configurations.padded_head_dim(head_dim) == padded


def as_left_by_the_backward_kernel(d_q: torch.Tensor, block_m: int, block_d: int) -> torch.Tensor:
    """The accumulator that holds d_q [1, S, H, D]: pieces of 64 rows in the order of the threads' registers."""
    _, length, heads, head_dim = d_q.shape
    tiles = -(-length // block_m)
    padded = torch.zeros(tiles * block_m, heads, block_d, device=d_q.device)
    padded[:length, :, :head_dim] = d_q[0]
    columns = block_d if block_m == 128 else block_d // 2
    pieces = []
    for head, tile, piece in itertools.product(range(heads), range(tiles), range(2)):
        rows = padded[tile * block_m : (tile + 1) * block_m, head]
        part = rows[piece * 64 :][:64] if block_m == 128 else rows[:, piece * columns :][:, :columns]
        pieces.append(part.reshape(4, 2, 8, columns // 8, 4, 2).permute(3, 0, 2, 4, 1, 5).flatten())
    return torch.stack(pieces)


def finish(acc: torch.Tensor, stats: torch.Tensor, tensors: tuple[torch.Tensor, ...], band: tuple[int, int], scale: float,
           block_m: int, block_d: int, banded: bool, softcap: float = 0.0) -> torch.Tensor:  # fmt: skip
    """d_q by the kernel; `tensors` are q, k, v, d_out."""
    cap_scale = scale / softcap if softcap else None
    q, k, v, d_out = tensors
    d_q = torch.full(q.shape, float("nan"), device=q.device)
    tiles = -(-q.shape[1] // block_m)
    strides = [stride for tensor in (d_q, q, k, v, d_out) for stride in tensor.stride()[:3]]
    finish_kernel[(q.shape[2] * tiles,)](
        acc, d_q, stats, q, k, v, d_out, (), *strides, q.shape[1], k.shape[1], tiles, q.shape[2], q.shape[2] // k.shape[2],
        scale, (softcap or scale) * 1.4426950408889634, *band, q.shape[3], v.shape[3], cap_scale,
        block_m, block_d, q.shape[3] == block_d, banded, False,
    )  # fmt: skip
    return d_q


@pytest.mark.parametrize(("block_m", "head_dim", "block_d"), [(128, 40, 64), (64, 128, 128), (64, 200, 256)])
def test_what_the_backward_kernel_leaves_becomes_d_q(block_m: int, head_dim: int, block_d: int, device: str) -> None:
    expected = torch.randn(1, 150, 2, head_dim, device=device)
    acc = as_left_by_the_backward_kernel(expected, block_m, block_d)
    d_q = finish(acc, acc, (expected,) * 4, (0, 0), 0.5, block_m, block_d, False)
    torch.testing.assert_close(d_q, expected * 0.5)


@pytest.mark.parametrize(("block_m", "head_dim", "head_dim_v", "block_d"), [(128, 40, 64, 64), (64, 72, 16, 128)])
@pytest.mark.parametrize(("value", "low", "high", "softcap"), [
    (float("nan"), -300, 9, 0.0), (float("inf"), -40, 20, 0.0), (float("nan"), -300, 9, 1.5),
])  # fmt: skip
def test_rows_that_a_hidden_key_spoilt_are_made_again(
    block_m: int,
    head_dim: int,
    head_dim_v: int,
    block_d: int,
    value: float,
    low: int,
    high: int,
    softcap: float,
    device: str,
) -> None:
    """The accumulator holds NaN everywhere; rows that see the spoilt key come out as NaN, the others as if it were not there."""
    rows, keys, heads, kv_heads, scale, spoilt = 90, 100, 2, 1, 0.3, 45
    q, d_out = (torch.randn(1, rows, heads, d, device=device) for d in (head_dim, head_dim_v))
    k, v = (torch.randn(1, keys, kv_heads, d, device=device) for d in (head_dim, head_dim_v))
    away = torch.arange(keys, device=device) - torch.arange(rows, device=device)[:, None]
    visible = (away >= low) & (away <= high)
    q_64, k_64, v_64 = (t.double() for t in (q, k, v))
    q_64.requires_grad_()
    logits = torch.einsum("bihd,bjhd->bhij", q_64, k_64.repeat_interleave(2, 2)) * scale
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    lse = logits.masked_fill(~visible, -torch.inf).logsumexp(3)
    out = torch.einsum(
        "bhij,bjhd->bihd", logits.masked_fill(~visible, -torch.inf).softmax(3), v_64.repeat_interleave(2, 2)
    )
    (expected,) = torch.autograd.grad(out, q_64, d_out.double())
    delta = (out * d_out).sum(3).transpose(1, 2)
    tiles = -(-rows // block_m)
    stats = torch.zeros(heads, 2, tiles * block_m, device=device)
    stats[:, 0, rows:] = torch.inf
    stats[:, 0, :rows], stats[:, 1, :rows] = lse[0].float() * 1.4426950408889634, delta[0].float()
    stats = stats.unflatten(2, (tiles, block_m)).transpose(1, 2).contiguous()
    acc = as_left_by_the_backward_kernel(torch.full_like(q, float("nan")), block_m, block_d)
    k[:, spoilt], v[:, spoilt] = value, value
    d_q = finish(acc, stats, (q, k, v, d_out), (low, high), scale, block_m, block_d, True, softcap)
    sees = visible[:, spoilt]
    torch.testing.assert_close(d_q[:, ~sees].double(), expected[:, ~sees], rtol=1e-5, atol=1e-5)
    assert not bool(d_q[:, sees].isfinite().all(3).any())
    assert 0 < int(sees.sum()) < rows


@pytest.mark.parametrize("with_d_lse", [False, True])
def test_statistics_before_the_backward_kernel(with_d_lse: bool, device: str) -> None:
    batch, length, heads, head_dim, block_m, block_d = 2, 70, 3, 40, 64, 64
    out, d_out = (torch.randn(batch, length, heads, head_dim, device=device) for _ in range(2))
    lse, d_lse = (torch.randn(batch, heads, length, device=device) for _ in range(2))
    tiles = 2
    stats = torch.full((batch * heads * tiles, 2, block_m), float("nan"), device=device)
    acc = torch.full((batch * heads * tiles, block_m * block_d), float("nan"), device=device)
    prepare_kernel[(batch * heads * tiles,)](
        out, d_out, lse, d_lse, stats, acc, (), *out.stride()[:3], *d_out.stride()[:3], length, tiles, heads, length, head_dim,
        block_m, block_d, False, with_d_lse, True, False,
    )  # fmt: skip
    assert torch.equal(acc, torch.zeros_like(acc))
    delta = (out * d_out).sum(3).transpose(1, 2) - (d_lse if with_d_lse else 0)
    by_head = stats.view(batch, heads, tiles, 2, block_m).transpose(2, 3).flatten(3)
    torch.testing.assert_close(by_head[:, :, 0, :length], lse * 1.4426950408889634)
    torch.testing.assert_close(by_head[:, :, 1, :length], delta, rtol=1e-5, atol=1e-5)
    assert bool((by_head[:, :, 0, length:] == torch.inf).all())
    assert bool((by_head[:, :, 1, length:] == 0).all())
