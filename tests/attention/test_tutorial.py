"""FlashAttention 1 and 2 of the tutorial against softmax(Q K^T) V written in one line, its gradients by autograd, and each other."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tileflash
from support.exactness import assert_within_promise
from tileflash.attention.tutorial import flash_attention_1, flash_attention_2
from tileflash.attention.tutorial.blocks import Mask, block_sizes, blocks, causal
from tileflash.attention.tutorial.dropout import dropout_mask, philox, random_state
from tileflash.attention.tutorial.heads import attention


@dataclass(frozen=True)
class Problem:
    n: int
    n_k: int
    d: int = 5
    d_v: int = 3
    mask: str = "full"
    p_drop: float = 0.0
    tau: float | None = None
    seed: int = 0

    def draw(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Q, K, V, dO."""
        generator = torch.Generator().manual_seed(self.seed)
        shapes = [(self.n, self.d), (self.n_k, self.d), (self.n_k, self.d_v), (self.n, self.d_v)]
        return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)  # type: ignore[return-value]

    def visible(self) -> Tensor:
        """bool [N, N_k], from the definition of each mask and not from the tutorial's."""
        full = torch.ones(self.n, self.n_k, dtype=torch.bool)
        if self.mask == "causal":
            return full.tril(self.n_k - self.n)
        if self.mask == "window":
            return full.tril(1).triu(-2)
        if self.mask == "random":  # sparse, so that some rows see no key and some blocks are empty
            return torch.rand(self.n, self.n_k, generator=torch.Generator().manual_seed(self.seed + 1)) < 0.15
        return full

    def options(self) -> dict[str, Any]:
        visible = self.visible()
        masks: dict[str, Mask | None] = {
            "full": None,
            "causal": causal(self.n, self.n_k),
            "window": lambda i, j: (j <= i + 1) & (j >= i - 2),
            "random": lambda i, j: visible[i, j],
        }
        return {"mask": masks[self.mask], "p_drop": self.p_drop, "tau": self.tau, "R": random_state(self.seed)}


def textbook(problem: Problem, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """O [N, d_v] and L [N, 1] from whole matrices, with the same entries dropped."""
    visible = problem.visible() if visible is None else visible
    tau = problem.d**-0.5 if problem.tau is None else problem.tau
    kept = dropout_mask(random_state(problem.seed), problem.p_drop, slice(0, problem.n), slice(0, problem.n_k), q)
    empty = ~visible.any(1, keepdim=True)
    logits = (q @ k.T * tau).masked_fill(~visible, -torch.inf).masked_fill(empty, 0.0)
    weights = torch.softmax(logits, 1).masked_fill(empty, 0.0)
    return (weights * kept) @ v, torch.logsumexp(logits, 1, keepdim=True).masked_fill(empty, -torch.inf)


def textbook_all(problem: Problem, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> list[Tensor]:
    """O, L, dQ, dK, dV; the gradients are autograd's."""
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    out, lse = textbook(problem, *leaves)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, d_out)]


def flash1(problem: Problem, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, B_r: int, B_c: int) -> list[Tensor]:
    options = problem.options() | {"B_r": B_r, "B_c": B_c}
    out, ell, m = flash_attention_1.forward(q, k, v, **options)
    return [out, m + torch.log(ell), *flash_attention_1.backward(q, k, v, out, d_out, ell, m, **options)]


