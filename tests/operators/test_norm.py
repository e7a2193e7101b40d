"""LayerNorm and RMSNorm with the residual add against PyTorch's in fp64; on a CPU the kernels run in Triton's interpreter."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tileflash.operators.norm import layer_norm, rms_norm

EPSILON = 1e-5
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def inputs(
    device: str, shape: tuple[int, ...], x_dtype: torch.dtype, update_dtype: torch.dtype | None, bias: bool = True
) -> list[Tensor | None]:
    """x, update, weight and bias; mean and scale far from 0 and 1."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    x = (3 * draw(*shape) + 5).to(device, x_dtype)
    update = None if update_dtype is None else (2 * draw(*shape)).to(device, update_dtype)
    weight = (1 + 0.3 * draw(shape[-1])).to(device)
    shift = draw(shape[-1]).to(device) if bias else None
    return [None if tensor is None else tensor.requires_grad_() for tensor in (x, update, weight, shift)]


def call(centered: bool, tensors: list[Tensor | None], backend: str) -> tuple[Tensor, Tensor]:
    x, update, weight, bias = tensors
    assert x is not None
    assert weight is not None
    if centered:
        return layer_norm(x, update, weight, bias, EPSILON, backend=backend)
    return rms_norm(x, update, weight, EPSILON, backend=backend)


def expected(centered: bool, tensors: list[Tensor | None], d_stream: Tensor, d_out: Tensor) -> list[Tensor]:
    """Stream, norm and the gradients of all tensors, in fp64."""
    wide = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in tensors]
    x, update, weight, bias = wide
    stream = x if update is None else x + update
    norm = F.layer_norm if centered else functools.partial(_rms_norm, bias_is_none=bias is None)
    out = norm(stream, (stream.shape[-1],), weight, bias, EPSILON)
    given = [tensor for tensor in wide if tensor is not None]
    loss = (stream * d_stream.double()).sum() + (out * d_out.double()).sum()
    return [stream.detach(), out.detach(), *torch.autograd.grad(loss, given)]


def _rms_norm(x: Tensor, shape: Any, weight: Tensor, bias: None, epsilon: float, bias_is_none: bool) -> Tensor:
    assert bias_is_none
    return F.rms_norm(x, shape, weight, epsilon)


