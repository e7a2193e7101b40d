"""On a GPU, at the sizes of real training steps: exactness, memory, no wait for the GPU, and CUDA graphs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tileflash.operators.gated import plain_gated, swiglu
from tileflash.operators.linear_cross_entropy import linear_cross_entropy
from tileflash.operators.norm import layer_norm, plain_norm, rms_norm
from tileflash.operators.rotary import plain_rotary, rotary

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch sees"),
]
GPT2 = (50304, 50257, 768)  # rows of the head's weight, classes, width
LLAMA = (128256, 128256, 2048)


def head(rows: int, sizes: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """hidden bf16 [rows, C] and weight fp32 [V, C], which want gradients, and targets, of which a few are ignored."""
    columns, classes, width = sizes
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(columns, width, generator=generator, device="cuda") * 0.05).requires_grad_()
    targets = torch.randint(classes, (rows,), generator=generator, device="cuda")
    targets[::7] = -100
    return hidden, weight, targets


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference as a share of the norm."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("sizes", [GPT2, LLAMA], ids=["gpt2", "llama3"])
@pytest.mark.parametrize("rows", [256, 2000])
def test_loss_and_gradients_of_a_head_are_those_of_fp32(rows: int, sizes: tuple[int, int, int]) -> None:
    hidden, weight, targets = head(rows, sizes)
    divisor = torch.full((), 900.0, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = linear_cross_entropy(
            hidden, weight, targets, divisor=divisor, vocab_size=sizes[1], memory_budget_bytes=600 * sizes[0] * 2
        )
    loss.backward()
    wide_hidden = hidden.detach().float().requires_grad_()
    wide_weight = weight.detach().bfloat16().float().requires_grad_()
    logits = (wide_hidden @ wide_weight.t())[:, : sizes[1]]
    wanted = F.cross_entropy(logits, targets, reduction="sum") / 900
    wanted.backward()
    assert abs(float(loss.detach() - wanted.detach())) <= 2e-3 * float(wanted.detach())
    assert relative_error(hidden.grad, wide_hidden.grad) <= 1e-2
    assert relative_error(weight.grad, wide_weight.grad) <= 1e-2
    assert weight.grad.dtype == torch.float32
    assert not weight.grad[sizes[1] :].any()


def test_memory_of_a_large_batch_is_the_budget_and_the_gradients() -> None:
    hidden, weight, targets = head(32768, GPT2)
    budget = 256 * 2**20
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets, vocab_size=50257, memory_budget_bytes=budget)
    loss.backward()
    extra = torch.cuda.max_memory_allocated() - before
    gradients = 4 * weight.numel() + 2 * hidden.numel()
    # Beside them: the weight in bf16, and where PyTorch cannot add a product to fp32, one more gradient of the weight.
    assert extra <= budget + gradients + 2 * weight.numel() + 4 * weight.numel() + 16 * 2**20
    assert extra < 2 * 32768 * 50304  # the logits whole in bf16


def test_a_vocabulary_that_is_no_multiple_of_anything() -> None:
    found = []
    for backend in ("triton", "plain"):
        hidden, weight, targets = head(512, (50257, 50257, 768))
        loss = linear_cross_entropy(
            hidden.float().detach().requires_grad_(), weight, targets, label_smoothing=0.1, z_loss=1e-4, backend=backend
        )
        loss.backward()
        found.append((loss.detach(), weight.grad))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=0)
    assert relative_error(found[0][1], found[1][1]) <= 1e-5


def test_nothing_waits_for_the_gpu_and_a_graph_replays_it() -> None:
    hidden, weight, targets = head(256, GPT2)
    divisor = torch.full((), 100.0, device="cuda")
    loss_out = torch.zeros((), device="cuda")

    def work() -> None:
        hidden.grad = weight.grad = None
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = linear_cross_entropy(hidden, weight, targets, divisor=divisor, vocab_size=50257)
        loss.backward()
        loss_out.copy_(loss.detach())

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
        torch.cuda.set_sync_debug_mode("error")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(side)
    first = (float(loss_out), weight.grad.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):  # where autograd accumulates by now
        work()
    divisor.fill_(200.0)
    graph.replay()
    assert abs(float(loss_out) - first[0] / 2) <= 1e-4 * first[0]
    assert relative_error(weight.grad, first[1] / 2) <= 1e-2


@pytest.mark.parametrize(
    ("shape", "centered"), [((4, 64, 768), True), ((32, 1024, 768), True), ((4, 1024, 2048), False), ((3, 5, 1600), True)]
)  # fmt: skip
def test_norms_at_the_sizes_of_training(shape: tuple[int, ...], centered: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(shape, generator=generator, device="cuda").requires_grad_()
    update = torch.randn(shape, generator=generator, device="cuda").bfloat16().requires_grad_()
    weight = torch.rand(shape[-1], generator=generator, device="cuda").requires_grad_()
    bias = torch.rand(shape[-1], generator=generator, device="cuda").requires_grad_() if centered else None
    with torch.autocast("cuda", dtype=torch.bfloat16):
        norm = layer_norm(x, update, weight, bias, 1e-5) if centered else rms_norm(x, update, weight, 1e-5)
    d_stream = torch.randn(shape, generator=generator, device="cuda")
    d_out = torch.randn(shape, generator=generator, device="cuda").bfloat16()
    given = [tensor for tensor in (x, update, weight, bias) if tensor is not None]
    found = (*norm, *torch.autograd.grad(norm, given, (d_stream, d_out)))
    wide = [
        None if tensor is None else tensor.detach().double().requires_grad_() for tensor in (x, update, weight, bias)
    ]
    exact = plain_norm(*wide, 1e-5, centered)
    wanted = torch.autograd.grad(
        exact, [tensor for tensor in wide if tensor is not None], (d_stream.double(), d_out.double())
    )
    for one, want in zip(found, (*exact, *wanted), strict=True):
        assert relative_error(one.detach(), want.detach()) <= (4e-3 if one.dtype == torch.bfloat16 else 1e-5)


def test_swiglu_and_rotary_at_the_sizes_of_training() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    gate, up = (
        torch.randn(4, 1024, 8192, generator=generator, device="cuda").bfloat16().requires_grad_() for _ in range(2)
    )
    d_out = torch.randn(4, 1024, 8192, generator=generator, device="cuda").bfloat16()
    found = torch.autograd.grad(swiglu(gate, up), (gate, up), d_out)
    wide = [tensor.detach().float().requires_grad_() for tensor in (gate, up)]
    for one, want in zip(found, torch.autograd.grad(plain_gated(*wide, "silu"), wide, d_out.float()), strict=True):
        assert relative_error(one, want) <= 4e-3
    qkv = torch.randn(4, 1024, 48, 64, generator=generator, device="cuda").bfloat16().requires_grad_()
    angles = 100 * torch.rand(1024, 32, generator=generator, device="cuda")
    q, k, _ = qkv.split([32, 8, 8], dim=2)
    for one, x in zip(rotary(q, k, angles.cos(), angles.sin()), (q, k), strict=True):
        assert relative_error(one.detach(), plain_rotary(x.detach().double(), angles.cos(), angles.sin())) <= 4e-3
