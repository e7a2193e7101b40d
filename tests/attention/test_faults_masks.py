"""Alignment, windows, extreme logits, strides of biases, head dimensions: cases of issues, each with its neighbours.

Not ours: trainers' losses (flash-attention#1930), Flex's BlockMask (pytorch#139462, #134756), FP8, KV caches (flash-attention#907's cache).
Elsewhere: rows that see nothing and strides of q, k, v and gradients (test_semantics.py), NaN (test_faults_nan.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tileflash
from support.exactness import Case, check

OURS = ["triton", "tiled", "reference"]


def normal(*shape: int, device: str, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def dense(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """By whole matrices in fp64; rows without a visible key are 0."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    logits = (q @ k.transpose(2, 3) / q.shape[3] ** 0.5).masked_fill(~visible, -torch.inf)
    return (torch.softmax(logits, 3).nan_to_num(0.0) @ v).transpose(1, 2)


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_query_behind_a_cache_sees_all_of_it(rows: int, backend: str, device: str) -> None:
    """pytorch#144858, #108108, #103082: with is_causal=True a single query saw the first key alone."""
    q, k, v = (normal(1, n, 2, 16, device=device, seed=n) for n in (rows, 40, 40))
    out = tileflash.attention(q, k, v, causal=True, backend=backend)
    torch.testing.assert_close(out[:, -1:], tileflash.attention(q[:, -1:], k, v, backend="reference"))
    first = tileflash.attention(q, k, v, causal="top-left", backend=backend)
    torch.testing.assert_close(first[:, 0], v[:, 0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("window", [(None, 50), (3, 34), (10**9, 0), (0, 0)], ids=str)
@pytest.mark.parametrize(("sq", "sk"), [(40, 33), (33, 40)])
def test_windows_beyond_the_keys(sq: int, sk: int, window: tuple[int | None, int], backend: str, device: str) -> None:
    """flash-attention#895: right > Sk with Sq > Sk dropped keys. Equal to the dense mask, in both passes, packed too."""
    q, k, v = (normal(1, n, 1, 16, device=device, seed=n + i).requires_grad_() for i, n in enumerate((sq, sk, sk)))
    i, j = torch.arange(sq, device=device)[:, None] + sk - sq, torch.arange(sk, device=device)[None]
    visible = (j <= i + window[1]) & (True if window[0] is None else j >= i - window[0])
    want = dense(q, k, v, visible)
    cu = [torch.tensor([0, n], dtype=torch.int32, device=device) for n in (sq, sk)]
    outs = [
        tileflash.attention(q, k, v, window=window, backend=backend),
        tileflash.attention_varlen(q[0], k[0], v[0], *cu, window=window, backend=backend)[None],
    ]
    expected = torch.autograd.grad(want.square().sum(), (q, k, v))
    for out in outs:
        torch.testing.assert_close(out, want.float(), rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("window", [(0, -1), (-1, 0), (None, -5), (-(2**40), None)], ids=str)
def test_negative_windows_are_refused(window: tuple[int | None, int | None], device: str) -> None:
    """flash-attention#1116: right = -1, to leave a query's own key out, was ignored."""
    q = normal(1, 5, 1, 16, device=device)
    with pytest.raises(ValueError, match=r"bound must be None .* or an integer >= 0, got -"):
        tileflash.attention(q, q, q, window=window)
    cu = torch.tensor([0, 5], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"bound must be None .* or an integer >= 0, got -"):
        tileflash.attention_varlen(q[0], q[0], q[0], cu, cu, window=window)


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("left", [0, 1, 4, 31, 32, 33])
def test_a_window_counts_the_keys_besides_the_querys_own(left: int, backend: str, device: str) -> None:
    """transformers#39408: w or w - 1 keys? left + 1, as docs/semantics.md says; here counted by weights that are all equal."""
    q = torch.zeros(1, 40, 1, 16, device=device)
    v = torch.eye(40, device=device)[None, :, None]
    weights = tileflash.attention(q, q, v, window=(left, 0), backend=backend)[0, :, 0]
    counted = (weights != 0).sum(1)
    assert torch.equal(counted, torch.arange(1, 41, device=device).clamp(max=left + 1))


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("shift", [-3e4, -128.0, 128.0, 3e4])
@pytest.mark.parametrize("by", ["products", "bias", "packed"])
def test_a_constant_added_to_all_logits_changes_nothing(by: str, shift: float, backend: str, device: str) -> None:
    """cudnn-frontend#1072: Sq = 1, Sk = 128, all logits shifted by -128: d_k and d_v were NaN. pytorch#119320, #125674."""
    q, k, v = (normal(1, n, 1, 16, device=device, seed=n + i) for i, n in enumerate((1, 128, 128)))
    q[..., 0], k[..., 0] = 1.0, 0.0
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    want = tileflash.attention(*leaves, scale=1.0, return_lse=True, backend="reference")
    expected = torch.autograd.grad(want[0].square().sum(), leaves)
    options: dict[str, Any] = {"scale": 1.0, "return_lse": True, "backend": backend}
    if by == "bias":
        options["bias"] = torch.full((1, 1), shift, device=device)
    else:
        k[..., 0] = shift
    shifted = [t.clone().requires_grad_() for t in (q, k, v)]
    if by == "packed":
        cu = [torch.tensor([0, n], dtype=torch.int32, device=device) for n in (1, 128)]
        out, lse = tileflash.attention_varlen(*(t[0] for t in shifted), *cu, **options)
        out, lse = out[None], lse[None]
    else:
        out, lse = tileflash.attention(*shifted, **options)
    tolerance = 1e-4 if abs(shift) < 1e3 else 2e-2  # fp32 has 1/512 for a digit at 30,000
    torch.testing.assert_close(out, want[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse - shift, want[1], rtol=0, atol=max(1e-4, abs(shift) * 4e-7))
    for name, ours, theirs in zip("qkv", torch.autograd.grad(out.square().sum(), shifted), expected, strict=True):
        places = slice(1, None) if name == "q" else slice(None)  # d_q[0] is a sum of d_s times the shift: only rounding
        torch.testing.assert_close(ours[..., places], theirs[..., places], rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_largest_logits_of_a_dtype(dtype: torch.dtype, backend: str, device: str) -> None:
    """Logits of +-1e6 and masks: one key takes all, gradients are finite, and hidden keys would have won."""
    q, k, v = (normal(1, n, 1, 16, device=device, seed=n).to(dtype).requires_grad_() for n in (34, 36, 36))
    with torch.no_grad():
        q.mul_(250), k.mul_(250)
    out, lse = tileflash.attention(q, k, v, causal=True, scale=1.0, return_lse=True, backend=backend)
    logits = (q[0, :, 0].double() @ k[0, :, 0].double().T).masked_fill(
        torch.ones(34, 36, device=device).triu(3).bool(), -torch.inf
    )
    winners = logits.argmax(1)
    torch.testing.assert_close(out[0, :, 0], v[0, winners, 0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse[0, 0].double(), logits.amax(1), rtol=1e-5, atol=0)
    assert all(bool(grad.isfinite().all()) for grad in torch.autograd.grad(out.sum() + lse.sum(), (q, k, v)))


def _with_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """The formula, for one head of width 16."""
    weights = torch.softmax(torch.einsum("bihd,bjhd->bhij", q, k) / 4 + bias, 3)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize(
    ("lowest", "dtype", "also"),
    [
        *((lowest, torch.float32, {}) for lowest in (-1e4, -1e9, -1e30, torch.finfo(torch.bfloat16).min)),
        (torch.finfo(torch.float32).min, torch.bfloat16, {}),
        *(
            (torch.finfo(torch.float32).min, torch.float32, {name: 30.0})
            for name in ("softcap", "alibi_slopes", "sinks")
        ),
    ],
    ids=str,
)
def test_keys_hidden_by_the_lowest_number(
    lowest: float, dtype: torch.dtype, also: dict[str, Any], backend: str, device: str
) -> None:
    """Transformers hides keys with finfo.min, others with -1e9. Rows of padding then see nothing but such keys: in base 2 the lowest
    number is -inf, and all gradients were NaN. Rows that see a key get what -inf would give, and the padding is finite.
    """
    q, k, v = (normal(1, n, 1, 16, device=device, seed=n + i) for i, n in enumerate((36, 40, 40)))
    options: dict[str, Any] = dict(also)
    if "alibi_slopes" in also:
        options["alibi_slopes"] = torch.tensor([0.3], device=device)
    if "sinks" in also:
        options["sinks"] = torch.tensor([0.2], device=device)
    hidden = torch.zeros(36, 40, dtype=torch.bool, device=device)
    hidden[:5], hidden[5:, 30:], hidden[20] = True, True, True
    padding = hidden.all(1)
    results = []
    for own in (True, False):
        width = dtype if own else torch.float64
        leaves = [t.to(width).requires_grad_() for t in (q, k, v)]
        given = {
            name: value.to(torch.promote_types(width, torch.float32)) if isinstance(value, Tensor) else value
            for name, value in options.items()
        }
        table = torch.zeros(36, 40, dtype=torch.float32 if own else torch.float64, device=device)
        table = table.masked_fill(hidden, lowest if own else -torch.inf).requires_grad_()
        out, lse = tileflash.attention(
            *leaves, bias=table, **given, return_lse=True, backend=backend if own else "reference"
        )
        d_out = torch.ones_like(out).masked_fill(padding[None, :, None, None], 0.0)
        results.append((out.detach(), lse.detach(), *torch.autograd.grad(out, [*leaves, table], d_out)))
    (out, lse, *ours), (want, want_lse, *theirs) = results
    tolerance = 2e-5 if dtype == torch.float32 else 3e-2
    rows = ~padding
    torch.testing.assert_close(out[:, rows].double(), want[:, rows], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse[:, :, rows].double(), want_lse[:, :, rows], rtol=tolerance, atol=tolerance)
    assert bool(out.isfinite().all() and lse.isfinite().all())
    for name, one, other in zip(("d_q", "d_k", "d_v", "d_bias"), ours, theirs, strict=True):
        torch.testing.assert_close(
            one.double(), other, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("by", ["a bias that fp32 does not hold", "a sum"])
def test_logits_that_overflow_to_minus_infinity(by: str, backend: str, device: str) -> None:
    """Nothing is hidden there, and yet no weight is left: as where nothing is seen, out is 0, and no gradient NaN."""
    q, k, v = (normal(1, n, 1, 16, device=device, seed=n + i) for i, n in enumerate((36, 40, 40)))
    bias = torch.zeros(36, 40, device=device, dtype=torch.float64)
    if by == "a sum":
        q[:, 3, :, 0], k[..., 0] = -1e20, 1e18  # products of -1e38 / 4
        bias[3] = torch.finfo(torch.float32).min
        bias = bias.float()
    else:
        bias[3] = -1e300
    leaves = [t.clone().requires_grad_() for t in (q, k, v, bias)]
    out, lse = tileflash.attention(*leaves[:3], bias=leaves[3], return_lse=True, backend=backend)
    assert torch.equal(out[0, 3], torch.zeros_like(out[0, 3]))
    assert lse[0, 0, 3] == -torch.inf
    gradients = torch.autograd.grad(out.sum(), leaves)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    assert torch.equal(gradients[0][0, 3], torch.zeros_like(gradients[0][0, 3]))


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("whole", [2**23, -(2**23)])
def test_a_large_bias_of_whole_numbers(whole: int, backend: str, device: str) -> None:
    """Logits that fp32 holds exactly: their softmax is exact, for their maximum is taken off first, and not rounded in another base."""
    bias = torch.randint(0, 4, (36, 40), generator=torch.Generator().manual_seed(1)).to(device) + float(whole)
    q, k = (torch.zeros(1, n, 1, 16, device=device) for n in (36, 40))
    v = normal(1, 40, 1, 16, device=device, seed=3)
    out, lse = tileflash.attention(q, k, v, bias=bias, return_lse=True, backend=backend)
    torch.testing.assert_close(
        out.double(), _with_bias(q.double(), k.double(), v.double(), bias.double()), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(lse[0, 0].double(), torch.logsumexp(bias.double(), 1), rtol=1e-7, atol=0)


def _strided(bias: Tensor, how: str) -> Tensor:
    """The same values in other strides."""
    if how == "odd":  # a row stride and a start that are no multiple of 8
        wide = bias.new_empty(*bias.shape[:3], bias.shape[3] + 3)
        wide[..., 1:-2] = bias
        return wide[..., 1:-2]
    if how == "transposed":
        return bias.transpose(2, 3).contiguous().transpose(2, 3)
    if how == "every other":
        return bias.repeat_interleave(2, 3)[..., ::2]
    return bias.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("float", "odd"), ("bool", "odd"), ("half", "transposed"), ("half", "every other"), ("bool", "every other"),
        ("float", "permuted"), ("float", "expanded"),
    ],
)  # fmt: skip
def test_strides_of_a_bias_are_free(kind: str, how: str, backend: str, device: str) -> None:
    """xformers#813, #808, diffusers#9637: last-dimension strides that are no multiple of 8 were an error. The gradient is whole, too."""
    q, k, v = (normal(1, n, 2, 16, device=device, seed=n + i) for i, n in enumerate((35, 37, 37)))
    shape = (1, 1, 1, 37) if how == "expanded" else (1, 2, 35, 37)
    bias = normal(*shape, device=device, seed=9)
    bias = bias > -0.5 if kind == "bool" else bias.half() if kind == "half" else bias
    other = bias.expand(1, 2, 35, 37) if how == "expanded" else _strided(bias, how)
    plain = other.contiguous()
    if kind != "bool":
        other, plain = other.detach().requires_grad_(), plain.detach().requires_grad_()
    out = tileflash.attention(q, k, v, bias=other, causal=True, backend=backend)
    want = tileflash.attention(q, k, v, bias=plain, causal=True, backend="reference")
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    if kind != "bool":
        (ours,), (theirs,) = (torch.autograd.grad(o.square().sum(), b) for o, b in ((out, other), (want, plain)))
        assert ours.shape == (1, 2, 35, 37)
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("backend", ["triton", "tiled"])
@pytest.mark.parametrize("d", [3, 72, 80, 136, 264])
def test_head_dimensions_that_are_no_power_of_two(d: int, backend: str, device: str) -> None:
    """flashinfer#4299 (72, 136), triton#621, #2059, #4174 (not 64), pytorch#159247 (lengths that are no multiple of a block)."""
    check(Case(34, 37, d, batch=1, heads=1, kv_heads=1, causal=True), backend, device, with_lse=False)


@pytest.mark.parametrize("backend", OURS)
def test_alibi_is_one_thing_in_every_path(backend: str, device: str) -> None:
    """flash-attention#907: packed, padded and as a bias give the same, with as many and with fewer queries than keys."""
    slopes = torch.tensor([0.3, 0.1], device=device)
    for sq, sk in ((35, 35), (5, 35)):
        q, k, v = (normal(1, n, 2, 16, device=device, seed=n + i) for i, n in enumerate((sq, sk, sk)))
        cu = [torch.tensor([0, n], dtype=torch.int32, device=device) for n in (sq, sk)]
        away = (torch.arange(sq, device=device)[:, None] + sk - sq - torch.arange(sk, device=device)).abs()
        options = {"causal": True, "backend": backend}
        plain = tileflash.attention(q, k, v, alibi_slopes=slopes, **options)
        packed = tileflash.attention_varlen(q[0], k[0], v[0], *cu, alibi_slopes=slopes, **options)
        as_bias = tileflash.attention(q, k, v, bias=-slopes[:, None, None] * away, **options)
        torch.testing.assert_close(packed, plain[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(as_bias, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("entries", [0, 1, 3])
def test_slopes_of_every_shape_have_their_gradient(entries: int, packed: bool, backend: str, device: str) -> None:
    """[H], [1, H] and [B, H], of a batch or of packed sequences: one shape's gradient was dropped in silence."""
    q, k, v = (normal(3, 10, 2, 16, device=device, seed=seed) for seed in range(3))
    slopes = (torch.rand(max(1, entries), 2, generator=torch.Generator().manual_seed(1)) + 0.1).to(device)
    slopes = slopes if entries else slopes[0]
    own = slopes.clone().requires_grad_()
    if packed:
        cu = torch.tensor([0, 10, 20, 30], dtype=torch.int32, device=device)
        rows = (t.flatten(0, 1) for t in (q, k, v))
        out = tileflash.attention_varlen(*rows, cu, cu, alibi_slopes=own, backend=backend).view(3, 10, 2, 16)
    else:
        out = tileflash.attention(q, k, v, alibi_slopes=own, backend=backend)
    places = torch.arange(10, device=device)
    double = slopes.double().requires_grad_()
    away = (places[:, None] - places).abs() * (double if entries else double[None])[:, :, None, None]
    weights = torch.softmax(torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / 4 - away, 3)
    want = torch.einsum("bhij,bjhd->bihd", weights, v.double())
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(out.square().sum(), own)
    (expected,) = torch.autograd.grad(want.square().sum(), double)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-4)