def assert_near(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    error = (found.double() - wanted).abs().max()
    assert error <= tolerance * wanted.abs().max() + 1e-7, f"{float(error)} of {float(wanted.abs().max())}"


@pytest.mark.parametrize("backend", ["plain", "triton"])
@pytest.mark.parametrize("centered", [True, False], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize(
    ("shape", "x_dtype", "update_dtype"),
    [
        ((2, 7, 48), torch.float32, torch.float32), ((5, 33), torch.float32, torch.bfloat16), ((1, 1, 2), torch.float32, None),
        ((9, 100), torch.bfloat16, torch.bfloat16), ((4, 17), torch.float16, None), ((2, 3, 1600), torch.bfloat16, torch.float32),
    ],
)  # fmt: skip
def test_values_and_gradients_are_those_of_pytorch_in_fp64(
    device: str, poisoned_memory: None, backend: str, centered: bool, shape: tuple[int, ...], x_dtype: torch.dtype,
    update_dtype: torch.dtype | None,
) -> None:  # fmt: skip
    tensors = inputs(device, shape, x_dtype, update_dtype, bias=centered)
    stream, out = call(centered, tensors, backend)
    widest = x_dtype if update_dtype is None else torch.promote_types(x_dtype, update_dtype)
    assert stream.dtype == out.dtype == widest
    generator = torch.Generator().manual_seed(1)
    d_stream, d_out = (torch.randn(shape, generator=generator).to(device, widest) for _ in range(2))
    given = [tensor for tensor in tensors if tensor is not None]
    gradients = torch.autograd.grad((stream, out), given, (d_stream, d_out))
    for gradient, tensor in zip(gradients, given, strict=True):
        assert gradient.dtype == tensor.dtype
        assert gradient.shape == tensor.shape
    lowest = max(TOLERANCE[tensor.dtype] for tensor in given)
    for found, wanted in zip((stream, out, *gradients), expected(centered, tensors, d_stream, d_out), strict=True):
        assert_near(found.detach(), wanted, lowest)


@pytest.mark.parametrize("centered", [True, False], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize("used", ["stream", "out"])
def test_either_result_may_go_unused(device: str, centered: bool, used: str) -> None:
    tensors = inputs(device, (6, 40), torch.float32, torch.float32, bias=centered)
    result = call(centered, tensors, "triton")[0 if used == "stream" else 1]
    d_result = torch.randn(6, 40, generator=torch.Generator().manual_seed(1)).to(device)
    given = [tensor for tensor in tensors if tensor is not None]
    found = torch.autograd.grad(result, given, d_result)
    nothing = torch.zeros_like(d_result)
    wanted = expected(centered, tensors, *((d_result, nothing) if used == "stream" else (nothing, d_result)))[2:]
    for gradient, want in zip(found, wanted, strict=True):
        assert_near(gradient, want, 2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["plain", "triton"])
def test_the_updates_bias_is_added_with_it(
    device: str, poisoned_memory: None, backend: str, dtype: torch.dtype
) -> None:
    """As training has it: an fp32 stream, update, bias and gains in one dtype."""
    x, update, weight, bias = inputs(device, (7, 33), torch.float32, dtype)
    update_bias = (3 + torch.randn(33, generator=torch.Generator().manual_seed(2))).to(device, dtype).requires_grad_()
    weight, bias = (tensor.detach().to(dtype).requires_grad_() for tensor in (weight, bias))
    results = layer_norm(x, update, weight, bias, EPSILON, update_bias=update_bias, backend=backend)
    d_stream, d_out = (torch.randn(7, 33, generator=torch.Generator().manual_seed(3)).to(device) for _ in range(2))
    given = [x, update, weight, bias, update_bias]
    gradients = torch.autograd.grad(results, given, (d_stream, d_out))
    summed = [x, update.detach().double() + update_bias.detach().double(), weight, bias]
    wanted = expected(True, summed, d_stream, d_out)
    wanted.append(wanted[3].sum(0))
    for found, want in zip((*results, *gradients), wanted, strict=True):
        assert_near(found.detach(), want, TOLERANCE[dtype])
    assert [gradient.dtype for gradient in gradients] == [tensor.dtype for tensor in given]
    with pytest.raises(ValueError, match="update_bias is given and update is not"):
        layer_norm(x, None, weight, bias, EPSILON, update_bias=update_bias)


def test_rows_may_lie_apart(device: str) -> None:
    """Slices of a wider tensor, and columns that are not neighbours, which are copied."""
    whole = torch.randn(4, 6, 80, generator=torch.Generator().manual_seed(0)).to(device)
    weight = torch.rand(40, generator=torch.Generator().manual_seed(1)).to(device)
    for x in (whole[..., :40], whole[:, 2:4, 40:], whole[..., ::2]):
        stream, out = rms_norm(x, x, weight, EPSILON, backend="triton")
        torch.testing.assert_close(stream, 2 * x)
        torch.testing.assert_close(out, F.rms_norm(2 * x, (40,), weight, EPSILON))


def test_a_mean_far_from_zero_does_not_cancel(device: str) -> None:
    x = 1e4 + torch.randn(3, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = x.float().to(device)
    weight, bias = torch.ones(64, device=device), torch.zeros(64, device=device)
    _, out = layer_norm(x, None, weight, bias, EPSILON, backend="triton")
    assert_near(out, F.layer_norm(x.double(), (64,), eps=EPSILON), 1e-3)


def test_no_rows(device: str) -> None:
    tensors = inputs(device, (0, 16), torch.float32, torch.float32)
    stream, out = call(True, tensors, "triton")
    (stream.sum() + out.sum()).backward()
    assert stream.shape == out.shape == (0, 16)
    assert not tensors[2].grad.any()


@pytest.mark.parametrize("centered", [True, False], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize("backend", ["plain", "triton"])
def test_autocast_gives_what_the_next_matrix_product_reads(device: str, backend: str, centered: bool) -> None:
    tensors = inputs(device, (3, 32), torch.float32, torch.bfloat16, bias=centered)
    with torch.autocast(device, dtype=torch.bfloat16):
        stream, out = call(centered, tensors, backend)
    assert (stream.dtype, out.dtype) == (torch.float32, torch.bfloat16)
    (stream.sum() + out.float().sum()).backward()
    assert tensors[0].grad.dtype == torch.float32
    assert tensors[1].grad.dtype == torch.bfloat16


@pytest.mark.parametrize("centered", [True, False], ids=["layer_norm", "rms_norm"])
def test_compiled_whole_it_is_the_same(device: str, centered: bool) -> None:
    def function(*tensors: Tensor | None) -> Tensor:
        stream, out = call(centered, list(tensors), "triton")
        return (stream * out).sum()

    found = []
    for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        tensors = inputs(device, (5, 40), torch.float32, torch.bfloat16, bias=centered)
        run(*tensors).backward()
        found.append([tensor.grad for tensor in tensors if tensor is not None])
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=1e-6)


def test_the_operators_are_registered_right() -> None:
    for update, bias, centered in ((None, None, False), (torch.randn(3, 16).bfloat16(), torch.randn(16), True)):
        arguments = (torch.randn(3, 16), update, torch.randn(16), bias, EPSILON, centered, torch.bfloat16, bias)
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(torch.ops.tileflash.norm, arguments, test_utils=tests)
        stream, out, mean, rstd = torch.ops.tileflash.norm(*arguments)
        stream = arguments[0] if update is None else stream
        dtype = torch.float32 if update is None else torch.bfloat16
        backward = (out, None, stream, arguments[2], mean, rstd, dtype, torch.float32, bias is not None, centered)
        torch.library.opcheck(torch.ops.tileflash.norm_backward, backward, test_utils=tests)


def test_a_second_derivative_is_refused_by_the_kernels_and_made_by_pytorch() -> None:
    x, _, weight, _ = inputs("cpu", (3, 16), torch.float32, None)
    gradient = torch.autograd.grad(rms_norm(x, None, weight, EPSILON, backend="triton")[1].sum(), x, create_graph=True)[
        0
    ]
    with pytest.raises(RuntimeError, match='no second derivative; backend="plain" has'):
        gradient.square().sum().backward()
    gradient = torch.autograd.grad(rms_norm(x, None, weight, EPSILON)[1].sum(), x, create_graph=True)[0]
    gradient.square().sum().backward()


def test_what_does_not_fit_is_told() -> None:
    x, weight = torch.zeros(3, 16), torch.zeros(16)
    with pytest.raises(ValueError, match=r"update is \(16,\): it must be x's \(3, 16\)"):
        layer_norm(x, weight, weight, None, EPSILON)
    with pytest.raises(ValueError, match=r"bias is \(15,\): it must be \(16,\)"):
        layer_norm(x, None, weight, weight[1:], EPSILON)