def flash2(problem: Problem, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, B_r: int, B_c: int) -> list[Tensor]:
    options = problem.options() | {"B_r": B_r, "B_c": B_c}
    out, lse = flash_attention_2.forward(q, k, v, **options)
    return [out, lse, *flash_attention_2.backward(q, k, v, out, d_out, lse, **options)]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for name, one, other in zip(("O", "L", "dQ", "dK", "dV"), actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


both = pytest.mark.parametrize("flash", [flash1, flash2])
length = st.integers(1, 20)
block = st.integers(1, 24)


@settings(max_examples=120, deadline=None)
@given(
    problem=st.builds(
        Problem,
        n=length,
        n_k=length,
        d=st.integers(1, 9),
        d_v=st.integers(1, 9),
        mask=st.sampled_from(["full", "causal", "window", "random"]),
        p_drop=st.sampled_from([0.0, 0.25, 0.9]),
        tau=st.sampled_from([None, 0.3, 2.0, -1.0]),
        seed=st.integers(0, 2**63 - 1),
    ),
    B_r=block,
    B_c=block,
)
def test_both_are_attention_with_its_gradients(problem: Problem, B_r: int, B_c: int) -> None:
    tensors = problem.draw()
    expected = textbook_all(problem, *tensors)
    first, second = flash1(problem, *tensors, B_r, B_c), flash2(problem, *tensors, B_r, B_c)
    assert_same(first, expected)
    assert_same(second, expected)
    assert_same(first, second)


@settings(max_examples=30, deadline=None)
@given(n=length, n_k=length, B_r=block, B_c=block)
def test_algorithm_1_of_the_first_paper(n: int, n_k: int, B_r: int, B_c: int) -> None:
    q, k, v, _ = Problem(n, n_k).draw()
    out = flash_attention_1.forward_plain(q, k, v, B_r=B_r, B_c=B_c)
    torch.testing.assert_close(out, torch.softmax(q @ k.T, 1) @ v, rtol=1e-11, atol=1e-11)


@both
@pytest.mark.parametrize("mask", ["causal", "random"])
def test_block_sizes_do_not_change_the_result(flash: Callable[..., list[Tensor]], mask: str) -> None:
    problem = Problem(13, 11, mask=mask, p_drop=0.4)
    tensors = problem.draw()
    whole = flash(problem, *tensors, 13, 11)
    for B_r, B_c in itertools.product((1, 4, 7, 13, 50), (1, 3, 11, 64)):
        assert_same(flash(problem, *tensors, B_r, B_c), whole)


@both
def test_a_row_that_sees_no_key_is_zero(flash: Callable[..., list[Tensor]]) -> None:
    problem = Problem(9, 4, mask="causal", p_drop=0.2)  # the last query stands at the last key: 5 rows see nothing
    out, lse, d_q, d_k, d_v = flash(problem, *problem.draw(), 2, 3)
    assert torch.equal(out[:5], torch.zeros(5, 3, dtype=out.dtype))
    assert torch.equal(lse[:5], torch.full((5, 1), -torch.inf, dtype=out.dtype))
    assert torch.equal(d_q[:5], torch.zeros(5, 5, dtype=out.dtype))
    assert all(tensor.isfinite().all() for tensor in (out, lse[5:], d_q, d_k, d_v))


@both
@pytest.mark.parametrize(("n", "n_k"), [(0, 4), (4, 0), (0, 0)])
def test_no_queries_or_no_keys(flash: Callable[..., list[Tensor]], n: int, n_k: int, poisoned_memory: None) -> None:
    problem = Problem(n, n_k)
    out, lse, *gradients = flash(problem, *problem.draw(), 2, 2)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients)


@both
@pytest.mark.parametrize("shift", [-3e4, 0.0, 3e4])
@pytest.mark.parametrize("spread", [1e-6, 1.0])
def test_logits_far_from_zero_in_fp32(flash: Callable[..., list[Tensor]], shift: float, spread: float) -> None:
    """The rounding of the logits and of L, and no more: P is off by a factor of at most 1 + a few eps * max|S|."""
    problem = Problem(17, 19, d=4, mask="causal", tau=1.0)
    q, k, v, d_out = problem.draw(torch.float32)
    q, k = q * spread, k * spread
    q[:, 0], k[:, 0] = shift, 1.0  # adds `shift` to every logit
    actual = flash(problem, q, k, v, d_out, 4, 5)
    q, k, v, d_out = (tensor.double() for tensor in (q, k, v, d_out))
    truth = textbook_all(problem, q, k, v, d_out)
    logits = (q @ k.T).masked_fill(~problem.visible(), -torch.inf)
    p = torch.softmax(logits, 1)
    # What each sum would be if nothing cancelled: an error of a factor in P or dS can be as large as this times the factor.
    d_p = d_out.abs() @ v.abs().T
    d_s = p * (d_p + (p * d_p).sum(1, keepdim=True))
    largest = (q @ k.T).abs().max()
    sizes = (p @ v.abs(), largest.expand(17, 1), d_s @ k.abs(), d_s.T @ q.abs(), p.T @ d_out.abs())
    for name, one, other, size in zip(("O", "L", "dQ", "dK", "dV"), actual, truth, sizes, strict=True):
        off = 4 * torch.finfo(torch.float32).eps * (1 if name == "L" else 1 + largest)
        assert ((one.double() - other).abs() <= off * (1 + size)).all(), name


