"""What the fuzzer has found, shrunk by it: each was wrong once."""

from __future__ import annotations

import pytest

from tileflash.fuzz import Problem, examine

FOUND = {
    # 0 * (the soft cap's derivative at a key that is NaN) in d_q
    "soft cap and a hidden NaN": Problem(
        options=("softcap", "mask"), sq=2, sk=40, poison="unseen-nan", causal="top-left"
    ),
    "soft cap and a hidden NaN, band": Problem(
        options=("softcap",), sq=2, sk=40, poison="unseen-nan", causal="top-left"
    ),
    # the grid of d_bias divided by the tiles of a bias without elements
    "bias without keys": Problem(options=("bias",), sq=3, sk=0),
    "bias without queries": Problem(options=("bias_queries",), sq=0, sk=3),
    "batch of none": Problem(options=("bias", "sinks"), batch=0),
}


@pytest.mark.parametrize("backend", ["triton", "tiled"])
@pytest.mark.parametrize("name", FOUND)
def test_it_is_right_now(name: str, backend: str, device: str) -> None:
    assert examine(FOUND[name], backend, device) == []
