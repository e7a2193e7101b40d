"""Tensors whose memory does not hold their values, and batches of gradients: what kernels that are called past the dispatcher misread."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tileflash
from tileflash.kernels.triton import attention as launches

OURS = ["triton", "tiled", "reference"]
NAMES = ("q", "k", "v", "bias", "alibi_slopes", "sinks", "d_out", "d_lse")


def draw(device: str) -> dict[str, Tensor]:
    """q, k, v [1, S, 2, D], differentiable options, and gradients of out and lse; complex, of which the tests take parts."""
    generator = torch.Generator().manual_seed(11)
    shapes = {
        "q": (1, 20, 2, 16), "k": (1, 20, 2, 16), "v": (1, 20, 2, 8), "bias": (20, 20), "alibi_slopes": (2,), "sinks": (2,),
        "d_out": (1, 20, 2, 8), "d_lse": (1, 2, 20),
    }  # fmt: skip
    return {
        name: torch.randn(*shape, dtype=torch.complex64, generator=generator).to(device)
        for name, shape in shapes.items()
    }


def textbook(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """out and lse in fp64, causal, Sq = Sk."""
    q, k, v = (tensors[name] for name in "qkv")
    places = torch.arange(q.shape[1], device=q.device)
    away = places[:, None] - places
    logits = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5
    logits = logits - tensors["alibi_slopes"][:, None, None] * away.abs() + tensors["bias"]
    logits = logits.masked_fill(away < 0, -torch.inf)
    sinks = tensors["sinks"][None, :, None, None].expand(*logits.shape[:3], 1)
    whole = torch.cat([logits, sinks], 3)
    return torch.einsum("bhij,bjhd->bihd", torch.softmax(whole, 3)[..., :-1], v), torch.logsumexp(whole, 3)


def results(function: Any, tensors: dict[str, Tensor]) -> list[Tensor]:
    """out, lse and every gradient."""
    inputs = {name: t.requires_grad_() for name, t in tensors.items() if not name.startswith("d_")}
    out, lse = function(inputs)
    given = [tensors[name] for name in ("d_out", "d_lse")]
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), list(inputs.values()), given)]


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("contiguous", [False, True])
def test_lazily_negated_views(contiguous: bool, name: str, backend: str, device: str) -> None:
    """`x.conj().imag` is a view of x.imag with a bit that says minus; raw memory has the other sign."""
    drawn = draw(device)
    tensors = {other: t.real.clone() for other, t in drawn.items()}
    view = drawn[name].conj().imag
    tensors[name] = torch._neg_view(drawn[name].imag.clone()) if contiguous else view
    assert tensors[name].is_neg()
    doubles = {other: t.clone().double() for other, t in tensors.items()}

    def ours(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return tileflash.attention(**inputs, causal=True, return_lse=True, backend=backend)

    for one, other in zip(results(ours, tensors), results(textbook, doubles), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)
    if name in "qkv" or name in ("bias", "alibi_slopes", "sinks"):  # without gradients, too
        inputs = {other: t.detach() for other, t in tensors.items() if not other.startswith("d_")}
        torch.testing.assert_close(ours(inputs)[0].double(), textbook(doubles)[0].detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("name", ["q", "v", "bias", "sinks", "d_out", "d_lse"])
def test_zeros_without_memory(name: str, backend: str, device: str) -> None:
    """The zeros that autograd makes without taking memory."""
    tensors = {other: t.real.clone() for other, t in draw(device).items()}
    tensors[name] = torch._efficientzerotensor(tensors[name].shape, device=device)
    doubles = {other: t.double() for other, t in tensors.items() if other != name}
    doubles[name] = torch.zeros(tensors[name].shape, device=device, dtype=torch.float64)
    leaves = {other: t if other == name else t.requires_grad_() for other, t in tensors.items()}
    inputs = {other: t for other, t in leaves.items() if not other.startswith("d_")}
    out, lse = tileflash.attention(**inputs, causal=True, return_lse=True, backend=backend)
    want = textbook({other: doubles[other].requires_grad_(t.requires_grad) for other, t in inputs.items()})
    given = [[source[which] for which in ("d_out", "d_lse")] for source in (tensors, doubles)]
    wanted = [other for other, t in inputs.items() if t.requires_grad]
    ours = torch.autograd.grad((out, lse), [inputs[other] for other in wanted], given[0])
    theirs = torch.autograd.grad(want, [doubles[other] for other in wanted], given[1])
    for one, other in zip((out, lse, *ours), (*want, *theirs), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", OURS)
def test_batches_of_gradients(backend: str, device: str) -> None:
    """`torch.autograd.grad(is_grads_batched=True)` and vectorized Jacobians run the backward pass under vmap."""
    tensors = {name: t.real.clone() for name, t in draw(device).items()}
    inputs = {name: t.requires_grad_() for name, t in tensors.items() if not name.startswith("d_")}
    doubles = {name: t.detach().double().requires_grad_() for name, t in inputs.items()}
    generator = torch.Generator().manual_seed(3)
    d_out = torch.randn(3, 1, 20, 2, 8, generator=generator).to(device)
    d_lse = torch.randn(3, 1, 2, 20, generator=generator).to(device)
    given = tileflash.attention(**inputs, causal=True, return_lse=True, backend=backend)
    ours = torch.autograd.grad(given, list(inputs.values()), (d_out, d_lse), is_grads_batched=True)
    for entry in range(3):
        grads = (d_out[entry].double(), d_lse[entry].double())
        theirs = torch.autograd.grad(textbook(doubles), list(doubles.values()), grads)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one[entry].double(), other, rtol=1e-4, atol=1e-5)

    def of(sinks: Tensor, function: Any, rest: dict[str, Tensor]) -> Tensor:
        return function(rest | {"sinks": sinks})[0].sum((0, 1, 3))

    def attend(given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return tileflash.attention(**given, causal=True, return_lse=True, backend=backend)

    jacobians = [
        torch.autograd.functional.jacobian(lambda s: of(s, function, rest), rest["sinks"], vectorize=True)  # noqa: B023
        for function, rest in ((attend, inputs), (textbook, doubles))
    ]
    torch.testing.assert_close(jacobians[0].double(), jacobians[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("which", ["q", "k", "v", "d_out"])
def test_rows_that_are_far_apart(which: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """[S, B, H, D] memory of a batch of 1024: 128 rows of a tile span more than 2^31 elements. Such offsets have 32 bits in the kernels,
    which read elsewhere; no tensor with rows as far apart may reach them. (The memory is never touched, but for the rows.)"""
    strides = []

    def spy(function: Any) -> Any:
        def prepare(*arguments: Any) -> Any:
            strides.extend(t.stride(1) for t in arguments if isinstance(t, Tensor))
            return function(*arguments)

        return prepare

    for name in ("_prepare_forward", "_prepare_backward"):
        monkeypatch.setattr(launches, name, spy(getattr(launches, name)))
    tensors = {name: draw(device)[name].real.half()[:, :5].clone() for name in ("q", "k", "v", "d_out")}
    near = tensors[which]
    memory = torch.empty(5 * 2**24, dtype=torch.float16, device=device)
    far = memory.as_strided(near.shape, (0, 2**24, near.stride(2), 1)).copy_(near)
    results = []
    for own in (tensors, tensors | {which: far}):
        inputs = [own[name].detach().requires_grad_() for name in "qkv"]
        out = tileflash.attention(*inputs, causal=True, backend="triton")
        results.append((out, *torch.autograd.grad(out, inputs, own["d_out"])))
    assert strides
    assert 128 * max(strides) < 2**31
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_rows_that_are_far_apart_in_large_tiles() -> None:
    rows = 140  # more than a tile has
    memory = torch.empty(rows * 17_000_000, dtype=torch.float16, device="cuda")
    near = torch.randn(1, rows, 1, 64, dtype=torch.float16, device="cuda")
    far = memory.as_strided(near.shape, (0, 17_000_000, 64, 1)).copy_(near)
    for backend in ("triton", "hopper", "auto"):
        if tileflash.explain(far, far, far, backend=backend).choice is None:
            continue
        results = []
        for tensor in (near, far):
            inputs = [tensor.detach().requires_grad_() for _ in range(3)]
            out = tileflash.attention(*inputs, causal=True, backend=backend)
            results.append((out, *torch.autograd.grad(out.float().square().sum(), inputs)))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("backend", OURS)
def test_the_default_device_is_not_asked(backend: str, device: str) -> None:
    """Models are built under `torch.device("meta")`; whatever is called there with real tensors stays on their device."""
    tensors = {name: t.real.clone() for name, t in draw(device).items() if not name.startswith("d_")}
    q = tensors["q"].requires_grad_()
    cu = torch.tensor([0, 8, 20], dtype=torch.int32, device=device)
    seed = torch.tensor([3, 4], device=device)
    runs = []
    for where in (device, "meta"):
        with torch.device(where):
            out = tileflash.attention(**tensors, causal=True, dropout_p=0.3, dropout_seed=seed, backend=backend)
            packed = tileflash.attention_varlen(
                *(tensors[name][0] for name in "qkv"), cu, cu, dropout_p=0.3, dropout_seed=seed, backend=backend
            )
            runs.append((out, packed, *torch.autograd.grad((out.sum(), packed.sum()), q)))
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)