@both
@pytest.mark.parametrize("shift", [-3e4, 0.0, 3e4])
def test_logits_far_apart_in_fp32(flash: Callable[..., list[Tensor]], shift: float) -> None:
    """Logits up to 10^7 apart overflow nothing; held to the library's own promise."""
    problem = Problem(17, 19, d=4, mask="causal", tau=1.0)
    q, k, v, d_out = problem.draw(torch.float32)
    q, k = q * 1e3, k * 1e3
    q[:, 0], k[:, 0] = shift, 1.0
    tensors = (q, k, v, d_out)
    actual = flash(problem, *tensors, 4, 5)
    truth = textbook_all(problem, *(tensor.double() for tensor in tensors))
    plain = textbook_all(problem, *tensors)
    for name, *three in zip(("O", "L", "dQ", "dK", "dV"), actual, truth, plain, strict=True):
        assert_within_promise(name, *three)


def test_the_log_sum_exp_alone_costs_bits_where_logits_are_large() -> None:
    """What docs/tutorial.md says: with one logit far above 0, L rounds the sum away, m and ell keep it."""
    q, k = torch.full((1, 1), 3e4), torch.ones(3, 1)
    _, ell, m = flash_attention_1.forward(q, k, k, B_r=1, B_c=3, tau=1.0)
    _, lse = flash_attention_2.forward(q, k, k, B_r=1, B_c=3, tau=1.0)
    logits = q @ k.T
    assert (torch.exp(logits - m) / ell).sum() == 1
    error = (torch.exp(logits - lse).sum() - 1).abs().item()
    assert 1e-5 < error <= torch.finfo(torch.float32).eps * 3e4


