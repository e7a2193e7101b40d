"""Linear + cross entropy against PyTorch's own in fp64: every dtype, odd sizes, chunks, what is ignored, smoothed or not finite.

On a CPU the kernel runs in Triton's interpreter; on a GPU the same tests run the compiled one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from tileflash.operators.linear_cross_entropy import linear_cross_entropy
from tileflash.operators.linear_cross_entropy_chunks import plain_rows, rows_per_chunk

BACKENDS = ("plain", "triton")
# Largest difference from fp64 as a share of the largest gradient: rounding of logits and of their gradients once each.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def problem(
    device: str, rows: int, classes: int, width: int = 24, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [rows, width] and weight [classes, width], which want gradients, and targets, some of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator).to(device, dtype)
    weight = torch.randn(classes, width, generator=generator).to(device, dtype)
    targets = torch.randint(classes, (rows,), generator=generator)
    targets[:: max(2, rows // 3)] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), targets.to(device)


def expected(
    hidden: Tensor, weight: Tensor, targets: Tensor, divisor: float, smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, d_hidden, d_weight) in fp64 by PyTorch's cross entropy."""
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    logits = wide[0] @ wide[1].t()
    loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
    loss = loss + z_loss * torch.logsumexp(logits, 1)[targets != -100].square().sum()
    loss = loss / divisor
    return loss.detach(), *torch.autograd.grad(loss, wide)


def assert_near(found: Tensor | None, wanted: Tensor, tolerance: float) -> None:
    assert found is not None
    error = (found.double() - wanted).abs().max()
    assert error <= tolerance * wanted.abs().max(), f"{float(error)} of {float(wanted.abs().max())}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "classes", "budget", "smoothing", "z_loss"),
    [(1, 1, 1, 0.0, 0.0), (7, 5, 10**6, 0.0, 0.0), (37, 257, 8000, 0.1, 1e-3), (13, 1031, 1, 0.0, 1e-2), (5, 9000, 10**6, 0.2, 0.0)],
)  # fmt: skip
def test_loss_and_gradients_are_those_of_pytorch_in_fp64(
    device: str, backend: str, dtype: torch.dtype, rows: int, classes: int, budget: int, smoothing: float, z_loss: float,
    poisoned_memory: None,
) -> None:  # fmt: skip
    hidden, weight, targets = problem(device, rows, classes, dtype=dtype)
    targets[-1] = classes - 1
    loss = linear_cross_entropy(
        hidden, weight, targets, divisor=3.0, label_smoothing=smoothing, z_loss=z_loss, memory_budget_bytes=budget, backend=backend,
    )  # fmt: skip
    (7 * loss).backward()
    wanted = expected(hidden, weight, targets, 3.0 / 7.0, smoothing, z_loss)
    assert loss.dtype == torch.float32
    assert hidden.grad.dtype == weight.grad.dtype == dtype
    scale = max(float(wanted[0]), 1.0)
    assert abs(7 * float(loss.detach()) - float(wanted[0])) <= TOLERANCE[dtype] * scale
    assert_near(hidden.grad, wanted[1], TOLERANCE[dtype] if classes > 1 else 1e-3 + TOLERANCE[dtype])
    assert_near(weight.grad, wanted[2], TOLERANCE[dtype] if classes > 1 else 1e-3 + TOLERANCE[dtype])


