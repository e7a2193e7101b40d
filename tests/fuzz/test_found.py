"""What the fuzzer has found, shrunk by it: each was wrong once."""

from __future__ import annotations

import pytest
import torch

from tileflash.fuzz import Problem, examine

FOUND = {
    # 0 * (the soft cap's derivative at a key that is NaN) in d_q
    "soft cap and a hidden NaN": Problem(
        options=("softcap", "mask_keys"),
        lengths=((4, 2),),
        window=(10, None),
        heads=3,
        kv_heads=1,
        seed=521553724,
        poison="unseen-nan",
    ),
    # the grid of d_bias divided by the tiles of a bias without elements
    "bias without keys": Problem(options=("bias",), sq=3, sk=0),
    # K and V of no bytes share the L2 cache
    "sinks and no keys, causal": Problem(options=("sinks",), sq=3, sk=0, causal=True),
    "packed sequences without keys, window": Problem(lengths=((1, 0),), window=(0, None)),
    "bias without queries": Problem(options=("bias_queries",), sq=0, sk=3),
    # products over 16 keys of which a mask and dropout decide: where something is not finite, and everywhere in wide heads
    "mask, dropout and hidden Inf": Problem(
        options=("dropout", "mask_keys"), sq=47, sk=59, window=(20, None), dtype=torch.bfloat16, poison="unseen-inf"
    ),
    "mask and dropout in wide heads": Problem(
        options=("dropout", "mask_keys"), sq=21, sk=40, d=264, dv=264, heads=1, kv_heads=1, dtype=torch.bfloat16
    ),
    "batch of none": Problem(options=("bias", "sinks"), batch=0),
}


@pytest.mark.parametrize("backend", ["triton", "tiled"])
@pytest.mark.parametrize("name", FOUND)
def test_it_is_right_now(name: str, backend: str, device: str) -> None:
    assert examine(FOUND[name], backend, device) == []
