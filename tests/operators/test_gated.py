"""act(gate) * up against PyTorch's in fp64; on a CPU the kernels run in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tileflash.operators.gated import ACTIVATIONS, gated, plain_gated, swiglu

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}


def inputs(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """gate, over the whole range in which an activation bends, and up."""
    generator = torch.Generator().manual_seed(0)
    gate, up = ((4 * torch.randn(shape, generator=generator)).to(device, dtype).requires_grad_() for _ in range(2))
    return [gate, up]


def assert_near(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    error = (found.double() - wanted).abs().max()
    assert error <= tolerance * wanted.abs().max(), f"{float(error)} of {float(wanted.abs().max())}"


@pytest.mark.parametrize("backend", ["plain", "triton"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 3, 33), torch.float32), ((1,), torch.float32), ((2, 2500), torch.bfloat16), ((5, 64), torch.float16)],
)
def test_values_and_gradients_are_those_of_pytorch_in_fp64(
    device: str, poisoned_memory: None, backend: str, activation: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensors = inputs(device, shape, dtype)
    out = gated(*tensors, activation, backend=backend)
    d_out = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    found = (out, *torch.autograd.grad(out, tensors, d_out))
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    exact = plain_gated(*wide, activation)
    wanted = (exact, *torch.autograd.grad(exact, wide, d_out.double()))
    # PyTorch's chain rounds the activation before the product, and once more backward.
    tolerance = TOLERANCE[dtype] * (2 if backend == "plain" else 1)
    for one, want in zip(found, wanted, strict=True):
        assert one.dtype == dtype
        assert_near(one.detach(), want.detach(), tolerance)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_gates_neither_overflow_nor_cancel(device: str, activation: str) -> None:
    gate = torch.tensor([-1e30, -100.0, -12.0, -6.0, -0.0, 6.0, 100.0, 1e30], device=device)[:, None].requires_grad_()
    out = gated(gate, torch.ones_like(gate), activation, backend="triton")
    out.sum().backward()
    wide = gate.detach()[1:7].double().requires_grad_()
    exact = plain_gated(wide, torch.ones_like(wide), activation)
    exact.sum().backward()
    assert out.isfinite().all()
    assert gate.grad.isfinite().all()
    torch.testing.assert_close(out[1:7].double(), exact, rtol=1e-4 if activation != "gelu" else 1e-3, atol=2e-6)
    torch.testing.assert_close(gate.grad[1:7].double(), wide.grad, rtol=1e-4, atol=2e-6)


def test_halves_of_one_tensor_are_not_copied(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.randn(3, 5, 96, generator=torch.Generator().manual_seed(0)).to(device)
    gate, up = whole.chunk(2, dim=-1)
    wanted = plain_gated(gate, up, "silu")

    def refuse(*_: object) -> None:
        raise AssertionError("copied")

    monkeypatch.setattr(torch.Tensor, "contiguous", refuse)
    torch.testing.assert_close(swiglu(gate, up, backend="triton"), wanted)


def test_gradients_in_any_strides(device: str) -> None:
    tensors = inputs(device, (4, 40), torch.float32)
    for d_out in (torch.ones((), device=device).expand(4, 40), torch.randn(40, 4).to(device).t()):
        found = torch.autograd.grad(swiglu(*tensors, backend="triton"), tensors, d_out)
        wanted = torch.autograd.grad(plain_gated(*tensors, "silu"), tensors, d_out)
        torch.testing.assert_close(found, wanted)


def test_compiled_whole_it_is_the_same(device: str) -> None:
    found = []
    for run in (swiglu, torch.compile(swiglu, fullgraph=True, backend="aot_eager")):
        tensors = inputs(device, (5, 40), torch.bfloat16)
        out = run(*tensors, backend="triton")
        out.square().sum().backward()
        found.append([out.detach(), *(tensor.grad for tensor in tensors)])
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=0, atol=0)


def test_the_operators_are_registered_right_and_empty_is_empty() -> None:
    gate, up = torch.randn(3, 16), torch.randn(3, 16)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.tileflash.gated, (gate, up, "gelu"), test_utils=tests)
    torch.library.opcheck(torch.ops.tileflash.gated_backward, (gate, gate, up, "gelu"), test_utils=tests)
    assert swiglu(gate[:0], up[:0], backend="triton").shape == (0, 16)


def test_a_second_derivative_is_refused_by_the_kernels() -> None:
    gate, up = inputs("cpu", (3, 16), torch.float32)
    gradient = torch.autograd.grad(swiglu(gate, up, backend="triton").sum(), gate, create_graph=True)[0]
    with pytest.raises(RuntimeError, match='no second derivative; backend="plain" has'):
        gradient.sum().backward()


def test_what_does_not_fit_is_told() -> None:
    gate = torch.zeros(3, 16)
    with pytest.raises(ValueError, match=r"up is torch.float32 \(3, 15\): it must be as gate, torch.float32 \(3, 16\)"):
        swiglu(gate, gate[:, 1:])
    with pytest.raises(ValueError, match='activation is "relu": it must be one of silu, gelu_tanh, gelu'):
        gated(gate, gate, "relu")