def test_fp64_stays_fp64() -> None:
    hidden, weight, targets = problem("cpu", 9, 33, dtype=torch.float64)
    loss = linear_cross_entropy(hidden, weight, targets, divisor=5, label_smoothing=0.1, memory_budget_bytes=600)
    loss.backward()
    wanted = expected(hidden, weight, targets, 5, 0.1)
    assert loss.dtype == torch.float64
    for found, want in zip((loss.detach(), hidden.grad, weight.grad), wanted, strict=True):
        assert_near(found, want, 1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_rows_of_the_weight_take_no_part(device: str, backend: str, poisoned_memory: None) -> None:
    hidden, weight, targets = problem(device, 11, 50)
    with torch.no_grad():
        weight[43:] = 1e4
    targets.clamp_(max=42)
    loss = linear_cross_entropy(hidden, weight, targets, vocab_size=43, divisor=2, backend=backend)
    loss.backward()
    wanted = expected(hidden, weight[:43], targets, 2)
    assert_near(loss.detach(), wanted[0], 2e-6)
    assert_near(hidden.grad, wanted[1], 2e-6)
    assert_near(weight.grad[:43], wanted[2], 2e-6)
    assert not weight.grad[43:].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_logits_of_minus_infinity_leave_the_loss_finite(device: str, backend: str, smoothing: float) -> None:
    """Classes that are impossible: the loss is that of the others alone. Half of a lane, and whole tiles of it."""
    logits = torch.randn(3, 9008, generator=torch.Generator().manual_seed(1)).to(device)
    possible = torch.ones(9000, dtype=torch.bool, device=device)
    possible[3:8700] = False
    possible[8990:] = False
    logits[:, :9000][:, ~possible] = -torch.inf
    targets = torch.tensor([1, 8800, 2], device=device)
    wanted_logits = logits[:, :9000][:, possible].double().requires_grad_()
    remaining = (torch.cumsum(possible, 0) - 1)[targets]
    wanted = F.cross_entropy(wanted_logits, remaining, reduction="none", label_smoothing=smoothing)
    wanted.sum().backward()
    losses = torch.empty(3, device=device)
    rows(backend)(logits, targets, torch.ones((), device=device), losses, 9000, -100, smoothing, 0.0, True)
    assert_near(losses, wanted.detach(), 1e-6)
    assert_near(logits[:, :9000][:, possible], wanted_logits.grad, 1e-6)
    assert not logits[:, :9000][:, ~possible].any()


def rows(backend: str) -> Callable[..., None]:
    if backend == "plain":
        return plain_rows
    from tileflash.kernels.triton.cross_entropy import cross_entropy_rows

    return cross_entropy_rows


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_has_no_finite_loss_is_not_finite(device: str, backend: str) -> None:
    """NaN anywhere, a row of -inf, a target that is no class, a target that is impossible; the row beside is left in peace."""
    logits = torch.randn(5, 48, generator=torch.Generator().manual_seed(2)).to(device)
    logits[0, 40] = torch.nan
    logits[1] = -torch.inf
    logits[3, 5] = -torch.inf
    targets = torch.tensor([1, 1, 45, 5, 7], device=device)
    losses = torch.empty(5, device=device)
    rows(backend)(logits, targets, torch.ones((), device=device), losses, 45, -100, 0.0, 0.0, True)
    assert losses.isfinite().tolist() == [False, False, False, False, True]


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_logits_do_not_overflow(device: str, backend: str) -> None:
    logits = torch.tensor([[3e38, 3e38, -3e38, 0.0] * 4, [1e4, -1e4, 0.0, 1e4] * 4], device=device)
    targets = torch.tensor([0, 0], device=device)
    wanted = F.cross_entropy(logits[1:].double(), targets[1:], reduction="none")
    losses = torch.empty(2, device=device)
    rows(backend)(logits, targets, torch.ones((), device=device), losses, 16, -100, 0.0, 0.0, False)
    assert_near(losses[1:], wanted, 1e-6)
    assert losses.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_counted_where_every_target_is_ignored(device: str, backend: str, poisoned_memory: None) -> None:
    hidden, weight, targets = problem(device, 6, 19)
    loss = linear_cross_entropy(hidden, weight, targets.fill_(-100), backend=backend)
    loss.backward()
    assert float(loss.detach()) == 0
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_no_rows_at_all(device: str) -> None:
    hidden, weight, targets = (tensor.detach() for tensor in problem(device, 4, 19))
    hidden, weight = hidden[:0].requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, targets[:0])
    loss.backward()
    assert float(loss.detach()) == 0
    assert not weight.grad.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_chunks_change_nothing_but_the_order_of_sums(device: str, backend: str) -> None:
    found = []
    for budget in (1, 64 * 4 * 5, 10**9):
        hidden, weight, targets = problem(device, 23, 61)
        loss = linear_cross_entropy(hidden, weight, targets, memory_budget_bytes=budget, backend=backend)
        loss.backward()
        found.append((loss.detach().double(), hidden.grad.double(), weight.grad.double()))
    for part in found[:2]:
        for one, whole in zip(part, found[2], strict=True):
            assert_near(one, whole, 1e-6)


