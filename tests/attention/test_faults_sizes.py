"""Sizes at which other kernels overflowed, refused or ran out of memory: cases of issues, on a GPU, held against fp64 at sampled places.

Elsewhere: batch x heads above 65,535 by 40,000 x 2, offsets beyond 2^31 elements over the batch and along a sequence
(test_semantics.py), 80,000 packed sequences (test_faults_varlen.py), memory of plain attention (test_torch_integration.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tileflash

pytestmark = pytest.mark.gpu


def draw(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(len(shapes))
    return [
        torch.empty(shape, device="cuda", dtype=dtype).normal_(generator=generator).requires_grad_() for shape in shapes
    ]


def run(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """out, the gradients of q, k, v, and the gradient that came in."""
    out = tileflash.attention(q, k, v, backend="triton", **options)
    d_out = torch.empty_like(out).normal_()
    return out.detach(), torch.autograd.grad(out, (q, k, v), d_out), d_out


def assert_close(name: str, ours: Tensor, want: Tensor) -> None:
    tolerance = 2e-2 if ours.dtype == torch.bfloat16 else 2e-4
    torch.testing.assert_close(
        ours.double(), want, rtol=tolerance, atol=tolerance * max(1.0, want.abs().max().item()),
        msg=lambda text: f"{name}: {text}",
    )  # fmt: skip


def assert_entries(
    q: Tensor, k: Tensor, v: Tensor, ran: tuple[Tensor, tuple[Tensor, ...], Tensor], entries: list[int], **options: Any
) -> None:
    """Whole batch entries, forward and backward."""
    out, gradients, d_out = ran
    own = [t[entries].detach().double().requires_grad_() for t in (q, k, v)]
    want = tileflash.attention(*own, backend="reference", **options)
    assert_close("out", out[entries], want.detach())
    expected = torch.autograd.grad(want, own, d_out[entries].double())
    for name, ours, theirs in zip(("d_q", "d_k", "d_v"), gradients, expected, strict=True):
        assert_close(name, ours[entries], theirs)


def assert_rows(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, d_out: Tensor, d_q: Tensor, places: list[tuple[int, int, int]],
    bias: Tensor | None = None,
) -> None:  # fmt: skip
    """Single rows (batch, query, head) of a causal square problem: output and d_q, in fp64."""
    for batch, row, head in places:
        kv_head = head * k.shape[2] // q.shape[2]
        query = q[batch, row, head].detach().double()
        keys, values = (t[batch, : row + 1, kv_head].detach().double() for t in (k, v))
        scale = q.shape[3] ** -0.5
        logits = keys @ query * scale
        if bias is not None:
            own = bias[batch, head, row, : row + 1]
            logits = logits.masked_fill(~own, -torch.inf) if own.dtype == torch.bool else logits + own.double()
        weights = torch.softmax(logits, 0)
        want = weights @ values
        gradient = d_out[batch, row, head].double()
        d_logits = weights * (values @ gradient - gradient @ want)
        assert_close(f"out {batch, row, head}", out[batch, row, head], want)
        assert_close(f"d_q {batch, row, head}", d_q[batch, row, head], d_logits @ keys * scale)


@pytest.mark.parametrize("options", [{}, {"causal": True, "dropout_p": 0.0, "softcap": 20.0}], ids=["plain", "options"])
def test_many_batch_entries_of_one_token(options: dict[str, Any]) -> None:
    """flash-attention PR#2260, #1500: batch 8300, length 1, 16 heads of 128, backward: int32 overflow."""
    q, k, v = draw(*[(8300, 1, 16, 128)] * 3)
    assert_entries(q, k, v, run(q, k, v, **options), [0, 1, 4095, 4096, 8298, 8299], **options)


def test_65_536_batch_entries_of_16_heads() -> None:
    """pytorch#142228, #146704, xformers#845, flashinfer#3125: (65536, 16, 80) was an invalid configuration. A million programs."""
    q, k, v = draw(*[(65_536, 4, 16, 80)] * 3)
    assert_entries(q, k, v, run(q, k, v, causal=True), [0, 4095, 32_768, 65_534, 65_535], causal=True)


def test_65_536_batch_entries_of_length_16() -> None:
    """The same numbers read as [batch, length, head dimension], and lengths on both sides that differ."""
    q, k, v = draw((65_536, 16, 1, 80), (65_536, 17, 1, 80), (65_536, 17, 1, 80))
    assert_entries(q, k, v, run(q, k, v, window=(5, 1)), [0, 65_535, 40_000], window=(5, 1))


def test_more_than_two_to_the_31_elements_in_the_result() -> None:
    """fla#1080, sglang#20389: batch * length * heads * head dimension beyond 2^31, here in q, k, v and all results (contiguous)."""
    q, k, v = draw((5, 16_500, 128, 256), (5, 130, 1, 256), (5, 130, 1, 256))
    assert q.numel() > 2**31
    out = tileflash.attention(q, k, v, backend="triton")
    (d_q,) = torch.autograd.grad(out, q, out.detach())
    for batch, row, head in ((0, 0, 0), (4, 16_499, 127), (3, 16_383, 64), (4, 16_000, 1)):
        query = q[batch, row, head].detach().double()
        keys, values = (t[batch, :, 0].detach().double() for t in (k, v))
        weights = torch.softmax(keys @ query / 16, 0)
        want = weights @ values
        assert_close("out", out[batch, row, head].detach(), want)
        gradient = out[batch, row, head].detach().double()
        d_logits = weights * (values @ gradient - gradient @ want)
        assert_close("d_q", d_q[batch, row, head], d_logits @ keys / 16)