class Watch(TorchDispatchMode):
    """The largest tensor that any operator gives, in elements, and the number of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.products = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.largest = max([self.largest, *(tensor.numel() for tensor in tensors)])
        self.products += function is torch.ops.aten.mm.default
        return result


@pytest.mark.parametrize("version", [1, 2])
def test_nothing_of_size_n_by_n_is_made(version: int) -> None:
    problem = Problem(160, 160, d=4, d_v=4, mask="causal", p_drop=0.1)
    tensors = problem.draw()
    options = problem.options() | {"B_r": 16, "B_c": 16}
    with Watch() as whole:
        textbook_all(problem, *tensors)
    assert whole.largest == 160 * 160
    q, k, v, d_out = tensors
    with Watch() as watch:
        if version == 1:
            out, ell, m = flash_attention_1.forward(q, k, v, **options)
            flash_attention_1.backward(q, k, v, out, d_out, ell, m, **options)
        else:
            out, lse = flash_attention_2.forward(q, k, v, **options)
            flash_attention_2.backward(q, k, v, out, d_out, lse, **options)
    assert watch.largest == 160 * 4  # the inputs' own size


def test_empty_blocks_are_skipped() -> None:
    problem = Problem(20, 20, mask="causal")
    q, k, v, d_out = problem.draw()
    options = problem.options() | {"B_r": 4, "B_c": 4}
    visited = 5 * 6 // 2  # of 25
    with Watch() as watch:
        out, lse = flash_attention_2.forward(q, k, v, **options)
    assert watch.products == 2 * visited
    with Watch() as watch:
        out, ell, m = flash_attention_1.forward(q, k, v, **options)
    assert watch.products == 2 * visited
    with Watch() as watch:
        flash_attention_2.backward(q, k, v, out, d_out, lse, **options)
    assert watch.products == 5 * visited
    with Watch() as watch:
        flash_attention_1.backward(q, k, v, out, d_out, ell, m, **options)
    assert watch.products == 5 * visited


def test_the_loops_run_as_in_the_papers() -> None:
    """FlashAttention 1 stays with a block of keys, FlashAttention 2's forward pass with a block of queries."""
    q, k, v, d_out = Problem(6, 6).draw()
    visits: list[tuple[int, int]] = []

    def record(i: Tensor, j: Tensor) -> Tensor:
        visits.append((int(i[0, 0]) // 2, int(j[0, 0]) // 3))
        return j >= 0 * i

    options: dict[str, Any] = {"B_r": 2, "B_c": 3, "mask": record}
    by_keys = [(i, j) for j in range(2) for i in range(3)]
    out, ell, m = flash_attention_1.forward(q, k, v, **options)
    assert visits == by_keys
    visits.clear()
    flash_attention_1.backward(q, k, v, out, d_out, ell, m, **options)
    assert visits == by_keys
    visits.clear()
    out, lse = flash_attention_2.forward(q, k, v, **options)
    assert visits == sorted(by_keys)
    visits.clear()
    flash_attention_2.backward(q, k, v, out, d_out, lse, **options)
    assert visits == by_keys


def test_the_papers_block_sizes() -> None:
    assert block_sizes(M=1024, d=16) == (16, 16)
    assert block_sizes(M=1025, d=16) == (16, 17)
    assert block_sizes(M=1024, d=64) == (4, 4)
    assert block_sizes(M=4096, d=8) == (8, 128)


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 row, not 0"):
        blocks(4, 0)
    for p_drop in (1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match="p_drop"):
            dropout_mask((0, 0, 0, 0), p_drop, slice(0, 1), slice(0, 1), torch.zeros(1))
    with pytest.raises(ValueError, match="multiple of k's 2 heads, has 3"):
        attention(torch.zeros(1, 1, 3, 1), torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2, 1), B_r=1, B_c=1)


# Dropout


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known answers of Random123, the authors' own library
        (0x00000000, 0x00000000, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (0xFFFFFFFF, 0xFFFFFFFF, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ],
)
def test_philox_gives_its_known_answers(counter: int, key: int, expected: str) -> None:
    assert " ".join(f"{word:08x}" for word in philox(*[counter] * 4, (key, key))) == expected
    words = philox(*[torch.tensor([counter])] * 4, (key, key))
    assert " ".join(f"{int(word):08x}" for word in words) == expected


@triton.jit
def philox_kernel(out_ptr, seed, offset, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    c0, c1, c2, c3 = tl.philox(seed, i, i + 7, i * 0 + offset, i * 3)
    tl.store(out_ptr + i, c0.to(tl.int64))
    tl.store(out_ptr + BLOCK + i, c1.to(tl.int64))
    tl.store(out_ptr + 2 * BLOCK + i, c2.to(tl.int64))
    tl.store(out_ptr + 3 * BLOCK + i, c3.to(tl.int64))


def test_philox_is_tritons(device: str) -> None:
    seed, offset, size = 0x0123456789ABCDEF, 12345, 16
    out = torch.empty(4, size, dtype=torch.int64, device=device)
    philox_kernel[(1,)](out, seed, offset, size)
    i = torch.arange(size, device=device)
    expected = philox(i, i + 7, i * 0 + offset, i * 3, (seed & 0xFFFFFFFF, seed >> 32))
    assert torch.equal(out & 0xFFFFFFFF, torch.stack(expected))


def test_any_block_of_the_dropout_mask_can_be_made_alone() -> None:
    whole = dropout_mask(random_state(5), 0.3, slice(0, 40), slice(0, 50), torch.zeros(1))
    for rows, columns in itertools.product(blocks(40, 7), blocks(50, 16)):
        part = dropout_mask(random_state(5), 0.3, rows, columns, torch.zeros(1))
        assert torch.equal(part, whole[rows, columns])


@pytest.mark.parametrize("p_drop", [0.1, 0.5, 0.9])
def test_dropout_drops_as_many_as_asked_and_keeps_the_mean(p_drop: float) -> None:
    size = 400
    z = dropout_mask(random_state(1), p_drop, slice(0, size), slice(0, size), torch.zeros(1, dtype=torch.float64))
    assert set(z.unique().tolist()) == {0.0, 1 / (1 - p_drop)}
    five_sigma = 5 * (p_drop * (1 - p_drop)) ** 0.5 / size
    assert abs((z == 0).double().mean().item() - p_drop) < five_sigma
    kept = (z > 0).double() - (1 - p_drop)
    for other in (kept.roll(1, 0), kept.roll(1, 1), kept.T):  # neighbours and mirror images are independent
        correlation = (kept * other).mean() / kept.square().mean()
        assert abs(correlation.item()) < 0.02


def test_every_part_of_the_state_counts() -> None:
    arguments = ((0,), (1,), (2**33,), (0, 1), (0, 2**32), (0, 0, 1, 0, 2), (0, 0, 0, 1, 2))
    states = [random_state(*each) for each in arguments]
    masks = [dropout_mask(R, 0.5, slice(0, 64), slice(0, 64), torch.zeros(1)) > 0 for R in states]
    for one, other in itertools.combinations(masks, 2):
        assert 0.45 < (one == other).double().mean() < 0.55


# [B, S, H, D]


@pytest.mark.parametrize(("sq", "sk"), [(12, 12), (5, 9), (9, 5)])
def test_tensors_with_batch_and_heads(sq: int, sk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, sq, 4, 6), (2, sk, 2, 6), (2, sk, 2, 3))
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)
    out = attention(q, k, v, B_r=4, B_c=3, mask=causal(sq, sk))
    expected = tileflash.attention(q, k, v, causal=True, backend="reference")
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    d_out = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    for one, other in zip(*(torch.autograd.grad(o, (q, k, v), d_out) for o in (out, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_the_gradient_is_that_of_the_function_with_dropout() -> None:
    """By finite differences: the backward pass must drop what the forward pass dropped, in every head."""
    shapes = ((2, 4, 2, 3), (2, 5, 1, 3), (2, 5, 1, 2))
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    assert torch.autograd.gradcheck(lambda *t: attention(*t, B_r=3, B_c=2, p_drop=0.4, seed=3, offset=8), inputs)


def test_heads_and_calls_drop_different_entries_and_a_call_repeats() -> None:
    q = k = torch.zeros(2, 8, 2, 4)
    v = torch.eye(8)[None, :, None, :].expand(2, 8, 2, 8)  # the output is the matrix of weights itself

    def dropped(seed: int = 0, offset: int = 0, B_r: int = 4) -> Tensor:
        return attention(q, k, v, B_r=B_r, B_c=4, p_drop=0.5, seed=seed, offset=offset) == 0

    assert torch.equal(dropped(), dropped(B_r=3))
    heads = dropped().transpose(1, 2).flatten(0, 1)
    for one, other in itertools.combinations([*heads, dropped(1)[0, :, 0], dropped(0, 1)[0, :, 0]], 2):
        assert not torch.equal(one, other)


@pytest.mark.parametrize("seed", [3, -1, (0x123456789ABCDEF0, (5 << 32) + 7), (-(2**63), -1)])
@pytest.mark.parametrize("p_drop", [0.2, 1 - 2.0**-40])
def test_the_library_drops_the_same_entries(seed: int | tuple[int, int], p_drop: float) -> None:
    """tileflash.attention(..., dropout_p, dropout_seed), forward and backward, with grouped heads and blocks of odd sizes."""
    shapes = ((2, 13, 4, 6), (2, 10, 2, 6), (2, 10, 2, 3))
    q, k, v = (torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes)
    of_seed, offset = seed if isinstance(seed, tuple) else (seed, 0)
    ours = attention(q, k, v, B_r=4, B_c=3, mask=causal(13, 10), p_drop=p_drop, seed=of_seed, offset=offset)
    for backend in ("reference", "tiled"):
        library = tileflash.attention(q, k, v, causal=True, dropout_p=p_drop, dropout_seed=seed, backend=backend)
        torch.testing.assert_close(ours, library, rtol=1e-11, atol=1e-11)
        gradients = (torch.autograd.grad(out.square().sum(), (q, k, v), retain_graph=True) for out in (ours, library))
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_second_derivatives_are_refused() -> None:
    q, k, v = (torch.randn(1, 3, 1, 2, requires_grad=True) for _ in range(3))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(attention(q, k, v, B_r=2, B_c=2).sum(), q, create_graph=True)