def test_chunks_fit_the_budget_are_equal_and_whole_tiles() -> None:
    assert rows_per_chunk(256, 50304, 2, 512 * 2**20) == 256
    assert rows_per_chunk(32768, 50304, 2, 512 * 2**20) == 4736  # 7 chunks
    assert rows_per_chunk(32768, 50257, 2, 512 * 2**20) == 4736
    assert rows_per_chunk(16384, 128256, 2, 512 * 2**20) == 2048
    assert rows_per_chunk(300, 1000, 4, 2 * 1024 * 4) == 2
    assert rows_per_chunk(300, 1000, 4, 1) == 1
    assert rows_per_chunk(0, 1000, 4, 1) == 1
    for budget in (1, 10**5, 10**6, 10**7, 10**8):
        chunk = rows_per_chunk(5000, 50257, 2, budget)
        assert chunk == 1 or chunk * 50304 * 2 <= budget


def test_the_divisor_may_lie_on_the_device_and_shapes_are_free(device: str) -> None:
    hidden, weight, targets = problem(device, 12, 31)
    divisor = torch.full((1,), 9.0, device=device)
    shaped = hidden.detach().reshape(3, 4, 24).transpose(0, 1).requires_grad_()
    loss = linear_cross_entropy(shaped, weight, targets.reshape(3, 4).t(), divisor=divisor)
    loss.backward()
    wanted = expected(hidden, weight, targets, 9.0)
    assert_near(loss.detach(), wanted[0], 1e-6)
    assert_near(shaped.grad.transpose(0, 1).reshape(12, 24), wanted[1], 2e-6)
    assert_near(weight.grad, wanted[2], 2e-6)


@pytest.mark.parametrize("trainable", ["hidden", "weight"])
def test_only_the_gradients_that_are_wanted_are_made(device: str, trainable: str) -> None:
    hidden, weight, targets = problem(device, 9, 31)
    (weight if trainable == "hidden" else hidden).requires_grad_(False)
    linear_cross_entropy(hidden, weight, targets).backward()
    wanted = expected(hidden, weight, targets, 1.0)
    for tensor, want, name in ((hidden, wanted[1], "hidden"), (weight, wanted[2], "weight")):
        if name == trainable:
            assert_near(tensor.grad, want, 2e-6)
        else:
            assert tensor.grad is None
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, targets).requires_grad


def test_autocast_computes_in_bf16_and_sums_the_weights_gradient_in_fp32(device: str) -> None:
    """Ten thousand rows that each add the same: a sum of chunks in bf16 would stand still."""
    hidden = torch.full((4096, 8), 0.5, device=device, requires_grad=True)
    weight = torch.zeros(2, 8, device=device, requires_grad=True)
    targets = torch.zeros(4096, dtype=torch.int64, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets, memory_budget_bytes=64 * 2)
    loss.backward()
    assert weight.grad.dtype == hidden.grad.dtype == torch.float32
    torch.testing.assert_close(weight.grad, torch.tensor([[-1024.0], [1024.0]], device=device).expand(2, 8))


def test_fp16_keeps_gradients_that_are_small_until_the_loss_scale_is_known(device: str) -> None:
    hidden, weight, targets = problem(device, 8, 1009, dtype=torch.float16)
    loss = linear_cross_entropy(hidden, weight, targets, divisor=1e5)
    (loss * 2.0**16).backward()
    wanted = expected(hidden, weight, targets, 1e5 / 2**16)
    assert_near(hidden.grad, wanted[1], 4e-3)
    assert_near(weight.grad, wanted[2], 4e-3)
    small = wanted[2].abs() < wanted[2].abs().median()
    assert (weight.grad[small] != 0).double().mean() > 0.9


