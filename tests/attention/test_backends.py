"""Every backend against fp64 on every case it says it serves, and its refusal with reasons on every other. Made from declared facts."""

import pytest
import torch

import tileflash
from support.exactness import Case, check
from tileflash.attention.dispatch import BACKENDS, NoBackendError
from tileflash.attention.problem import make_problem

ON_GPU = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# Odd lengths, tile borders and both sides of them, head dimensions that are no power of two, grouped heads, both alignments.
SHAPES = [
    Case(64, 64, 64),
    Case(33, 33, 16, causal=True),
    Case(65, 65, 40, heads=4, kv_heads=2, causal=True),
    Case(70, 45, 24, causal=True),
    Case(45, 70, 24, causal=True),
    Case(45, 70, 24, causal="top-left"),
    Case(70, 45, 32, causal="top-left"),
    Case(1, 77, 64, heads=4, kv_heads=1, causal=True),
    Case(77, 1, 16, causal=True),
    Case(63, 63, 8, dv=24),
    Case(40, 40, 72, dv=16, causal=True),
    Case(97, 97, 16, window=(13, 0)),
    Case(50, 97, 16, window=(7, 9)),
    Case(97, 50, 16, window=(0, 0)),
    Case(60, 60, 16, window=(None, 5)),
    Case(60, 60, 16, window=(5, None), causal=True),
    Case(35, 35, 3, scale=0.7),
    Case(31, 31, 100, batch=1, heads=1, kv_heads=1, causal=True),
    Case(33, 33, 136, batch=1, dv=160, causal=True),  # above 128: d_k and d_v by a launch each
]
# Head dimensions of every pair of widths, narrow ones above all: Triton laid out 16 and 32 wide operands wrongly together.
WIDTHS = [
    (24, 8),
    (8, 24),
    (16, 64),
    (64, 16),
    (1, 1),
    (33, 5),
    (100, 8),
    (8, 100),
    (200, 24),
    (24, 200),
    (128, 16),
    (300, 500),
    (512, 512),
]
GPU_SHAPES = [
    Case(1000, 1000, 64, causal=True),
    Case(513, 2049, 128, heads=8, kv_heads=2, causal=True),
    Case(2049, 513, 128, causal=True),
    Case(777, 777, 256, causal=True),
    Case(640, 900, 256),
    Case(1025, 1025, 136, heads=4, kv_heads=4),
    Case(1111, 1111, 72, window=(100, 50)),
    Case(600, 600, 192, dv=128, causal=True),
    Case(1, 4097, 128, heads=32, kv_heads=8, causal=True),
    Case(384, 384, 64, heads=12, kv_heads=12, causal=True),
    *(Case(70, 131, d, heads=4, kv_heads=2, dv=dv, causal="top-left") for d, dv in WIDTHS),
]
CASES = [case.on(dtype) for case in SHAPES for dtype in DTYPES]
GPU_CASES = [case.on(dtype) for case in GPU_SHAPES for dtype in (torch.bfloat16, torch.float16)] + [
    Case(300, 300, 64, dtype=torch.float32, causal=True),
    Case(300, 300, 128, dtype=torch.float32),
]


def serve_or_refuse(case: Case, name: str, device: str, with_lse: bool) -> None:
    q, k, v = case.draw(device)
    reasons = BACKENDS[name].reasons(make_problem(q, k, v, case.causal, case.window, case.scale, with_lse))
    if not reasons:
        check(case, name, device, with_lse)
        return
    with pytest.raises(NoBackendError) as raised:
        tileflash.attention(q, k, v, **case.arguments(), return_lse=with_lse, backend=name)
    for reason in reasons:
        assert reason in str(raised.value)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_serves_within_promise_or_says_why_not(case: Case, name: str, device: str, poisoned_memory: None) -> None:
    with_lse = BACKENDS[name].lse == "differentiable"
    serve_or_refuse(case, name, device, with_lse)


@pytest.mark.parametrize("first", range(0, 32, 8))
def test_every_place_of_an_edge_in_a_tile(first: int, device: str) -> None:
    """Both edges of the band at each place within a tile of 32, with tiles between them that are not masked.

    An edge off by one in what counts as unmasked shows only where the edge is the last or the first of a tile.
    """
    inputs = [t.detach().requires_grad_() for t in Case(96, 96, 16, batch=1, heads=1, kv_heads=1).draw(device)]
    for left in range(32 + first, 40 + first):
        window = (left, 32 + (5 * left) % 32)  # 5 is prime to 32: all places of the right edge, too
        out, expected = (tileflash.attention(*inputs, window=window, backend=name) for name in ("triton", "reference"))
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5, msg=str(window))
        d_out = torch.randn_like(out)
        for ours, theirs in zip(
            torch.autograd.grad(out, inputs, d_out), torch.autograd.grad(expected, inputs, d_out), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=str(window))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "reference"])
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_large_shapes_on_the_gpu(case: Case, name: str, poisoned_memory: None) -> None:
    serve_or_refuse(case, name, "cuda", BACKENDS[name].lse == "differentiable")


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", [Case(40, 40, 16, causal=True), Case(40, 40, 16)], ids=str)
def test_log_sum_exp_is_refused_where_it_is_not_had(case: Case, name: str, device: str) -> None:
    serve_or_refuse(case, name, device, with_lse=True)


def test_something_serves_every_case_under_auto(device: str) -> None:
    for case in CASES:
        q, k, v = case.draw(device)
        assert tileflash.explain(q, k, v, **case.arguments()).choice is not None, str(case)


def test_the_fused_backends_serve_what_they_are_for(device: str) -> None:
    """A matrix in which a backend refuses everything would pass without testing it."""
    fused = (
        {"triton", "sdpa-cudnn", "sdpa-flash", "sdpa-efficient", "tiled"} if ON_GPU else {"triton", "sdpa-cpu", "tiled"}
    )
    case = Case(64, 64, 64, dtype=torch.bfloat16, causal=True)
    explanation = tileflash.explain(*case.draw(device), **case.arguments())
    for name in fused:
        assert explanation.reasons[name] == [], name
