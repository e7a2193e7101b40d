"""`explain` tells the truth: its plan is what is launched, its limit is the roofline, and a limit it does not know it does not give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tileflash
from support.exactness import Case
from tileflash.attention.backends import triton as triton_backend
from tileflash.attention.dispatch import BACKENDS, choose, first_that_serves
from tileflash.attention.explanation import backward_bytes, backward_flops, explain_problem, work_lines
from tileflash.attention.problem import AttentionProblem
from tileflash.attention.tiled import _bounds
from tileflash.bench.roofline import attention_work
from tileflash.gpu_peaks import find_gpu
from tileflash.kernels.compat import PreparedLaunch
from tileflash.kernels.triton import attention as launches
from tileflash.kernels.triton import sizes as sizes_module
from tileflash.kernels.triton.configurations import HOPPER_WITH_OPTIONS

CASES = [
    Case(64, 64, 16),
    Case(65, 70, 24, heads=4, kv_heads=2, causal=True),
    Case(70, 45, 40, window=(13, 0)),
    Case(33, 40, 136, batch=1, dv=160, causal=True),  # d_k and d_v by a launch each
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_plan_is_what_is_launched(case: Case, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int, int, int, int]] = []

    class Recorded(PreparedLaunch):
        __slots__ = ()

        def __init__(
            self, kernel: Any, grid_size: int, scalars: tuple[Any, ...], num_warps: int, num_stages: int, *rest: int
        ) -> None:
            super().__init__(kernel, grid_size, scalars, num_warps, num_stages, *rest)
            given = dict(zip(kernel.arg_names[-len(scalars) :], scalars, strict=True))
            made.append((grid_size, num_warps, given["BLOCK_M"], given["BLOCK_N"], num_stages))

    monkeypatch.setattr(launches, "PreparedLaunch", Recorded)
    monkeypatch.setattr(launches, "_forward_launches", {})
    monkeypatch.setattr(launches, "_backward_launches", {})
    inputs = case.draw(device)
    explanation = tileflash.explain(*inputs, **case.arguments(), backend="triton")
    assert explanation.choice == "triton"
    out = tileflash.attention(*inputs, **case.arguments(), backend="triton")
    torch.autograd.grad(out.sum(), inputs)
    assert len(made) == (4 if case.d > 128 else 3)
    told = [line for line in explanation.plan if "programs" in line]
    for line, (programs, warps, block_m, block_n, stages) in zip(told, made, strict=True):
        said = f": {programs:,} programs of {warps} warps, tile {block_m} queries x {block_n} keys, {stages} stage"
        assert said in line


def test_the_plan_on_hopper_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes_module, "INTERPRETED", False)
    monkeypatch.setattr(sizes_module, "tile_capability", lambda device: (9, 0))
    device = torch.device("cuda", 0)
    sizes = (1, 4096, 4096, 32, 8, 128, 128, torch.bfloat16, device)
    assert sizes_module.describe_launches(*sizes, None, 0, True) == [
        "forward: 2,048 programs of 4 warps, tile 64 queries x 64 keys, 3 stages",
        "backward, d_q and delta: 2,048 programs of 4 warps, tile 64 queries x 64 keys, 2 stages",
        "backward, d_k and d_v: 512 programs of 4 warps, tile 32 queries x 64 keys, 2 stages",
        # K and V of a head are 2 MiB: 12 would fit the share of the L2 cache, there are 8.
        "order: K/V heads in groups of 8 (K and V of a group fill at most 24 MiB of the L2 cache); in a group the last query "
        "tiles and the first key tiles of all its heads first",
    ]
    full = sizes_module.describe_launches(*sizes, None, None, False)
    assert full[0] == "forward: 1,024 programs of 8 warps, tile 128 queries x 64 keys, 3 stages"
    assert full[1].startswith("order: K/V heads in groups of 1;")
    assert sizes_module.describe_launches(0, *sizes[1:], None, 0, True) == ["no kernel: the tensors are empty"]


def test_the_plan_with_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes_module, "INTERPRETED", False)
    monkeypatch.setattr(sizes_module, "tile_capability", lambda device: (9, 0))
    sizes = (1, 4096, 4096, 32, 8, 128, 128, torch.bfloat16, torch.device("cuda", 0), None, 0, True)
    plain, optioned = sizes_module.describe_launches(*sizes), sizes_module.describe_launches(*sizes, with_options=True)
    tile = HOPPER_WITH_OPTIONS["forward", 128]
    assert f"of {tile.num_warps} warps, tile {tile.block_m} queries x {tile.block_n} keys" in optioned[0]
    assert optioned[0] != plain[0]
    with_bias = sizes_module.describe_launches(*sizes, with_options=True, bias_gradient=True)
    assert len(with_bias) == len(optioned) + 1
    assert with_bias[-2].startswith("backward, d_bias: programs by the shape of the bias, of 4 warps")
    packed = sizes_module.describe_launches(*sizes, with_options=True, packed=True)
    assert packed[0].startswith("forward: programs by the sequences' lengths, of ")
    assert packed[-1] == "order: head by head, the last tiles of queries and the first tiles of keys first"


def test_options_reach_the_plan_and_work_that_is_not_known_is_not_told(device: str) -> None:
    q = torch.zeros(1, 64, 2, 16, device=device, requires_grad=True)
    bias = torch.zeros(1, 1, 64, 64, device=device, requires_grad=True)
    explanation = tileflash.explain(q, q, q, bias=bias, backend="triton")
    assert any(line.startswith("backward, d_bias: ") for line in explanation.plan)
    assert "FLOPs, at least" in str(explanation)
    masked = str(tileflash.explain(q, q, q, bias=bias.detach() > 0, backend="triton"))
    assert "FLOPs, bytes and their limit are not known: they depend on the contents of mask" in masked
    assert "FLOPs, at least" not in masked


def test_a_backend_that_stands_back_is_taken_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `hopper` does for few rows. Named, or the only one that serves, it is taken all the same."""
    q = torch.randn(1, 7, 2, 16, dtype=torch.float64)  # fp64: the interpreted `triton` does not serve
    assert tileflash.explain(q, q, q).choice == "sdpa-cpu"
    monkeypatch.setattr(type(BACKENDS["sdpa-cpu"]), "stands_back", lambda self, problem: "it is tired")
    explanation = tileflash.explain(q, q, q)
    assert explanation.choice == "tiled"
    assert "sdpa-cpu        PyTorch's flash attention for the CPU: could serve, it is tired" in str(explanation)
    assert choose(explanation.problem, "auto").name == "tiled"
    assert choose(explanation.problem, "sdpa").name == "sdpa-math"
    assert choose(explanation.problem, "sdpa-cpu").name == "sdpa-cpu"
    assert first_that_serves(explanation.problem, ("triton", "sdpa-cpu", "sdpa-flash")).name == "sdpa-cpu"


