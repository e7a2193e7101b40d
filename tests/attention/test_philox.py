"""The random numbers of dropout: Random123's known answers, the same entries dropped by every kernel and tile, and their statistics."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import tileflash
from tileflash.attention.philox import kept, philox
from tileflash.kernels.options import drop_below
from tileflash.kernels.triton import features

OURS = ["triton", "tiled", "reference"]
SEEDS = [(0, 0), (-1, -1), (2**63 - 1, 2**31), (0x123456789ABCDEF0, (5 << 32) + 7), (-(2**63), -(2**63))]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # "philox4x32 10" of kat_vectors in Random123, the library of Philox's authors
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_the_known_answers_of_philox(counter: str, key: str, expected: str, device: str) -> None:
    def tensors(text: str) -> list[Tensor]:
        return [torch.tensor([word], device=device) for word in words(text)]

    made = philox(tuple(tensors(key)), tuple(tensors(counter)))  # type: ignore[arg-type]
    assert [int(word) for word in made] == words(expected)


@triton.jit
def _kept_kernel(
    out_ptr, rng_ptr, i_query, i_key, sequence, head, heads, below,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """One tile of what the attention kernels keep, through the operands they make."""
    options = (
        rng_ptr, rng_ptr, rng_ptr, rng_ptr, rng_ptr, rng_ptr, rng_ptr, rng_ptr,
        0, 0, 0, 0, 0, 0, 0,
        1.0, below, 1.0, 0,
    )  # fmt: skip
    extra = features.operands((), options, sequence, head, heads, 0, 0, 0, FEATURES)
    tile = features.kept(i_query, i_key, extra, BLOCK_M, BLOCK_N)
    places = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    tl.store(out_ptr + places, tile.to(tl.int8))


@pytest.mark.parametrize("seed", SEEDS, ids=str)
@pytest.mark.parametrize("tile", [(16, 16), (32, 64), (64, 16)], ids=str)
def test_a_tile_of_the_kernels_is_a_piece_of_the_whole(
    tile: tuple[int, int], seed: tuple[int, int], device: str
) -> None:
    block_m, block_n = tile
    rng = torch.tensor(seed, device=device)
    for i_query, i_key, sequence, head in ((0, 0, 0, 0), (70_000, 4 * block_n, 1, 2), (32, 4096, 70_000, 3)):
        out = torch.empty(tile, dtype=torch.int8, device=device)
        _kept_kernel[(1,)](
            out, rng, i_query, i_key, sequence, head, 5, drop_below(0.3), *tile, features.DROPOUT.value
        )  # fmt: skip
        stream = torch.tensor([sequence * 5 + head])
        whole = kept(rng, 0.3, stream, i_query, i_query + block_m, i_key + block_n)[0]
        assert torch.equal(out.bool(), whole[:, i_key:])


def dropped(q: Tensor, k: Tensor, p: float, seed: object, backend: str, **named: object) -> Tensor:
    """bool [B, H, Sq, Sk] (packed [H, total, columns]): the output with the unit matrix as values is the matrix of weights itself."""
    function = tileflash.attention if q.dim() == 4 else tileflash.attention_varlen
    keys = k.shape[-3]
    v = torch.eye(keys, device=q.device).unsqueeze(1).expand(*k.shape[:-1], keys)
    out = function(q, k, v, dropout_p=p, dropout_seed=seed, backend=backend, **named)
    return out.movedim(-2, -3) == 0


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("seed", SEEDS, ids=str)
def test_every_backend_drops_the_entries_that_the_scheme_names(
    backend: str, seed: tuple[int, int], device: str
) -> None:
    """Lengths on both sides of a tile border, so that several tiles of every kernel take part."""
    q, k = torch.zeros(2, 35, 3, 16, device=device), torch.zeros(2, 37, 3, 16, device=device)
    expected = ~kept(torch.tensor(seed, device=device), 0.4, torch.arange(6), 0, 35, 37).view(2, 3, 35, 37)
    for given in (seed, torch.tensor(seed, device=device)):
        assert torch.equal(dropped(q, k, 0.4, given, backend), expected)


@pytest.mark.parametrize("backend", OURS)
def test_the_backward_pass_drops_what_the_forward_pass_dropped(backend: str, device: str) -> None:
    """With equal weights d_v is made of what was kept alone, and so is each entry of d_bias."""
    q, k, v = (torch.zeros(1, n, 2, 16, device=device) for n in (37, 34, 34))
    v[..., 0] = 1.0
    v.requires_grad_()
    bias = torch.zeros(1, 2, 37, 34, device=device, requires_grad=True)
    keep = kept(torch.tensor([7, 9]), 0.25, torch.arange(2), 0, 37, 34).to(device)  # [2, 37, 34]
    out = tileflash.attention(q, k, v, bias=bias, dropout_p=0.25, dropout_seed=(7, 9), backend=backend)
    d_v, d_bias = torch.autograd.grad(out[..., 0].sum(), (v, bias))
    torch.testing.assert_close(d_v[0, :, :, 0].T, keep.sum(1) / (34 * 0.75), rtol=1e-5, atol=1e-6)
    # dS = P (Z / (1 - p) - delta) with delta the row's output
    d_s = (keep / 0.75 - keep.sum(2, keepdim=True) / (34 * 0.75)) / 34
    torch.testing.assert_close(d_bias[0], d_s, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 40, 130])
def test_tiles_do_not_matter(head_dim: int, dtype: torch.dtype, device: str) -> None:
    """Tiles differ by dtype and head dimension (on a GPU more than in the interpreter); what is dropped does not."""
    q, k = (torch.zeros(1, 40, 1, head_dim, device=device, dtype=dtype) for _ in range(2))
    v = torch.eye(40, device=device, dtype=dtype)[None, :, None]
    out = tileflash.attention(q, k, v, dropout_p=0.5, dropout_seed=(3, 4), causal=True, backend="triton")
    visible = torch.ones(40, 40, device=device).tril().bool()
    keep = kept(torch.tensor([3, 4]), 0.5, torch.arange(1), 0, 40, 40)[0].to(device)
    assert torch.equal(out[0, :, 0] != 0, visible & keep)


@pytest.mark.parametrize("backend", OURS)
def test_packed_sequences_drop_what_padded_ones_drop(backend: str, device: str) -> None:
    """Positions count within a sequence: packing does not change what is dropped, nor does slack behind the last one."""
    lengths = ((33, 35), (0, 3), (7, 5))
    bounds = [[0, *itertools.accumulate(side)] for side in zip(*lengths, strict=True)]
    cu_q, cu_k = (torch.tensor(side, dtype=torch.int32, device=device) for side in bounds)
    q, k = (torch.zeros(side[-1] + 2, 2, 16, device=device) for side in bounds)
    ours = dropped(q, k, 0.4, (11, 12), backend, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    padded = kept(torch.tensor([11, 12]), 0.4, torch.arange(6), 0, 33, 35).view(3, 2, 33, 35).to(device)
    for number, (rows, columns) in enumerate(lengths):
        at_q, at_k = bounds[0][number], bounds[1][number]
        own = ours[:, at_q : at_q + rows, at_k : at_k + columns]
        assert torch.equal(~own, padded[number, :, :rows, :columns])


@pytest.mark.parametrize("backend", OURS)
def test_heads_batches_seeds_and_offsets_differ(backend: str, device: str) -> None:
    q = torch.zeros(2, 33, 2, 16, device=device)
    masks = [*dropped(q, q, 0.5, 1, backend).flatten(0, 1)]
    masks += [dropped(q, q, 0.5, seed, backend)[0, 0] for seed in (2, 1 << 33, (1, 1), (1, 1 << 32), -1)]
    for one, other in itertools.combinations(masks, 2):
        assert 0.4 < (one == other).float().mean() < 0.6


def test_an_undrawn_seed_is_new_with_each_call_and_the_generators(device: str) -> None:
    q = torch.zeros(1, 33, 1, 16, device=device)
    assert not torch.equal(dropped(q, q, 0.5, None, "tiled"), dropped(q, q, 0.5, None, "tiled"))
    masks = []
    for backend in OURS:
        torch.manual_seed(5)
        masks.append(dropped(q, q, 0.5, None, backend))
    for backend in OURS:
        generator = torch.Generator(device).manual_seed(5)
        masks.append(dropped(q, q, 0.5, None, backend, generator=generator))
    assert all(torch.equal(mask, masks[0]) for mask in masks[1:])


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_asked_and_independently(p: float) -> None:
    """Frequencies over all, over each head, row and column within six sigma; neighbours, mirror images and heads uncorrelated."""
    heads, size = 4, 512
    drop = (~kept(torch.tensor([20, 30]), p, torch.arange(heads), 0, size, size)).double()
    for dims in ((0, 1, 2), (1, 2), (0, 2), (0, 1)):
        count = math.prod(drop.shape[dim] for dim in dims)
        assert (drop.mean(dims) - p).abs().max() < 6 * (p * (1 - p) / count) ** 0.5
    centred = (drop - p) / (p * (1 - p)) ** 0.5
    others = [centred.roll(1, 2), centred.roll(4, 2), centred.roll(1, 1), centred.roll(1, 0), centred.transpose(1, 2)]
    for other in others:
        assert abs((centred * other).mean().item()) < 6 / drop.numel() ** 0.5


@pytest.mark.parametrize("p", [0.0, 2.0**-40, 0.3, 1 - 2.0**-40])
def test_the_threshold_is_the_probability_in_31_bits(p: float) -> None:
    assert abs(drop_below(p) / 2**31 - p) <= 2.0**-31
    assert 0 <= drop_below(p) < 2**31
