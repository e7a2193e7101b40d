"""What attention costs at least on a GPU: FLOPs and bytes counted by hand, against the GPU's published peaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tileflash.attention.band import Band
from tileflash.gpu_peaks import Gpu

Direction = Literal["forward", "backward"]
_BACKWARD_FACTOR = 2.5  # five matrix products (scores again, dV, dP, dQ, dK) against two


def visible_pairs(seq_q: int, seq_k: int, causal: bool) -> int:
    """How many (query, key) pairs of one head are visible; causal is bottom-right: key j <= i + seq_k - seq_q."""
    return Band.of(causal, (None, None), seq_q, seq_k).visible_pairs(seq_q, seq_k)


@dataclass(frozen=True)
class AttentionWork:
    """Work of one attention call.

    `flops`: 2 per multiply-add of the matrix products over visible pairs only: 4 B H pairs D forward, x 2.5 backward.
    `conventional_flops`: the field's count, 4 B H Sq Sk D, halved when causal; what TFLOP/s figures are quoted in.
    `bytes`: each input read once and each output written once.
    """

    flops: float
    conventional_flops: float
    bytes: float

    def limit_ms(self, gpu: Gpu | None) -> float | None:
        """The time that no kernel can beat (roofline): the slower of arithmetic and memory; None for unknown GPUs."""
        if gpu is None:
            return None
        return max(self.flops / (gpu.bf16_tflops * 1e12), self.bytes / (gpu.memory_gb_per_s * 1e9)) * 1e3

    def tflops(self, time_ms: float) -> float:
        """Conventional TFLOP/s of a call that took `time_ms`."""
        return self.conventional_flops / (time_ms * 1e-3) / 1e12


def attention_work(
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    seq_q: int,
    seq_k: int,
    head_dim: int,
    causal: bool,
    direction: Direction,
    itemsize: int = 2,
) -> AttentionWork:
    """Count the work of attention on q [batch, seq_q, heads, head_dim] and k, v [batch, seq_k, kv_heads, head_dim] of
    `itemsize` bytes an element. The log-sum-exp [batch, heads, seq_q] is fp32."""
    factor = 1.0 if direction == "forward" else _BACKWARD_FACTOR
    per_pair = 4.0 * batch * heads * head_dim * factor
    query_bytes = batch * seq_q * heads * head_dim * itemsize
    key_value_bytes = 2 * batch * seq_k * kv_heads * head_dim * itemsize
    lse_bytes = batch * heads * seq_q * 4
    moved_bytes = {
        "forward": 2 * query_bytes + key_value_bytes + lse_bytes,  # reads q, k, v; writes out, lse
        "backward": 4 * query_bytes
        + 2 * key_value_bytes
        + lse_bytes,  # reads q, k, v, out, d_out, lse; writes dq, dk, dv
    }
    return AttentionWork(
        flops=per_pair * visible_pairs(seq_q, seq_k, causal),
        conventional_flops=per_pair * seq_q * seq_k * (0.5 if causal else 1.0),
        bytes=float(moved_bytes[direction]),
    )
