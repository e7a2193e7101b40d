"""The backend `tiled` in many strips of queries: the other tests' problems all fit into one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.optioned import OPTIONS, Problem, check
from tileflash.attention import tiled

SHAPES = {
    "square": Problem(sq=37, sk=37, causal=True, heads=2, kv_heads=1),
    "window": Problem(sq=37, sk=50, window=(20, 3), d=24, dv=8),
    "packed": Problem(lengths=((33, 34), (0, 7), (20, 35)), heads=2, kv_heads=1, causal=True, slack=3),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("option", [*OPTIONS, "none"])
def test_each_option_in_strips(option: str, shape: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_seen = []

    def rows(batch: int, heads: int, key_length: int) -> int:
        rows_seen.append(batch * heads * key_length)
        return 7  # divides none of the lengths: the last strip is a short one

    monkeypatch.setattr(tiled, "strip_rows", rows)
    options = () if option == "none" else (option,)
    check(replace(SHAPES[shape], options=options, seed=len(option)), "tiled", device)
    assert rows_seen


def test_a_strip_keeps_within_its_bound() -> None:
    for batch, heads, key_length in ((1, 1, 1), (4, 16, 4096), (1, 1, 10**9), (0, 1, 5), (3, 0, 5), (3, 1, 0)):
        rows = tiled.strip_rows(batch, heads, key_length)
        assert rows >= 1
        assert rows == 1 or batch * heads * key_length * rows <= tiled._STRIP_ELEMENTS


def test_strips_give_what_one_gives(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout, too: what is dropped is a matter of positions, not of strips."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_out = (torch.randn(1, 40, 2, 8, generator=generator).to(device) for _ in range(4))
    options = tiled.Options(dropout_p=0.4, rng=torch.tensor([3, 9], device=device))
    results = []
    for rows in (40, 7, 1):
        monkeypatch.setattr(tiled, "strip_rows", lambda *_, rows=rows: rows)
        out, lse = tiled.tiled_forward(q, k, v, 0.3, None, 0, options)
        results.append((out, lse, *tiled.tiled_backward(d_out, None, q, k, v, out, lse, 0.3, None, 0, options)[:3]))
    for one in results[1:]:
        for ours, want in zip(one, results[0], strict=True):
            torch.testing.assert_close(ours, want, rtol=1e-5, atol=1e-6)
