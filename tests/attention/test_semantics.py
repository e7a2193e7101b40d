"""What the promises of docs/semantics.md say about edges: empty rows, NaN behind a mask, strides, zero sizes, extremes, determinism."""

import pytest
import torch

import tileflash
from tileflash.attention.dispatch import BACKENDS

ON_GPU = torch.cuda.is_available()
OURS = ["triton", "tiled", "reference"]
FUSED = ["triton", "sdpa-cudnn", "sdpa-flash", "tiled"] if ON_GPU else ["triton", "sdpa-cpu", "tiled"]
HALF = torch.bfloat16 if ON_GPU else torch.float32


def normal(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=dtype)


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize(("sq", "sk"), [(70, 33), (33, 1), (40, 39)])
def test_a_query_that_sees_no_key(backend: str, sq: int, sk: int, device: str, poisoned_memory: None) -> None:
    """flash-attention#443, #1778, pytorch#103963: out 0, lse -inf, gradients 0; the others are finite."""
    q, k, v = (normal(2, n, 2, 16, device=device).requires_grad_() for n in (sq, sk, sk))
    out, lse = tileflash.attention(q, k, v, causal=True, return_lse=True, backend=backend)
    empty = sq - sk
    assert torch.equal(out[:, :empty], torch.zeros_like(out[:, :empty]))
    assert bool((lse[:, :, :empty] == -torch.inf).all())
    assert bool(torch.isfinite(lse[:, :, empty:]).all())
    grads = torch.autograd.grad(out.square().sum() + lse[:, :, empty:].sum(), (q, k, v))
    assert all(bool(torch.isfinite(grad).all()) for grad in grads)
    assert torch.equal(grads[0][:, :empty], torch.zeros_like(grads[0][:, :empty]))
    # and when the gradient reaches only the empty rows, nothing gets any
    out, _ = tileflash.attention(q, k, v, causal=True, return_lse=True, backend=backend)
    for grad in torch.autograd.grad(out[:, :empty].sum(), (q, k, v)):
        assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_keys_that_nobody_sees_may_hold_anything(backend: str, poison: float, device: str) -> None:
    """pytorch#101967: with top-left causal masks the keys behind the last query are never visible."""
    q, k, v = (normal(1, n, 2, 16, device=device) for n in (20, 50, 50))
    kwargs = {"causal": "top-left", "backend": backend}
    clean_inputs = [t.clone().requires_grad_() for t in (q, k[:, :20], v[:, :20])]
    clean = tileflash.attention(*clean_inputs, **kwargs)
    k[:, 20:], v[:, 20:] = poison, poison
    dirty_inputs = [t.requires_grad_() for t in (q, k, v)]
    dirty = tileflash.attention(*dirty_inputs, **kwargs)
    torch.testing.assert_close(dirty, clean, rtol=1e-5, atol=1e-6)
    # likewise at the other end: behind a window that starts after them
    first = [t.detach().clone().requires_grad_() for t in (q, k.flip(1), v.flip(1))]
    last = [t.detach().clone().requires_grad_() for t in (q, k.flip(1)[:, 30:], v.flip(1)[:, 30:])]
    outs = [tileflash.attention(*inputs, window=(0, None), backend=backend) for inputs in (first, last)]
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-5, atol=1e-6)
    windowed = [torch.autograd.grad(out.sum(), inputs) for out, inputs in zip(outs, (first, last), strict=True)]
    torch.testing.assert_close(windowed[0][0], windowed[1][0], rtol=1e-4, atol=1e-5)
    assert all(bool(torch.isfinite(grad).all()) for grad in windowed[0])

    clean_grads = torch.autograd.grad(clean.sum(), clean_inputs)
    dirty_grads = torch.autograd.grad(dirty.sum(), dirty_inputs)
    for clean_grad, dirty_grad in zip(clean_grads, dirty_grads, strict=True):
        torch.testing.assert_close(dirty_grad[:, :20], clean_grad, rtol=1e-4, atol=1e-5)
        assert torch.equal(dirty_grad[:, 20:], torch.zeros_like(dirty_grad[:, 20:]))


