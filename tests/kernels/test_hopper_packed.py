"""What the Hopper backend finds out about packed sequences on the GPU, and the kernels before and after the backward one. No GPU needed."""

from __future__ import annotations

import itertools

import pytest
import torch

from tileflash.attention.band import Band
from tileflash.kernels.hopper.attention_backward_ends import finish_kernel, prepare_kernel
from tileflash.kernels.hopper.packed_tiles import (
    ENTRY,
    ROWS,
    SLOTS,
    clear_unseen_kernel,
    packed_tiles_kernel,
    slots_of,
)
from tileflash.kernels.hopper.seen import Seen

QUERIES = [5, 0, 70, 1, 0, 33, 16, 130, 0]
KEYS = [9, 4, 40, 1, 0, 33, 50, 7, 3]
BANDS = [(None, None), (None, 0), (-20, 5), (-3, None), (2, 1), (10, 30)]


def cu(lengths: list[int], device: str) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def seen_of(i: int, low: int | None, high: int | None, top_left: bool) -> Seen:
    shift = 0 if top_left else KEYS[i] - QUERIES[i]
    if not QUERIES[i] or not KEYS[i]:
        return Seen(0, 0, 0, 0, None, None)
    return Seen.of(QUERIES[i], KEYS[i], None if low is None else low + shift, None if high is None else high + shift)