def test_under_autocast_the_weights_gradient_is_not_rounded_to_bf16(device: str) -> None:
    """It is the product of what is in bf16, made in fp32: not every element of it can be a bf16 number."""
    hidden, weight, targets = problem(device, 64, 67)
    with torch.autocast(device, dtype=torch.bfloat16):
        linear_cross_entropy(hidden, weight, targets).backward()
    assert (weight.grad != weight.grad.bfloat16()).double().mean() > 0.5
    assert (hidden.grad != hidden.grad.bfloat16()).double().mean() > 0.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_whole_it_is_the_same(device: str, backend: str) -> None:
    def loss_of(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(2 * hidden, weight, targets, divisor=5, backend=backend)

    found = []
    for function in (loss_of, torch.compile(loss_of, fullgraph=True, backend="aot_eager")):
        hidden, weight, targets = problem(device, 9, 31)
        loss = function(hidden, weight, targets)
        loss.backward()
        found.append((loss.detach(), hidden.grad, weight.grad))
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=0, atol=0)


def test_the_operator_is_registered_right() -> None:
    hidden, weight, targets = problem("cpu", 5, 31)
    for wanted in ((True, True), (False, True), (False, False)):
        arguments = (
            hidden,
            weight,
            targets,
            torch.ones(()),
            31,
            -100,
            0.1,
            0.0,
            torch.float32,
            10**4,
            "plain",
            *wanted,
        )
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(torch.ops.tileflash.linear_cross_entropy, arguments, test_utils=tests)


def test_fake_tensors_and_flops() -> None:
    with FakeTensorMode():
        hidden = torch.empty(32768, 768, requires_grad=True)
        weight = torch.empty(50304, 768, requires_grad=True)
        targets = torch.empty(32768, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter:
            linear_cross_entropy(hidden, weight, targets, vocab_size=50257).backward()
    assert weight.grad.shape == weight.shape
    assert counter.get_total_flops() == 6 * 32768 * 768 * 50304


def test_a_second_backward_pass_and_a_second_derivative_are_refused(device: str) -> None:
    hidden, weight, targets = problem(device, 5, 31)
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="given its gradients away"):
        loss.backward()
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), hidden, create_graph=True)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="eager")
    gradient = torch.autograd.grad(compiled(hidden, weight, targets), hidden, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="has no second derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"targets": torch.zeros(3, dtype=torch.int64)}, "targets is torch.int64 .3,.: it must be int64 .4,."),
        ({"targets": torch.zeros(4, dtype=torch.int32)}, "targets is torch.int32"),
        ({"weight": torch.zeros(7, 9)}, r"hidden is \(4, 8\) and weight \(7, 9\)"),
        ({"weight": torch.zeros(7, 8, dtype=torch.float64)}, "weight is torch.float64: without autocast"),
        ({"divisor": torch.ones(2)}, "divisor is .2,.: it must be a number, or a tensor of one element"),
        ({"divisor": torch.ones((), device="meta")}, "divisor is on meta: it must be on hidden's cpu"),
        ({"vocab_size": 8}, "vocab_size is 8: it must be 1 to 7"),
        ({"label_smoothing": 1.5}, "label_smoothing is 1.5"),
        ({"z_loss": -1.0}, "z_loss is -1.0"),
        ({"memory_budget_bytes": 0}, "memory_budget_bytes is 0"),
        ({"backend": "cuda"}, 'backend is "cuda": it must be one of auto, triton, plain'),
    ],
)
def test_what_does_not_fit_is_told(change: dict[str, object], told: str) -> None:
    arguments = {"hidden": torch.zeros(4, 8), "weight": torch.zeros(7, 8), "targets": torch.zeros(4, dtype=torch.int64)}
    with pytest.raises(ValueError, match=told):
        linear_cross_entropy(**{**arguments, **change})  # type: ignore[arg-type]