@pytest.mark.parametrize("backend", ["triton", "tiled"])
def test_queries_that_see_nothing_may_hold_anything(backend: str, device: str) -> None:
    """Their gradients are 0, and they do not reach the keys' gradients."""
    q, k, v = (normal(1, n, 2, 16, device=device) for n in (50, 20, 20))
    q[:, :30] = float("nan")
    leaves = [t.requires_grad_() for t in (q, k, v)]
    small = [t.detach().clone().requires_grad_() for t in (q[:, 30:], k, v)]
    out, expected = (tileflash.attention(*t, causal=True, backend=backend) for t in (leaves, small))
    assert torch.equal(out[:, :30], torch.zeros_like(out[:, :30]))
    for ours, theirs in zip(
        torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(expected.sum(), small), strict=True
    ):
        torch.testing.assert_close(ours[:, -theirs.shape[1] :], theirs, rtol=1e-4, atol=1e-5)
        assert bool(torch.isfinite(ours).all())


@pytest.mark.parametrize("backend", FUSED)
def test_any_strides_give_what_contiguous_tensors_give(backend: str, device: str) -> None:
    """flash-attention#355, PR#2777, aotriton#236: transposed and sliced inputs, gradients with strides of their own."""
    batch, length, heads, d = 2, 45, 4, 16
    packed = normal(batch, length, 3, heads, d, device=device, dtype=HALF)
    sliced = packed.unbind(2)
    transposed = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in sliced]
    sequence_first = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in sliced]
    contiguous = [t.contiguous() for t in sliced]
    d_out = normal(batch, length, heads, d, device=device, dtype=HALF)
    gradients = {
        "contiguous": d_out,
        "transposed": d_out.transpose(1, 2).contiguous().transpose(1, 2),
        "sequence first": d_out.transpose(0, 1).contiguous().transpose(0, 1),
    }

    def run(inputs: list[torch.Tensor], grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in inputs]
        out = tileflash.attention(*leaves, causal=True, backend=backend)
        return (out.detach(), *torch.autograd.grad(out, leaves, grad))

    expected = run(contiguous, d_out)
    for inputs in (list(sliced), transposed, sequence_first):
        for name, grad in gradients.items():
            for ours, theirs in zip(run(inputs, grad), expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2, msg=name)