@pytest.mark.parametrize(
    ("queries", "keys", "stands_back"), [(512, 512, False), (511, 4096, True), (4096, 511, True), (0, 0, True), (4096, 512, False)]
)  # fmt: skip
def test_hopper_stands_back_where_its_kernels_start_longer_than_they_save(
    queries: int, keys: int, stands_back: bool
) -> None:
    q, k = (torch.empty(1, rows, 2, 64, dtype=torch.bfloat16, device="meta") for rows in (queries, keys))
    said = BACKENDS["hopper"].stands_back(tileflash.explain(q, k, k).problem)
    assert (said is not None) == stands_back
    if said is not None:
        assert "fewer than 512" in said


def test_to_explain_dropout_moves_no_generator(device: str) -> None:
    q, k, v = Case(40, 40, 64).draw(device)
    generator = torch.Generator(device).manual_seed(5)
    states = torch.get_rng_state(), generator.get_state()
    for given in ({}, {"generator": generator}):
        assert "dropout" in str(tileflash.explain(q, k, v, dropout_p=0.3, **given).problem.features)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(generator.get_state(), states[1])
    with pytest.raises(ValueError, match="dropout_seed and generator are both given"):
        tileflash.explain(q, k, v, dropout_p=0.3, dropout_seed=1, generator=generator)


def test_the_plans_of_the_others(device: str) -> None:
    q, k = torch.zeros(2, 1000, 8, 16, device=device), torch.zeros(2, 1500, 4, 16, device=device)
    strips = list(_bounds(q, k))
    assert len(strips) > 1
    [line] = tileflash.explain(q, k, k, backend="tiled").plan
    assert line.startswith(f"forward: {len(strips)} strips of {strips[0][1]} queries x all keys, logits of 64.0 MiB")
    [line] = tileflash.explain(q.requires_grad_(), k, k, backend="tiled").plan
    assert line.startswith(f"forward, and as many again backward: {len(strips)} strips")
    [line] = tileflash.explain(q, k, k, backend="reference").plan
    assert line == "unfused: the logits [2, 8, 1000, 1500] are held whole, 91.6 MiB in float32"
    [line] = tileflash.explain(q, k, k, backend="sdpa-math").plan
    assert line.startswith("unfused: ")
    if device == "cpu":
        [line] = tileflash.explain(q, k, k, backend="sdpa-cpu").plan
        assert "not known here" in line


