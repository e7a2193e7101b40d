"""Bands against their definition, written out pair by pair."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tileflash
from tileflash.attention.band import Band

BOUNDS = st.one_of(st.none(), st.integers(0, 12))


def visible(i: int, j: int, causal: object, window: tuple[int | None, int | None], sq: int, sk: int) -> bool:
    shift = 0 if causal == "top-left" else sk - sq
    left, right = window
    if causal and j > i + shift:
        return False
    if left is not None and j < i + shift - left:
        return False
    return right is None or j <= i + shift + right


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([False, True, "top-left", "bottom-right"]),
    st.tuples(BOUNDS, BOUNDS),
)
def test_mask_and_count_follow_the_definition(
    sq: int, sk: int, causal: object, window: tuple[int | None, int | None]
) -> None:
    band = Band.of(causal, window, sq, sk)  # type: ignore[arg-type]
    expected = torch.tensor([[visible(i, j, causal, window, sq, sk) for j in range(sk)] for i in range(sq)])
    assert torch.equal(band.mask(0, sq, sk), expected)
    assert torch.equal(band.mask(sq // 2, sq, sk), expected[sq // 2 :])
    assert band.visible_pairs(sq, sk) == int(expected.sum())
    assert not band.is_full or bool(expected.all())
    if band.is_square_causal(sq, sk):
        assert torch.equal(expected, torch.ones(sq, sk).tril().bool())


@pytest.mark.parametrize(("sq", "sk"), [(40, 40), (17, 40), (40, 17)])
def test_a_window_of_all_keys_is_causal_bit_for_bit(sq: int, sk: int, device: str) -> None:
    q, k, v = (torch.randn(2, length, 2, 16, device=device, requires_grad=True) for length in (sq, sk, sk))
    for backend in ("triton", "tiled", "reference"):
        outs = [tileflash.attention(q, k, v, backend=backend, **kw) for kw in ({"causal": True}, {"window": (sk, 0)})]
        assert torch.equal(outs[0], outs[1])
        grads = [torch.autograd.grad(out.sum(), (q, k, v)) for out in outs]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_counts_stay_exact_where_floats_would_not() -> None:
    length = 2**20 + 1
    assert Band(None, 0).visible_pairs(length, length) == length * (length + 1) // 2
    assert Band(-5, 0).visible_pairs(length, length) == 6 * length - 15


def test_every_small_band_is_counted_right() -> None:
    for sq, sk, low, high in itertools.product(range(4), range(4), [None, *range(-5, 6)], [None, *range(-5, 6)]):
        band = Band(low, high)
        assert band.visible_pairs(sq, sk) == int(band.mask(0, sq, sk).sum()), (sq, sk, low, high)