@pytest.mark.parametrize("backend", OURS)
def test_expanded_inputs_and_gradients_and_a_last_dimension_that_is_not_contiguous(backend: str, device: str) -> None:
    q = normal(2, 4, 16, 33, device=device).permute(0, 3, 1, 2).transpose(2, 3).contiguous().transpose(2, 3)
    shared = normal(1, 33, 1, 16, device=device)
    inputs = [
        q.detach().requires_grad_(),
        shared.expand(2, 33, 4, 16).requires_grad_(),
        shared.expand(2, 33, 4, 16).requires_grad_(),
    ]
    out = tileflash.attention(*inputs, causal=True, backend=backend)
    grads = torch.autograd.grad(out.sum(), inputs)  # the gradient of sum() is expanded from one element
    plain = [t.detach().contiguous().requires_grad_() for t in inputs]
    reference = tileflash.attention(*plain, causal=True, backend="reference")
    torch.testing.assert_close(out, reference, rtol=1e-5, atol=1e-5)
    for grad, expected in zip(grads, torch.autograd.grad(reference.sum(), plain), strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("shape", [(0, 5, 5, 2), (2, 0, 5, 2), (2, 5, 0, 2), (2, 0, 0, 2), (2, 5, 5, 0)], ids=str)
def test_zero_sizes(backend: str, shape: tuple[int, int, int, int], device: str, poisoned_memory: None) -> None:
    """flash-attention PR#2421: without keys the output is 0 and the gradients are 0, never what was in memory."""
    batch, sq, sk, heads = shape
    for kv_heads in (heads, max(1, heads)):
        check_zero_sizes(backend, batch, sq, sk, heads, kv_heads, device)


def check_zero_sizes(backend: str, batch: int, sq: int, sk: int, heads: int, kv_heads: int, device: str) -> None:
    q = normal(batch, sq, heads, 16, device=device).requires_grad_()
    k, v = (normal(batch, sk, kv_heads, 16, device=device).requires_grad_() for _ in range(2))
    out, lse = tileflash.attention(q, k, v, return_lse=True, causal=True, backend=backend)
    assert out.shape == (batch, sq, heads, 16)
    assert lse.shape == (batch, heads, sq)
    if sk == 0:
        assert torch.equal(out, torch.zeros_like(out))
        assert bool((lse == -torch.inf).all())
    for grad, tensor in zip(torch.autograd.grad(out.sum(), (q, k, v)), (q, k, v), strict=True):
        assert grad.shape == tensor.shape
        if sk == 0 or sq == 0 or heads == 0:
            assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("offset", [-3.0e4, -128.0, 0.0, 128.0, 3.0e4])
def test_logits_may_be_shifted_and_large(backend: str, offset: float, device: str) -> None:
    """cudnn-frontend#1072: adding a constant to all logits changes nothing but the log-sum-exp."""
    q, k, v = (normal(1, n, 1, 16, device=device) for n in (3, 128, 128))
    q[..., 0], k[..., 0] = 1.0, 0.0
    plain = tileflash.attention(q, k, v, scale=1.0, backend="reference")
    k[..., 0] = offset
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = tileflash.attention(*leaves, scale=1.0, return_lse=True, backend=backend)
    torch.testing.assert_close(
        out, plain, rtol=2e-2 if abs(offset) > 1e3 else 1e-4, atol=2e-2 if abs(offset) > 1e3 else 1e-4
    )
    assert all(bool(torch.isfinite(grad).all()) for grad in torch.autograd.grad(out.sum() + lse.sum(), leaves))


@pytest.mark.parametrize("backend", ["triton", "tiled"])
def test_gradients_are_equal_bit_for_bit_from_run_to_run(backend: str, device: str) -> None:
    length = 1500 if ON_GPU else 70
    leaves = [normal(2, length, 4, 64 if ON_GPU else 16, device=device, dtype=HALF).requires_grad_() for _ in range(3)]
    runs = []
    for _ in range(3):
        out = tileflash.attention(*leaves, causal=True, backend=backend)
        runs.append((out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)))
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_a_scale_that_is_not_positive_is_served_by_another_backend(scale: float, device: str) -> None:
    q, k, v = (normal(1, 20, 2, 16, device=device) for _ in range(3))
    out = tileflash.attention(q, k, v, scale=scale, window=(9, 0))
    torch.testing.assert_close(out, tileflash.attention(q, k, v, scale=scale, window=(9, 0), backend="reference"))