def _problem(case: Case, **changes: Any) -> AttentionProblem:
    return replace(tileflash.explain(*case.draw("cpu"), **case.arguments()).problem, **changes)


@pytest.mark.parametrize("case", [*CASES, Case(20, 30, 8, dv=24, causal="top-left")], ids=str)
def test_backward_work(case: Case) -> None:
    """FLOPs as the operator's formula counts them under FlopCounterMode, bytes as the tensors have them."""
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = case.draw("cpu")
    counter = FlopCounterMode(display=False)
    out, lse = tileflash.attention(q, k, v, **case.arguments(), backend="tiled", return_lse=True)
    with counter:
        torch.autograd.grad(tileflash.attention(q, k, v, **case.arguments(), backend="tiled").sum(), (q, k, v))
    problem = _problem(case)
    assert problem.flops + backward_flops(problem) == counter.get_total_flops()
    assert backward_bytes(problem) == 2 * sum(tensor.nbytes for tensor in (q, k, v, out)) + lse.nbytes


def test_the_limit_is_the_roofline_and_says_what_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    gpu = find_gpu("NVIDIA H200")
    case = Case(256, 256, 64, batch=1, heads=2, kv_heads=1, dtype=torch.bfloat16, causal=True)
    problem = _problem(case, device=torch.device("cuda"), batch=64, query_length=4096, key_length=4096)
    for direction, line in zip(("forward", "backward"), work_lines(problem), strict=False):
        limit_ms = attention_work(
            batch=64, heads=2, kv_heads=1, seq_q=4096, seq_k=4096, head_dim=64, causal=True, direction=direction
        ).limit_ms(gpu)
        assert line.startswith(f"{direction}: ")
        assert line.endswith(f"; not below {limit_ms:.4g} ms on H200 (arithmetic is the limit)")
    assert work_lines(problem)[-1] == "roofline of H200: 989.4 TFLOP/s, 4,800 GB/s"
    decode = work_lines(replace(problem, query_length=1, needs_grad=False))
    assert len(decode) == 2
    assert decode[0].endswith("(memory is the limit)")


def test_no_limit_where_none_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(16, 16, 16, dtype=torch.bfloat16)
    assert work_lines(_problem(case))[-1] == "no roofline is known for device cpu"
    on_gpu = _problem(case, device=torch.device("cuda"))
    for name, dtype, said in [
        ("NVIDIA GB300", torch.bfloat16, "no roofline is known for NVIDIA GB300 (tileflash/gpu_peaks.py has the GPUs that are)"),
        ("NVIDIA H200", torch.float32, "no roofline is known for float32 on NVIDIA H200 (the table holds peaks of 16-bit types)"),
    ]:  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        lines = work_lines(replace(on_gpu, dtype=dtype))
        assert lines[-1] == said
        assert not any("not below" in line for line in lines)


def test_a_triton_that_cannot_be_loaded_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("libtriton.so: undefined symbol: _ZN4llvm")

    monkeypatch.setattr(triton_backend, "_triton_kernels", broken)
    triton_backend._load_kernels.cache_clear()
    try:
        problem = _problem(Case(16, 16, 16))
        explanation = explain_problem(problem, "auto")
        assert explanation.choice == "sdpa-cpu"
        # On a machine with a GPU, where nothing else stands against it, the loader's own words are the reason.
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        on_gpu = explain_problem(replace(problem, device=torch.device("cuda")), "auto")
        assert on_gpu.choice != "triton"
        assert on_gpu.reasons["triton"] == [
            "Triton cannot be loaded (tileflash doctor says more): OSError: libtriton.so: undefined symbol: _ZN4llvm"
        ]
    finally:
        triton_backend._load_kernels.cache_clear()


@pytest.mark.gpu
def test_on_a_gpu_the_limit_or_the_lack_of_one_is_told() -> None:
    q = torch.zeros(1, 128, 2, 64, device="cuda", dtype=torch.bfloat16)
    text = str(tileflash.explain(q, q, q, causal=True))
    assert "what triton launches\n  forward: " in text
    known = find_gpu(torch.cuda.get_device_name()) is not None
    assert ("not below" in text, "no roofline is known for" in text) == (known, not known)
