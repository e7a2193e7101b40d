"""Work is counted right (against counting by brute force) and the limit is the slower of arithmetic and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tileflash.bench.roofline import attention_work, visible_pairs
from tileflash.gpu_peaks import find_gpu


@pytest.mark.parametrize("seq_q", [0, 1, 2, 5, 8, 13])
@pytest.mark.parametrize("seq_k", [0, 1, 4, 8, 11])
def test_visible_pairs_by_brute_force(seq_q: int, seq_k: int) -> None:
    visible = torch.arange(seq_k)[None, :] <= torch.arange(seq_q)[:, None] + seq_k - seq_q
    assert visible_pairs(seq_q, seq_k, causal=True) == int(visible.sum())
    assert visible_pairs(seq_q, seq_k, causal=False) == seq_q * seq_k


def _work(**changes: Any) -> Any:
    case: dict[str, Any] = {
        "batch": 2, "heads": 8, "kv_heads": 8, "seq_q": 64, "seq_k": 64, "head_dim": 32, "causal": False,
        "direction": "forward",
    }  # fmt: skip
    return attention_work(**(case | changes))


def test_flops_equal_those_of_the_matrix_products() -> None:
    """PyTorch's own counter, on the unfused chain: two products forward; backward four, and the scores once more."""
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = (torch.randn(2, 8, 64, 32, requires_grad=True) for _ in range(3))
    counter = FlopCounterMode(display=False)
    with counter:
        out = torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v
    forward = counter.get_total_flops()
    assert _work().flops == _work().conventional_flops == forward
    with counter:
        out.sum().backward()
    again = forward / 2
    assert _work(direction="backward").flops == counter.get_total_flops() + again


def test_causal_exact_and_conventional() -> None:
    causal = _work(causal=True)
    assert causal.conventional_flops == _work().flops / 2
    assert causal.flops == 4 * 2 * 8 * 32 * (64 * 65 // 2)
    assert _work(causal=True, seq_q=1).flops == 4 * 2 * 8 * 32 * 64  # decode: the one query sees all


def test_bytes() -> None:
    element = 2 * 64 * 8 * 32 * 2
    lse = 2 * 8 * 64 * 4
    assert _work().bytes == 4 * element + lse
    assert _work(direction="backward").bytes == 8 * element + lse
    assert _work(kv_heads=2).bytes == 2 * element + 2 * element / 4 + lse
    assert _work(itemsize=4).bytes == 8 * element + lse


def test_limit_and_tflops() -> None:
    h200 = find_gpu("NVIDIA H200")
    big = _work(batch=4, heads=16, kv_heads=16, seq_q=4096, seq_k=4096, head_dim=128)
    assert big.limit_ms(h200) == pytest.approx(4 * 4 * 16 * 4096**2 * 128 / 989.4e12 * 1e3)
    assert big.tflops(big.limit_ms(h200)) == pytest.approx(989.4)
    decode = _work(seq_q=1, seq_k=65536)
    assert decode.limit_ms(h200) == pytest.approx(decode.bytes / 4800e9 * 1e3)
    assert big.limit_ms(None) is None