@pytest.mark.parametrize("backend", ["reference", "sdpa-math"])
def test_second_derivatives_by_the_backends_that_have_them(backend: str) -> None:
    q, k, v = (torch.randn(1, 5, 1, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert BACKENDS[backend].second_derivative
    assert torch.autograd.gradgradcheck(lambda *t: tileflash.attention(*t, causal=True, backend=backend), (q, k, v))


@pytest.mark.parametrize("backend", ["triton", "tiled"])
def test_second_derivatives_are_refused_elsewhere(backend: str, device: str) -> None:
    q, k, v = (normal(1, 5, 1, 16, device=device).requires_grad_() for _ in range(3))
    (grad,) = torch.autograd.grad(tileflash.attention(q, k, v, backend=backend).sin().sum(), q, create_graph=True)
    for target in (q, k, v):
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(grad.sum(), target, retain_graph=True, allow_unused=True)


def test_the_reference_agrees_with_pytorch(device: str) -> None:
    q, k, v = (torch.randn(2, 30, 4, 16, dtype=torch.float64, device=device) for _ in range(3))
    ours = tileflash.attention(q, k, v, causal=True, backend="reference")
    theirs = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
    torch.testing.assert_close(ours, theirs.transpose(1, 2), rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
def test_more_than_65535_batch_heads() -> None:
    """pytorch#142228, #146704: the grid has one dimension."""
    q, k, v = (torch.randn(40_000, 3, 2, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = tileflash.attention(q, k, v, causal=True, backend="triton")
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    tail = [t[-5:].detach().requires_grad_() for t in (q, k, v)]
    expected = tileflash.attention(*tail, causal=True, backend="reference")
    torch.testing.assert_close(out[-5:], expected, rtol=2e-2, atol=2e-2)
    for grad, want in zip(grads, torch.autograd.grad(expected.float().square().sum(), tail), strict=True):
        torch.testing.assert_close(grad[-5:], want, rtol=5e-2, atol=5e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["batch", "sequence"])
def test_offsets_beyond_two_to_the_31_elements(layout: str) -> None:
    """flash-attention#767, PR#2260: 64-bit offsets over the batch and along one sequence."""
    # 2.3e9 elements over the batch; or a row stride of 131,072, so that the last rows of one sequence start beyond 2^31.
    shape = (17, 1024, 1024, 128) if layout == "batch" else (1, 17_408, 1024, 128)
    q = torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_()
    view = [q[:, :, 1020 + i].unsqueeze(2).detach().requires_grad_() for i in range(3)]
    out = tileflash.attention(*view, causal=True, backend="triton")
    small = [t[-1:].detach().clone().requires_grad_() for t in view]
    expected = tileflash.attention(*small, causal=True, backend="reference")
    torch.testing.assert_close(out[-1:], expected, rtol=2e-2, atol=2e-2)
    grads = torch.autograd.grad(out.float().sum(), view)
    for grad, want in zip(grads, torch.autograd.grad(expected.float().sum(), small), strict=True):
        torch.testing.assert_close(grad[-1:], want, rtol=5e-2, atol=5e-2)


HIDING = ["causal", "window", "documents", "mask", "bias", "packed"]


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_only_the_rows_that_see_it(
    backend: str, hiding: str, poison: float, device: str
) -> None:
    """out, lse and d_q of the other rows are those of a finite key."""
    length, key = 70, 40
    inputs = [normal(1, length, 2, 16, device=device) for _ in range(3)]
    ids = torch.arange(length, device=device, dtype=torch.int32) // 30  # key 40 is of document 1
    rows = torch.arange(length, device=device)
    blind = {"causal": rows < key, "window": (rows < key) | (rows > key + 9)}.get(hiding, ids != 1)
    hidden = blind[:, None] & (rows == key)
    arguments: dict[str, object] = {
        "causal": {"causal": True},
        "window": {"window": (9, 0)},
        "documents": {"document_ids": ids[None]},
        "mask": {"bias": ~hidden},
        "bias": {"bias": torch.zeros(length, length, device=device).masked_fill(hidden, -torch.inf)},
        "packed": {},
    }[hiding]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        if hiding == "packed":
            cu_seqlens = torch.tensor([0, 30, 60, 70], dtype=torch.int32, device=device)
            out, lse = tileflash.attention_varlen(
                *(t[0] for t in leaves), cu_seqlens, cu_seqlens, return_lse=True, backend=backend
            )
            out, lse = out[None], lse[None]
        else:
            out, lse = tileflash.attention(*leaves, return_lse=True, backend=backend, **arguments)
        (d_q,) = torch.autograd.grad(out[:, blind].sum() + lse[:, :, blind].sum(), leaves[:1])
        return [out[:, blind].detach(), lse[:, :, blind].detach(), d_q[:, blind]]

    clean = run(*inputs)
    for place in (1, 2):
        dirty = [t.clone() for t in inputs]
        dirty[place][:, key, :, 3] = poison
        for ours, expected in zip(run(*dirty), clean, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
