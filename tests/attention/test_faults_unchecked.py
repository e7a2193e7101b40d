"""Wrong lengths of packed sequences: named where somebody looks at them, harmless where nobody does."""

from __future__ import annotations

import pytest
import torch

import tileflash

NAN = float("nan")
OURS = ["triton", "tiled", "reference"]


@pytest.mark.parametrize(
    ("which", "values", "said"),
    [
        ("cu_seqlens_q", [0, 5, 4, 10], r"cu_seqlens_q must not fall, but entry 2 is 4 behind 5"),
        ("cu_seqlens_k", [0, 5, 9, 13], r"cu_seqlens_k must end at or before the 12 rows there are, got 13"),
        ("cu_seqlens_q", [0, 5, 9, 2**31 - 1], r"cu_seqlens_q must end at or before the 10 rows"),
        ("cu_seqlens_k", [-1, 5, 9, 12], r"cu_seqlens_k must begin with 0, got -1"),
        ("cu_seqlens_k", [1, 5, 9, 12], r"cu_seqlens_k must begin with 0, got 1"),
        ("cu_seqlens_q", [0, -3, 9, 10], r"cu_seqlens_q must not fall, but entry 1 is -3 behind 0"),
    ],
)
def test_wrong_cu_seqlens_are_named(which: str, values: list[int], said: str, device: str) -> None:
    """flash-attention#1311, PR#2333, xformers#1122 (lengths that mismatch are read past, silently)."""
    cu = {"cu_seqlens_q": [0, 5, 9, 10], "cu_seqlens_k": [0, 5, 9, 12]} | {which: values}
    q, k = torch.randn(10, 1, 16, device=device), torch.randn(12, 1, 16, device=device)
    tensors = {name: torch.tensor(ends, dtype=torch.int32, device=device) for name, ends in cu.items()}
    for backend in ("auto", *OURS):
        with pytest.raises(ValueError, match=said):
            tileflash.attention_varlen(q, k, k, **tensors, validate=True, backend=backend)


def test_a_bound_that_is_too_small_is_named(device: str) -> None:
    q = torch.randn(10, 1, 16, device=device)
    cu = torch.tensor([0, 7, 10], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="max_seqlen_k is 6, and a sequence has 7"):
        tileflash.attention_varlen(q, q, q, cu, cu, max_seqlen_q=7, max_seqlen_k=6, validate=True)
    with pytest.raises(ValueError, match="must have as many entries as cu_seqlens_q, 3, got 2"):
        tileflash.attention_varlen(q, q, q, cu, cu[:2])


@pytest.mark.parametrize(
    "wrong", [[0, 50, 9, 10], [0, 5, 9, 2**31 - 1], [-7, 5, -(2**31), 10], [10, 9, 5, 0], [3, 3, 3, 3]], ids=str
)
@pytest.mark.parametrize("which", ["q", "k", "both"])
def test_wrong_cu_seqlens_touch_nothing_outside(which: str, wrong: list[int], device: str) -> None:
    """Without validation the result is wrong, but only the tensors' own rows are read and written (NaN stands around them)."""
    right = [0, 5, 9, 10]
    around = [torch.full((30, 1, 16), NAN, device=device) for _ in range(3)]
    inside = [rows[10:20] for rows in around]
    for rows in inside:
        rows.normal_()
    q, k, v = (rows.detach().requires_grad_() for rows in inside)
    cu_q, cu_k = (
        torch.tensor(wrong if which in (side, "both") else right, dtype=torch.int32, device=device) for side in "qk"
    )
    out, lse = tileflash.attention_varlen(
        q, k, v, cu_q, cu_k, causal=True, return_lse=True, validate=False, backend="triton"
    )
    written = out.isfinite().flatten(1).all(1)  # rows that nobody wrote hold whatever was there
    torch.autograd.grad(out[written].sum(), (q, k, v))
    if which == "k":  # every query has its row then, made of keys within the tensor alone
        assert bool(out.isfinite().all())
    assert out.shape == (10, 1, 16)
    assert lse.shape == (1, 10)
    for rows in around:
        assert bool(rows[:10].isnan().all() and rows[20:].isnan().all() and rows[10:20].isfinite().all())


@pytest.mark.parametrize("kind", ["bias", "mask"])
def test_a_sequence_longer_than_its_bound_takes_the_last_places(kind: str, device: str) -> None:
    """Nobody validated: a bias that is too small is not read behind its end, where NaN or another sequence's rows lie."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(rows, 1, 32, generator=generator).to(device) for rows in (54, 55, 55))
    cu_q, cu_k = (torch.tensor(ends, dtype=torch.int32, device=device) for ends in ([0, 20, 54], [0, 18, 55]))
    small = torch.randn(2, 1, 20, 18, generator=torch.Generator().manual_seed(4)).to(device)
    if kind == "mask":
        small = small < 1
        small[..., -1] = True
    around = torch.full((2, 1, 60, 60), NAN, device=device) if kind == "bias" else torch.zeros(2, 1, 60, 60).to(small)
    around[:, :, :20, :18] = small
    given = around[:, :, :20, :18].requires_grad_(kind == "bias")
    out = tileflash.attention_varlen(
        q, k, v, cu_q, cu_k, bias=given, max_seqlen_q=20, max_seqlen_k=18, validate=False, backend="triton"
    )
    rows, columns = torch.arange(34).clamp(max=19), torch.arange(37).clamp(max=17)
    biases = (small[0], small[1][:, rows][:, :, columns])
    for queries, keys, own in zip((slice(0, 20), slice(20, 54)), (slice(0, 18), slice(18, 55)), biases, strict=True):
        one = tileflash.attention(q[None, queries], k[None, keys], v[None, keys], bias=own, backend="reference")
        torch.testing.assert_close(out[queries], one[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize(
    "wrong", [[0, 5, 3, 8], [2, 5, 8, 8], [0, 50, 9, 9], [-7, 5, 8, 8], [8, 5, 3, 0], [3, 3, 3, 3]], ids=str
)
@pytest.mark.parametrize("which", ["q", "k", "both"])
def test_wrong_cu_seqlens_keep_the_shapes(which: str, wrong: list[int], backend: str, device: str) -> None:
    """As the fake implementation says them: under torch.compile nobody looks, and what follows trusts the shape."""
    right = [0, 3, 5, 8]
    q, k, v = (torch.randn(8, 2, 16, device=device, requires_grad=True) for _ in range(3))
    cu_q, cu_k = (
        torch.tensor(wrong if which in (side, "both") else right, dtype=torch.int32, device=device) for side in "qk"
    )
    out, lse = tileflash.attention_varlen(
        q, k, v, cu_q, cu_k, causal=True, return_lse=True, validate=False, backend=backend
    )
    assert (out.shape, lse.shape) == ((8, 2, 16), (2, 8))
    if out.requires_grad:
        for gradient in torch.autograd.grad(out.sum(), (q, k, v), materialize_grads=True, allow_unused=True):
            assert gradient.shape == (8, 2, 16)
            assert bool(gradient.isfinite().all())