def test_a_long_sequence_of_a_wide_model() -> None:
    """flash-attention#767: 256k tokens of 6144 and more: one sequence's rows start beyond 2^31 elements. Few queries, all keys."""
    rows = torch.empty(1, 360_000, 48, 128, device="cuda", dtype=torch.bfloat16)
    assert rows.numel() > 2**31
    k = rows[:, :, 46:47].normal_().detach().requires_grad_()
    v = rows[:, :, 47:48].normal_().detach().requires_grad_()
    (q,) = draw((1, 64, 1, 128))
    ran = run(q, k, v, causal=True)
    own = [t.detach().double().requires_grad_() for t in (q, k, v)]
    want = tileflash.attention(*own, causal=True, backend="reference")
    assert_close("out", ran[0], want.detach())
    for name, ours, theirs in zip(
        ("d_q", "d_k", "d_v"), ran[1], torch.autograd.grad(want, own, ran[2].double()), strict=True
    ):
        assert_close(name, ours[:, -1000:], theirs[:, -1000:])


@pytest.mark.parametrize("kind", ["mask", "bias"])
def test_a_mask_of_more_than_two_to_the_31_elements(kind: str) -> None:
    """fa2-custom-mask#2: [8, 28, 4096, 4096] is 3.8e9 elements: wrong rows of the mask were read."""
    shape = (8, 28, 4096, 4096)
    bias = torch.empty(shape, device="cuda", dtype=torch.bool if kind == "mask" else torch.bfloat16)
    for part in bias:
        part.copy_(torch.rand(part.shape, device="cuda") < 0.5) if kind == "mask" else part.normal_()
    if kind == "mask":
        bias[..., 0] = True  # the first query sees something
    q, k, v = draw((8, 4096, 28, 64), (8, 4096, 4, 64), (8, 4096, 4, 64))
    out, (d_q, *_), d_out = run(q, k, v, bias=bias, causal=True)
    places = [(0, 0, 0), (0, 4095, 27), (4, 2048, 14), (7, 4095, 27), (7, 1, 26), (5, 333, 3)]
    assert_rows(q, k, v, out, d_out, d_q, places, bias)


def peak(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> int:
    """Bytes of a forward and backward pass above what its inputs take."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = tileflash.attention(q, k, v, **options)
    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_wide_heads_in_linear_memory() -> None:
    """transformers#46960: grouped heads of 512 at length 8192 fell back in silence and ran out of memory."""
    q, k, v = draw((1, 8192, 8, 512), (1, 8192, 2, 512), (1, 8192, 2, 512))
    out, (d_q, *_), d_out = run(q, k, v, causal=True)
    assert_rows(q, k, v, out, d_out, d_q, [(0, 0, 0), (0, 8191, 7), (0, 4096, 4), (0, 63, 1)])
    assert peak(q, k, v, causal=True) < 8 * q.numel() * q.element_size()  # the logits alone would be 16 times q in bf16
    assert tileflash.explain(q, k, v, causal=True).choice == "triton"


@pytest.mark.parametrize(
    ("head_dim", "dtype", "options"),
    [
        (128, torch.bfloat16, {"causal": True}),
        (128, torch.bfloat16, {"bias": "keys", "softcap": 30.0, "dropout_p": 0.1}),
        (128, torch.float32, {"window": (1000, 0)}),
        (256, torch.bfloat16, {"alibi_slopes": True}),
    ],
)
def test_memory_grows_with_the_length(head_dim: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """ComfyUI#15135 (28 and 4 heads, with a mask, fp32, 256), pytorch#134756: nothing of Sq x Sk is made on the way."""

    def of_length(length: int) -> int:
        heads, kv_heads = (28, 4) if dtype == torch.bfloat16 else (7, 1)
        q, k, v = draw(
            (1, length, heads, head_dim), (1, length, kv_heads, head_dim), (1, length, kv_heads, head_dim), dtype=dtype
        )
        own = dict(options)
        if own.get("bias") == "keys":
            own["bias"] = torch.rand(1, 1, 1, length, device="cuda") < 0.5
        if "alibi_slopes" in own:
            own["alibi_slopes"] = torch.rand(heads, device="cuda")
        return peak(q, k, v, **own)

    of_length(512)  # compiles
    short, long = of_length(2048), of_length(8192)
    assert long < 4.5 * short + 2**20


def test_packed_sequences_in_flat_memory_under_compile() -> None:
    """pytorch#165407: varlen under compile leaked."""
    (q,) = draw((4096, 4, 64))
    attend = torch.compile(tileflash.attention_varlen, fullgraph=True)

    def step(cut: int) -> None:
        cu = torch.tensor([0, cut, 4096], dtype=torch.int32, device="cuda")
        attend(q, q, q, cu, cu, causal=True).float().sum().backward()
        q.grad = None

    for cut in range(3):
        step(cut)
    before = torch.cuda.memory_allocated()
    for cut in range(20):
        step(100 * cut)
    assert torch.cuda.memory_allocated() <= before + 2**20
