"""Packed sequences at their edges: the cases of issues, their neighbours, and the same without packing.

Not ours yet: paged caches (flashinfer#4452, #760, #945, flash-attention#1579, onnxruntime-genai#2568), context parallelism (#1807).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tileflash

NAN = float("nan")
OURS = ["triton", "tiled", "reference"]


def packed(
    q_ends: list[int], k_ends: list[int], device: str, slack: int = 0, heads: int = 1, kv_heads: int = 1, **more: Any
) -> list[Tensor]:
    """q, k, v that require gradients, cu_seqlens_q, cu_seqlens_k; `slack` rows of NaN behind the last sequence."""
    generator = torch.Generator().manual_seed(len(q_ends) + q_ends[-1])
    tensors = []
    for end, count, width in ((q_ends[-1], heads, 32), (k_ends[-1], kv_heads, 32), (k_ends[-1], kv_heads, 16)):
        rows = torch.randn(end + slack, count, width, generator=generator)
        rows[end:] = NAN
        tensors.append(rows.to(device, more.get("dtype", torch.float32)).requires_grad_())
    cu = (torch.tensor(ends, dtype=torch.int32, device=device) for ends in (q_ends, k_ends))
    return [*tensors, *cu]


def each_by_itself(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """What attention_varlen must give: `reference` on one sequence after the other, 0 and -inf behind the last."""
    out, lse = q.new_zeros(q.shape[0], q.shape[1], v.shape[2]), q.new_full((q.shape[1], q.shape[0]), -torch.inf).float()
    for n in range(cu_q.shape[0] - 1):
        rows, columns = slice(int(cu_q[n]), int(cu_q[n + 1])), slice(int(cu_k[n]), int(cu_k[n + 1]))
        one, one_lse = tileflash.attention(
            q[None, rows], k[None, columns], v[None, columns], return_lse=True, backend="reference", **options
        )
        out[rows], lse[:, rows] = one[0], one_lse[0]
    return out, lse


def check(tensors: list[Tensor], backend: str, **options: Any) -> None:
    """Output, log-sum-exp and gradients, of rows in sequences and of slack rows, whose gradient is NaN coming in and 0 going out."""
    q, k, v, cu_q, cu_k = tensors
    out, lse = tileflash.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, backend=backend, **options)
    options.pop("max_seqlen_q", None)
    want, want_lse = each_by_itself(q, k, v, cu_q, cu_k, **options)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if q.dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(out, want, **tolerance)
    torch.testing.assert_close(lse, want_lse, **tolerance)
    if not (out.requires_grad and lse.requires_grad):
        assert backend == "reference"  # autograd alone: zeros made of nothing have no graph
        return
    generator = torch.Generator().manual_seed(1)
    d_out = torch.randn(out.shape, generator=generator).to(out)
    d_lse = torch.randn(lse.shape, generator=generator).to(lse)
    d_out[int(cu_q[-1]) :], d_lse[:, int(cu_q[-1]) :] = NAN, NAN
    d_lse = d_lse.masked_fill(want_lse == -torch.inf, 0.0) if backend == "reference" else d_lse
    ours = torch.autograd.grad((out, lse), (q, k, v), (d_out, d_lse))
    end = int(cu_q[-1])
    inside = [want[:end], want_lse[:, :end].masked_fill(want_lse[:, :end] == -torch.inf, 0.0)]
    if end and int(cu_k[-1]):
        theirs = torch.autograd.grad(inside, (q, k, v), (d_out[:end], d_lse[:, :end]), materialize_grads=True)
    else:
        theirs = tuple(torch.zeros_like(t) for t in (q, k, v))
    for name, one, other in zip(("d_q", "d_k", "d_v"), ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


CASES = {
    # flash-attention#443: one key a sequence, causal: only each last query sees it; others 0, gradients 0, nothing NaN.
    "one key each": ([0, 76, 110, 256], [0, 1, 2, 3], {"causal": True}),
    "one key each, top-left": ([0, 9, 20, 56], [0, 1, 2, 3], {"causal": "top-left"}),
    # flash-attention#1537: max_seqlen_q is 1, some are empty.
    "at most one query": ([0, 1, 1, 2, 2, 3], [0, 40, 45, 45, 50, 83], {"causal": True, "max_seqlen_q": 1}),
    # flash-attention#1619: fewer queries than sequences, grouped heads.
    "fewer queries than sequences": ([0, 0, 1, 1, 1, 2, 2, 2], [0, 5, 9, 9, 20, 22, 30, 33], {"causal": True}),
    # flash-attention#2562: empty at both ends; the lengths of the issue are in a gpu test.
    "empty at both ends": ([0, 0, 38, 64, 64], [0, 0, 38, 64, 64], {"causal": True}),
    "empty where others are not": ([0, 20, 20, 41], [0, 0, 33, 40], {"window": (5, 2)}),
    # flash-attention PR#2421: no queries at all, no keys at all.
    "no queries": ([0, 0, 0], [0, 5, 40], {}),
    "no keys": ([0, 5, 40], [0, 0, 0], {}),
    "no sequences": ([0], [0], {}),
    "borders on tiles": ([0, 32, 64, 65], [0, 32, 33, 65], {"causal": True}),
}


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("slack", [0, 3])
@pytest.mark.parametrize("name", CASES)
def test_sequences_at_their_edges(name: str, slack: int, backend: str, device: str, poisoned_memory: None) -> None:
    """pytorch#176793, #186786, fla#892: slack rows, here full of NaN, give 0 and get 0, and reach nothing."""
    q_ends, k_ends, options = CASES[name]
    if slack and backend == "triton" and device == "cpu" and q_ends[-1] > 100:
        q_ends = [0, 36, 50, 66]  # the interpreter is slow
    heads = (4, 2) if name == "fewer queries than sequences" else (1, 1)
    check(packed(q_ends, k_ends, device, slack, *heads), backend, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_same_in_half_precision(dtype: torch.dtype, device: str) -> None:
    for name in ("one key each", "empty at both ends"):
        q_ends, k_ends, options = CASES[name]
        q_ends = [min(end, 60 + n) for n, end in enumerate(q_ends)] if device == "cpu" else q_ends
        check(packed(q_ends, k_ends, device, 3, dtype=dtype), "triton", **options)


@pytest.mark.parametrize("backend", OURS)
def test_no_packing_with_one_key_is_the_same_case(backend: str, device: str) -> None:
    """flash-attention#443, #1778 without packing: queries before the last see nothing."""
    q, k, v = (torch.randn(2, n, 1, 32, device=device).requires_grad_() for n in (34, 1, 1))
    out, lse = tileflash.attention(q, k, v, causal=True, return_lse=True, backend=backend)
    torch.testing.assert_close(out[:, -1], v[:, 0])
    assert torch.equal(out[:, :-1], torch.zeros_like(out[:, :-1]))
    assert bool((lse[:, :, :-1] == -torch.inf).all())
    d_q, d_k, d_v = torch.autograd.grad(out.sum(), (q, k, v))
    torch.testing.assert_close(d_v, torch.ones_like(d_v))
    assert d_q.abs().max() < 1e-5  # a softmax of one key is 1 whatever the key is
    assert d_k.abs().max() < 1e-5


@pytest.mark.parametrize("backend", OURS)
def test_slack_touches_no_gradient_of_options(backend: str, device: str) -> None:
    """Biases, slopes and sinks get their gradients from rows in sequences alone."""
    q, k, v, cu_q, cu_k = packed([0, 20, 34], [0, 18, 35], device, slack=3, heads=2, kv_heads=2)
    leaves = [torch.randn(shape, device=device).requires_grad_() for shape in ((2, 2, 20, 18), (2, 2), (2,))]
    options = dict(zip(("bias", "alibi_slopes", "sinks"), leaves, strict=True))
    options |= {"max_seqlen_q": 20, "max_seqlen_k": 18, "causal": True, "dropout_p": 0.2, "dropout_seed": 5}
    d_out = torch.randn(37, 2, 16, device=device)
    gradients = []
    for end_q, end_k in ((37, 38), (34, 35)):
        out = tileflash.attention_varlen(q[:end_q], k[:end_k], v[:end_k], cu_q, cu_k, backend=backend, **options)
        d_out[34:] = NAN
        gradients.append(torch.autograd.grad(out, leaves, d_out[:end_q]))
    for name, one, other in zip(options, *gradients, strict=False):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("backend", OURS)
def test_nan_of_a_sequence_stays_out_of_the_slopes_of_others(backend: str, device: str) -> None:
    q, k, v, cu_q, cu_k = packed([0, 10, 34], [0, 18, 35], device, heads=2, kv_heads=2)
    slopes = torch.tensor([[0.1, 0.2], [0.3, 0.4]], device=device, requires_grad=True)
    gradients = []
    for poison in (0.0, NAN):
        with torch.no_grad():
            k[3] = poison
        out = tileflash.attention_varlen(q, k, v, cu_q, cu_k, alibi_slopes=slopes, backend=backend)
        gradients.append(torch.autograd.grad(out.sum(), slopes)[0])
    torch.testing.assert_close(gradients[1][1], gradients[0][1])
    assert gradients[1][0].isnan().all()


@pytest.mark.parametrize("backend", OURS)
def test_packed_sequences_with_every_kind_of_mask(backend: str, device: str) -> None:
    """pytorch#170839: varlen together with a mask, here one for each sequence, of strides of its own."""
    q, k, v, cu_q, cu_k = packed([0, 20, 34], [0, 18, 35], device)
    mask = torch.rand(2, 1, 18, 20, generator=torch.Generator().manual_seed(4)).to(device).transpose(2, 3) < 0.6
    out = tileflash.attention_varlen(
        q, k, v, cu_q, cu_k, bias=mask, max_seqlen_q=20, max_seqlen_k=18, causal=True, backend=backend
    )
    for n, (rows, columns) in enumerate(((slice(0, 20), slice(0, 18)), (slice(20, 34), slice(18, 35)))):
        own = mask[n, :, : rows.stop - rows.start, : columns.stop - columns.start]
        one = tileflash.attention(
            q[None, rows], k[None, columns], v[None, columns], bias=own, causal=True, backend="reference"
        )
        torch.testing.assert_close(out[rows], one[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", OURS)
def test_gradients_of_narrow_options_sum_over_many_sequences(backend: str, device: str) -> None:
    """Summed in bf16, a term after the other, a sum stands still from 256 terms on. All terms have one sign here."""
    count, length = (30 if backend == "triton" and device == "cpu" else 300), 2  # the interpreter is slow
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(count * length, 2, 16, generator=generator).to(device) for _ in range(3))
    v = v.abs()
    cu = torch.arange(0, count * length + 1, length, dtype=torch.int32, device=device)
    leaves = {
        "bias": torch.zeros(1, 2, length, 1, device=device),
        "alibi_slopes": torch.full((2,), 0.5, device=device),
        "sinks": torch.zeros(2, device=device),
    }
    gradients = []
    for dtype in (torch.bfloat16, torch.float64):
        own = {name: t.to(dtype).requires_grad_() for name, t in leaves.items()}
        rows = [t.to(torch.promote_types(dtype, torch.float32)) for t in (q, k, v)]
        if dtype == torch.bfloat16:
            out = tileflash.attention_varlen(
                *rows, cu, cu, **own, max_seqlen_q=length, max_seqlen_k=length, backend=backend
            )
        else:  # the formula, a sequence a batch entry
            each = [t.view(count, length, 2, 16) for t in rows]
            away = torch.arange(length, device=device)
            distance = (away[:, None] - away).abs()
            logits = torch.einsum("bihd,bjhd->bhij", each[0], each[1]) / 4
            logits = logits - own["alibi_slopes"][:, None, None] * distance + own["bias"]
            sinks = own["sinks"][None, :, None, None].expand(count, 2, length, 1)
            weights = torch.softmax(torch.cat([logits, sinks], 3), 3)[..., :-1]
            out = torch.einsum("bhij,bjhd->bihd", weights, each[2])
        gradients.append(torch.autograd.grad(out.sum(), list(own.values())))
    for name, ours, want in zip(leaves, *gradients, strict=True):
        torch.testing.assert_close(
            ours.double(), want, rtol=2e-2, atol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("causal", [False, "top-left"])
@pytest.mark.parametrize("bound", [2**30, 2**31 - 1, 2**70])
def test_windows_wider_than_everything(bound: int, causal: Any, backend: str, device: str) -> None:
    """Where a sequence stands is added to the bounds of packed sequences: what is nearly 2^31 must not wrap around."""
    q, k, v, cu_q, cu_k = packed([0, 5, 20], [0, 18, 21], device)
    for window in ((bound, bound), (None, bound)):
        check([q, k, v, cu_q, cu_k], backend, causal=causal, window=window)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 256])
def test_the_lengths_of_an_illegal_access(head_dim: int) -> None:
    """flash-attention#2562: backward of head dimension 256, cu_seqlens [0, 0, 1208, 2048, 2048]."""
    cu = torch.tensor([0, 0, 1208, 2048, 2048], dtype=torch.int32, device="cuda")
    q, k, v = (
        torch.randn(2048, 2, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    out = tileflash.attention_varlen(q, k, v, cu, cu, causal=True, backend="triton")
    want, _ = each_by_itself(q, k, v, cu, cu, causal=True)
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
    d_out = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, (q, k, v), d_out), torch.autograd.grad(want, (q, k, v), d_out), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2)


@pytest.mark.gpu
def test_80_000_sequences_of_length_16() -> None:
    """flash-attention#1786: invalid configuration; here the grid has one dimension. Neighbours: every length from 0 to 31."""
    for lengths in (torch.full((80_000,), 16), torch.arange(80_000) % 32):
        cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to("cuda", torch.int32)
        q, k, v = (
            torch.randn(int(cu[-1]), 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        out = tileflash.attention_varlen(q, k, v, cu, cu, causal=True, backend="triton")
        gradients = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        for n in (0, 1, 31, 40_000, 65_535, 65_536, 79_998, 79_999):
            rows = slice(int(cu[n]), int(cu[n + 1]))
            own = [t[None, rows].detach().double().requires_grad_() for t in (q, k, v)]
            want = tileflash.attention(*own, causal=True, backend="reference")
            torch.testing.assert_close(out[rows].double(), want[0], rtol=2e-2, atol=2e-2)
            expected = torch.autograd.grad(want.square().sum(), own)
            for ours, theirs in zip(gradients, expected, strict=True):
                torch.testing.assert_close(ours[rows].double(), theirs[0], rtol=5e-2, atol=5e-2)
