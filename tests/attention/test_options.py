"""Every option, every pair of options and random draws of all, on every backend that says it serves them, against fp64."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tileflash
from support.optioned import BIASES, OPTIONS, OTHERS, Problem, check
from tileflash.attention.dispatch import BACKENDS, NoBackendError

ON_GPU = torch.cuda.is_available()
ON_HOPPER = ON_GPU and torch.cuda.get_device_capability() == (9, 0)
OURS = ("triton", "tiled", "reference")  # these serve everything here
PACKED = ((33, 34), (0, 7), (5, 0), (3, 35))
SHAPES = {
    "square": Problem(causal=True, batch=2, heads=1, kv_heads=1),
    "long": Problem(sq=37, sk=70, batch=1, heads=2, kv_heads=1, causal="top-left", d=24, dv=8),
    "packed": Problem(lengths=PACKED, heads=1, kv_heads=1, causal=True, slack=9),
    "packed window": Problem(lengths=PACKED, window=(11, 5), heads=2, kv_heads=1),
}
# Small: there are many pairs, and the interpreter is slow.
PAIR_SHAPES = (
    Problem(sq=34, sk=40, heads=1, kv_heads=1, causal=True),
    Problem(sq=37, sk=34, batch=1, window=(20, 3)),
    Problem(lengths=((33, 34), (0, 4), (3, 5)), heads=1, kv_heads=1, causal=True, slack=2),
)
PAIRS = [
    pair for pair in combinations(OPTIONS, 2) if not set(pair) <= set(BIASES) and set(pair) != {"alibi", "alibi_batch"}
]


def serve_or_refuse(problem: Problem, name: str, device: str) -> None:
    """A backend that has no reason against the problem is right; one that has says all of them."""
    try:
        check(problem, name, device, BACKENDS[name].lse == "differentiable")
    except NoBackendError as error:
        refusal = str(error)
    else:
        return
    assert name not in OURS, refusal
    assert f"{name}: " in refusal


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("option", [*OPTIONS, "none"])
def test_each_option(option: str, shape: str, name: str, device: str, poisoned_memory: None) -> None:
    options = () if option == "none" else (option,)
    serve_or_refuse(replace(SHAPES[shape], options=options, seed=len(option)), name, device)


@pytest.mark.parametrize("name", ["triton", "tiled", "reference"])
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_each_pair(pair: tuple[str, str], name: str, device: str, poisoned_memory: None) -> None:
    seed = PAIRS.index(pair)
    serve_or_refuse(replace(PAIR_SHAPES[seed % len(PAIR_SHAPES)], options=pair, seed=seed), name, device)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", [(), ("softcap",), ("sinks",), ("softcap", "sinks")], ids="+".join)
def test_what_hopper_has_in_every_shape(
    options: tuple[str, ...], dtype: torch.dtype, shape: str, poisoned_memory: None
) -> None:
    serve_or_refuse(replace(SHAPES[shape], options=options, dtype=dtype, seed=7), "hopper", "cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_in_half_precision(option: str, dtype: torch.dtype, device: str, poisoned_memory: None) -> None:
    shape = list(SHAPES.values())[OPTIONS.index(option) % len(SHAPES)]
    for name in ("triton", "hopper", "tiled"):
        serve_or_refuse(replace(shape, options=(option,), dtype=dtype, seed=5), name, device)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("bias", ["bias", "bias_heads", "bias_keys", "bias_queries"])
def test_a_bias_of_no_keys_has_a_gradient(bias: str, name: str, device: str) -> None:
    serve_or_refuse(Problem(options=(bias,), sq=33, sk=0), name, device)


@pytest.mark.parametrize("name", [*OURS, "hopper"] if ON_HOPPER else OURS)
def test_no_packed_sequence_at_all(name: str, device: str, poisoned_memory: None) -> None:
    """All rows are slack, in every head and tile."""
    dtype = torch.bfloat16 if name == "hopper" else torch.float32
    q, k, v = (torch.randn(64, 2, 16, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    nothing = torch.zeros(1, dtype=torch.int32, device=device)
    out, lse = tileflash.attention_varlen(q, k, v, nothing, nothing, return_lse=True, backend=name)
    assert torch.equal(out, torch.zeros_like(out))
    assert bool((lse == -torch.inf).all())
    for tensor in (q, k, v):
        gradient = torch.autograd.grad(out.sum() + 0 * tensor.sum(), tensor, retain_graph=True)[0]
        assert torch.equal(gradient, torch.zeros_like(gradient))


@st.composite
def problems(choose: st.DrawFn) -> Problem:
    """Any options, shapes, band and dtype."""
    options = [name for name in OTHERS if choose(st.booleans())]
    if "alibi" in options and "alibi_batch" in options:
        options.remove("alibi")
    options += choose(st.sampled_from([[], *([bias] for bias in BIASES)]))
    group = choose(st.sampled_from([1, 2, 3]))
    kv_heads = choose(st.sampled_from([1, 2]))
    bound = st.none() | st.integers(0, 40)
    length = st.integers(0, 70)
    packed = choose(st.booleans())
    return Problem(
        options=tuple(options),
        sq=choose(length),
        sk=choose(length),
        d=choose(st.sampled_from([1, 7, 16, 33, 64])),
        dv=choose(st.sampled_from([1, 8, 20, 64])),
        batch=choose(st.sampled_from([1, 2])),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        causal=choose(st.sampled_from([False, True, "top-left"])),
        window=(choose(bound), choose(bound)),
        dtype=choose(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
        lengths=tuple(choose(st.lists(st.tuples(length, length), min_size=1, max_size=4))) if packed else None,
        slack=choose(st.sampled_from([0, 5])) if packed else 0,
        seed=choose(st.integers(0, 2**20)),
    )


@settings(max_examples=500 if ON_GPU else 30, deadline=None, derandomize=True)
@given(problem=problems())
def test_any_draw_of_all(problem: Problem) -> None:
    for name in ("triton", "tiled"):
        serve_or_refuse(problem, name, "cuda" if ON_GPU else "cpu")
