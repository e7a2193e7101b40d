"""The lookup of tied embeddings: gradients as autograd's own, in place, in a fixed order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tileflash.operators.tied_embedding import add_rows, tied_lookup

BACKENDS = ["plain", "triton"]


def problem(dtype: torch.dtype, device: str, width: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight of 40 tokens, and tokens of which one comes 50 times, many once and some never."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, width, generator=generator).to(device, dtype).requires_grad_()
    tokens = torch.cat([torch.full((50,), 7), torch.randint(35, (40,), generator=generator)])
    return weight, tokens[torch.randperm(90, generator=generator)].view(2, 45).to(device)


@pytest.mark.parametrize("head_first", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_autograds(backend: str, head_first: bool, device: str) -> None:
    gradients = []
    for tied in (True, False):
        weight, tokens = problem(torch.float32, device)
        x = tied_lookup(tokens, weight, backend=backend) if tied else F.embedding(tokens, weight)
        # Where nothing but the lookup has a gradient it is made as usual.
        loss = (F.linear(x.sin(), weight) if head_first else x.sin()).square().sum()
        for _ in range(2):  # a second micro-batch adds
            loss.backward(retain_graph=True)
        gradients.append(weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_sums_are_rounded_once(backend: str, device: str) -> None:
    weight, tokens = problem(torch.bfloat16, device)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(90, 300, generator=generator).to(device)
    sums = torch.randn(40, 300, generator=generator).to(device, torch.bfloat16)
    exact = sums.double().index_add_(0, tokens.flatten(), rows.double())
    results = [sums.clone() for _ in range(2)]
    for result in results:
        add_rows(result, tokens.flatten(), rows, backend=backend)
    assert torch.equal(*results)
    assert ((results[0].double() - exact).abs() <= exact.abs() * 2.0**-7 + 1e-5).all()  # the interpreter cuts off
    untouched = torch.ones(40, dtype=torch.bool, device=device)
    untouched[tokens.flatten()] = False
    assert untouched.any()
    assert torch.equal(results[0][untouched], sums[untouched])
    assert weight.grad is None


def test_without_gradients_it_is_a_lookup() -> None:
    weight, tokens = problem(torch.float32, "cpu")
    with torch.no_grad():
        out = tied_lookup(tokens, weight)
    assert not out.requires_grad
    assert torch.equal(out, weight[tokens])
    add_rows(weight.detach(), tokens[:0].flatten(), out[:0].reshape(0, 300), backend="triton")


def test_second_derivatives_are_refused() -> None:
    weight, tokens = problem(torch.float32, "cpu")
    loss = F.linear(tied_lookup(tokens, weight), weight).square().sum()
    with pytest.raises(RuntimeError, match="tied_lookup has no second derivative"):
        loss.backward(create_graph=True)