def table_of(block: int, stats_rows: int, low: int | None, high: int | None, top_left: bool, of_keys: bool, backwards: bool,
             device: str, slack: int = 11) -> torch.Tensor:  # fmt: skip
    total_q, total_k = sum(QUERIES) + slack, sum(KEYS) + slack
    slots = slots_of(total_k if of_keys else total_q, block, len(QUERIES))
    table = torch.full((slots, ENTRY.value), -77, dtype=torch.int32, device=device)
    packed_tiles_kernel[(-(-slots // SLOTS.value),)](
        cu(QUERIES, device), cu(KEYS, device), table, slots, len(QUERIES), len(QUERIES).bit_length(), total_q, total_k,
        low or 0, high or 0, block, stats_rows, of_keys, backwards, low is not None, high is not None, top_left,
    )  # fmt: skip
    return table.flip(0) if backwards else table


@pytest.mark.parametrize(("low", "high"), BANDS)
@pytest.mark.parametrize("top_left", [False, True])
@pytest.mark.parametrize(("of_keys", "backwards"), [(False, False), (False, True), (True, False)])
def test_a_table_has_every_tile_that_sees_something(
    low: int | None, high: int | None, top_left: bool, of_keys: bool, backwards: bool, device: str
) -> None:
    block, stats_rows = 16, 8
    rows = table_of(block, stats_rows, low, high, top_left, of_keys, backwards, device).tolist()
    found = [row for row in rows if row[0] >= 0]
    own, q_first, k_first = [], 0, 0
    for i in range(len(QUERIES)):
        seen = seen_of(i, low, high, top_left)
        length = seen.keys if of_keys else seen.queries
        for first in range(0, length, block):
            bounds = seen.bounds()
            own.append([
                first, q_first + seen.query_begin, seen.queries, k_first + seen.key_begin, seen.keys, *bounds, q_first // stats_rows + i,
            ])  # fmt: skip
        q_first, k_first = q_first + QUERIES[i], k_first + KEYS[i]
    assert len(found) == len(own)
    for row, expected in zip(found, own, strict=True):
        assert row[:5] == expected[:5]
        assert row[7] == expected[7]
        # Bounds that exclude nothing may be told as any number that excludes nothing.
        same = Band(row[5], row[6]).mask(0, row[2], row[4])
        assert torch.equal(same, Band(expected[5], expected[6]).mask(0, row[2], row[4]))
    if not of_keys and not backwards:  # what the kernels before and after the backward one count on
        stats = table_of(stats_rows, stats_rows, low, high, top_left, False, False, device).tolist()
        assert all(row[7] + row[0] // stats_rows == slot for slot, row in enumerate(stats) if row[0] >= 0)


@pytest.mark.parametrize(("low", "high"), BANDS)
@pytest.mark.parametrize("of_keys", [False, True])
def test_rows_that_see_nothing_are_cleared_and_no_others(
    low: int | None, high: int | None, of_keys: bool, device: str
) -> None:
    heads, head_dim, slack = 2, 24, 70
    lengths = KEYS if of_keys else QUERIES
    total_q, total_k = sum(QUERIES) + slack, sum(KEYS) + slack
    total = total_k if of_keys else total_q
    rows = torch.ones(total, heads, head_dim, device=device)
    lse = torch.ones(heads, total, device=device)
    sinks = torch.tensor([5.0, 6.0], device=device)
    clear_unseen_kernel[(-(-total // ROWS.value) * heads,)](
        cu(QUERIES, device), cu(KEYS, device), rows, lse, (sinks,), heads * head_dim, head_dim, len(QUERIES), len(QUERIES).bit_length(),
        total_q, total_k, low or 0, high or 0, heads, head_dim, 32, of_keys, not of_keys, True, low is not None, high is not None, False,
    )  # fmt: skip
    expected = torch.zeros(total, dtype=torch.bool)
    first = 0
    for i, length in enumerate(lengths):
        seen = seen_of(i, low, high, False)
        begin, end = (seen.key_begin, seen.key_end) if of_keys else (seen.query_begin, seen.query_end)
        expected[first + begin : first + end] = True
        first += length
    assert torch.equal((rows == 1).all(2).all(1).cpu(), expected)
    assert torch.equal((rows == 0).all(2).all(1).cpu(), ~expected)
    if not of_keys:
        assert torch.equal((lse == 1).all(0).cpu(), expected)
        assert bool((lse[:, sum(QUERIES) :] == -torch.inf).all())
        sees_sink_alone = (~expected).nonzero().flatten()
        sees_sink_alone = sees_sink_alone[sees_sink_alone < sum(QUERIES)]
        assert torch.equal(lse[:, sees_sink_alone], sinks[:, None].expand(heads, len(sees_sink_alone)))


@pytest.mark.parametrize("spoilt", [False, True])
def test_statistics_and_d_q_of_packed_sequences(spoilt: bool, device: str) -> None:
    """The accumulator's tiles go to their sequences' rows; tiles with NaN are made once more from the statistics that `prepare` wrote."""
    heads, head_dim, block_m, block_d, scale, high = 2, 40, 64, 128, 0.3, 0
    total_q, total_k = sum(QUERIES), sum(KEYS)
    q, d_out = (torch.randn(1, total_q, heads, head_dim, device=device) for _ in range(2))
    k, v = (torch.randn(1, total_k, 1, head_dim, device=device) for _ in range(2))
    out, lse = torch.zeros_like(q), torch.full((heads, total_q), -torch.inf, device=device)
    expected = torch.zeros_like(q)
    q_first = k_first = 0
    for i in range(len(QUERIES)):
        rows, keys = slice(q_first, q_first + QUERIES[i]), slice(k_first, k_first + KEYS[i])
        q_first, k_first = rows.stop, keys.stop
        seen = seen_of(i, None, high, False)
        if seen.queries == 0:
            continue
        one = q[:, rows].double().requires_grad_()
        visible = Band(None, KEYS[i] - QUERIES[i]).mask(0, QUERIES[i], KEYS[i], device)
        logits = torch.einsum("bihd,bjhd->bhij", one, k[:, keys].double().expand(-1, -1, heads, -1)) * scale
        logits = logits.masked_fill(~visible, -torch.inf)
        weights = logits.softmax(3).nan_to_num()
        result = torch.einsum("bhij,bjhd->bihd", weights, v[:, keys].double().expand(-1, -1, heads, -1))
        (expected[:, rows],) = torch.autograd.grad(result, one, d_out[:, rows].double())
        out[:, rows], lse[:, rows] = result.float(), logits.logsumexp(3)[0].float()
    slots = slots_of(total_q, block_m, len(QUERIES))
    table = table_of(block_m, block_m, None, high, False, False, False, device, slack=0)
    stats = torch.full((heads * slots, 2, block_m), float("nan"), device=device)
    acc = torch.full((heads * slots, block_m * block_d), float("nan"), device=device)
    prepare_kernel[(heads * slots,)](
        out, d_out, lse, lse, stats, acc, (table,), *out.stride()[:3], *d_out.stride()[:3], 0, slots, heads, total_q, head_dim,
        block_m, block_d, False, False, not spoilt, True,
    )  # fmt: skip
    if not spoilt:
        assert torch.equal(acc, torch.zeros_like(acc))
        for head, (slot, row) in itertools.product(range(heads), enumerate(table.tolist())):
            if row[0] < 0:
                continue
            length = min(block_m, row[2] - row[0])
            values = torch.zeros(64, block_d, device=device)
            values[:length, :head_dim] = expected[0, row[1] + row[0] : row[1] + row[0] + length, head].float() / scale
            pieces = [values[:, :64], values[:, 64:]]
            acc[head * slots + slot] = torch.cat(
                [piece.reshape(4, 2, 8, 8, 4, 2).permute(3, 0, 2, 4, 1, 5).flatten() for piece in pieces]
            )
    d_q = torch.zeros_like(q)
    strides = [stride for tensor in (d_q, q, k, v, d_out) for stride in tensor.stride()[:3]]
    finish_kernel[(heads * slots,)](
        acc, d_q, stats, q, k, v, d_out, (table,), *strides, 0, 0, slots, heads, heads, scale, scale * 1.4426950408889634, 0, 0,
        head_dim, head_dim, None, block_m, block_d, False, True, True,
    )  # fmt: skip
    torch.testing.assert_close(d_q.double(), expected.double(), rtol=1e-4, atol=1e-5)
