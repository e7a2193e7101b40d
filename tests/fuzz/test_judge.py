"""The judge finds what is wrong: each way in which a backend can be broken is caught, and shrunk to a small problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tileflash.attention import dispatch, ops  # dispatch: backends register their kernels
from tileflash.fuzz import Problem, examine
from tileflash.fuzz.judge import measure, poisoned_memory, read
from tileflash.fuzz.variants import make_problem, make_variants
from tileflash.fuzz.work import Task, work
from tileflash.fuzz.worker import smaller

Break = Callable[[pytest.MonkeyPatch], None]


def _replace(monkeypatch: pytest.MonkeyPatch, forward: Any = None, backward: Any = None) -> None:
    """The backend "tiled" with other kernels; each gets the true one as its first argument."""
    assert "tiled" in dispatch.BACKENDS
    true = ops.kernels_of("tiled")
    broken = ops.Kernels(
        true.forward if forward is None else lambda *a: forward(true.forward, *a),
        true.backward if backward is None else lambda *a: backward(true.backward, *a),
    )
    monkeypatch.setitem(ops._loaded, "tiled", broken)


def _drops_the_last_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(true: Any, q: Any, k: Any, v: Any, scale: float, low: Any, high: Any, options: Any) -> Any:
        if k.shape[1] > 1 and options.bias is None and options.query_ids is None and not options.packed:
            return true(q, k[:, :-1], v[:, :-1], scale, low, high, options)
        return true(q, k, v, scale, low, high, options)

    _replace(monkeypatch, forward)


def _ignores_d_lse(monkeypatch: pytest.MonkeyPatch) -> None:
    _replace(monkeypatch, backward=lambda true, d_out, d_lse, *rest: true(d_out, None, *rest))


def _aligns_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(true: Any, q: Any, k: Any, v: Any, scale: float, low: Any, high: Any, options: Any) -> Any:
        off = 1 if high is not None and not options.packed and q.shape[1] != k.shape[1] else 0
        return true(q, k, v, scale, low, None if high is None else high + off, options)

    _replace(monkeypatch, forward)


def _leaves_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    def backward(true: Any, *arguments: Any) -> Any:
        d_q, d_k, d_v, rest = true(*arguments)
        written = torch.empty_like(d_v)
        written[:, : d_v.shape[1] // 8 * 8] = d_v[:, : d_v.shape[1] // 8 * 8]  # forgets the last rows
        return d_q, d_k, written, rest

    _replace(monkeypatch, backward=backward)


def _forgets_the_sinks_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def backward(true: Any, *arguments: Any) -> Any:
        *first, gradients = true(*arguments)
        if gradients.sinks is not None:
            gradients = gradients._replace(sinks=torch.zeros_like(gradients.sinks))
        return *first, gradients

    _replace(monkeypatch, backward=backward)


def _drops_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def backward(true: Any, *arguments: Any) -> Any:
        options = arguments[-1]
        if options.rng is not None:
            options = options._replace(rng=options.rng + 1)
        return true(*arguments[:-1], options)

    _replace(monkeypatch, backward=backward)


def _raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(true: Any, q: Any, *rest: Any) -> Any:
        if q.shape[1] > 20:
            raise RuntimeError("too long for me")
        return true(q, *rest)

    _replace(monkeypatch, forward)


@pytest.mark.parametrize(
    ("break_it", "options", "logits"),
    [
        (_drops_the_last_key, (), 4),
        (_ignores_d_lse, (), 4),
        (_aligns_wrongly, (), 8),
        (_leaves_nan, (), 4),
        (_forgets_the_sinks_gradient, ("sinks",), 4),
        (_drops_other_weights, ("dropout",), 60),
        (_raises, (), 42),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_broken_backend_is_caught_and_shrunk(
    break_it: Break, options: tuple[str, ...], logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:

    break_it(monkeypatch)
    task = Task(seed=3, variants=48, backends=("tiled",), device="cpu", bunch=8, problems=150)
    failed = None
    for message in work(task):
        if message["kind"] == "failed":
            failed = message
            break
    assert failed is not None, "a run of 150 problems must find it"
    variant = make_variants(48, 3, "cpu")[failed["index"] % 48]
    problem = make_problem(variant, 3, failed["index"], "cpu")
    small = smaller(problem, "tiled", "cpu", 20.0, lambda message: None)
    assert small.options == options
    assert small.batch * small.heads * small.query_length * small.key_length <= logits
    assert small.layout == small.gradient_layout == "contiguous"


def test_a_broken_kernel_of_triton_is_caught(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """The same judge on the kernels' own launches: delta is made without d_lse."""
    pytest.importorskip("triton")
    true = ops.kernels_of("triton")
    problem = Problem(sq=20, sk=33, causal=True)
    assert examine(problem, "triton", device) == []
    monkeypatch.setitem(
        ops._loaded, "triton", ops.Kernels(true.forward, lambda d_out, d_lse, *rest: true.backward(d_out, None, *rest))
    )
    assert {one.result for one in examine(problem, "triton", device)} == {"d_q", "d_k"}
    assert examine(replace(problem, loss="out"), "triton", device) == []


def test_the_closer_look_excuses_roundings_and_no_more() -> None:
    """Where one key is seen, fp64's and plain PyTorch's gradient is 0, and ours a rounding."""
    one_key = Problem(
        options=("dropout",), sq=1, sk=1, d=3, dv=8, batch=1, heads=1, kv_heads=1, dtype=torch.bfloat16, seed=4
    )
    assert read([measure(one_key, ("tiled",), "cpu")], closely=False), "nothing to excuse"
    assert examine(one_key, "tiled", "cpu") == []


@pytest.mark.parametrize(("options", "seed"), [(("alibi",), 0), (("bias_one",), 4), (("alibi",), 12)])
def test_the_same_rounding_of_all_rows_is_excused(options: tuple[str, ...], seed: int, device: str) -> None:
    """Small logits: all rows have one out and one rounding of it, which a gradient summed over the rows adds up."""
    pytest.importorskip("triton")
    alike = Problem(
        options=options, sq=64, sk=64, d=16, dv=16, batch=1, heads=1, kv_heads=1,
        dtype=torch.bfloat16, seed=seed, spread=0.01, gradient_layout="constant", loss="out",
    )  # fmt: skip
    if device == "cpu":  # on a GPU the numbers are others
        assert read([measure(alike, ("triton",), device)], closely=False), "nothing to excuse"
    assert examine(alike, "triton", device) == []


@pytest.mark.parametrize("seed", [621, 929, 1180])
def test_what_fp16_leaves_beside_a_large_sink_is_excused(seed: int) -> None:
    """The gradient of a sink that takes nearly all of a row is made of weights of 1e-7: fp16 has a bit or two for out."""
    tiny = Problem(
        options=("sinks",), sq=34, sk=59, d=8, dv=8, batch=2, heads=3, kv_heads=3, dtype=torch.float16, lengths=((3, 3),),
        slack=40, seed=seed, spread=8.0, option_dtype="float32", with_lse=False, loss="out",
    )  # fmt: skip
    assert read([measure(tiny, ("tiled",), "cpu")], closely=False), "nothing to excuse"
    assert examine(tiny, "tiled", "cpu") == []


@pytest.mark.parametrize("option", ["alibi", "bias_one", "sinks"])
def test_no_rounding_excuses_a_gradient_that_lacks_a_third(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def backward(true: Any, *arguments: Any) -> Any:
        d_q, d_k, d_v, rest = true(*arguments)
        return d_q, d_k, d_v, tuple(None if one is None else one * (2 / 3) for one in rest)

    _replace(monkeypatch, backward=backward)
    problem = Problem(options=(option, "dropout"), sq=64, sk=64, dtype=torch.bfloat16)
    assert len(examine(problem, "tiled", "cpu")) == 1


def test_roundings_excuse_no_error_of_a_hundredth(monkeypatch: pytest.MonkeyPatch) -> None:
    def backward(true: Any, *arguments: Any) -> Any:
        d_q, d_k, d_v, rest = true(*arguments)
        return d_q, d_k * 1.01, d_v, rest

    _replace(monkeypatch, backward=backward)
    for options in ((), ("alibi", "softcap", "sinks"), ("bias", "documents")):
        assert [one.result for one in examine(Problem(options=options), "tiled", "cpu")] == ["d_k"]


@pytest.mark.parametrize("poison", ["hidden-nan", "unseen-inf"])
def test_what_is_hidden_and_not_finite_is_in_the_inputs(poison: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tileflash.fuzz import judge

    seen: list[bool] = []
    true = judge._run

    def run(drawn: Any, backend: str) -> Any:
        seen.append(all(bool(torch.isfinite(drawn.tensors[name]).all()) for name in "kv"))
        return true(drawn, backend)

    monkeypatch.setattr(judge, "_run", run)
    problem = Problem(sq=20, sk=41, causal="top-left", poison=poison)
    assert examine(problem, "triton", "cpu") == []
    assert seen == [False]


def test_memory_that_nobody_wrote_is_nan_however_it_was_made() -> None:
    like = torch.zeros(3, 2)
    before = (torch.empty, torch.empty_like, torch.empty_strided)
    with poisoned_memory():
        for made in (torch.empty(3, 2), torch.empty_like(like), torch.empty_strided((3, 2), (1, 3))):
            assert made.isnan().all()
        assert torch.empty(3, dtype=torch.int32).shape == (3,)
    assert (torch.empty, torch.empty_like, torch.empty_strided) == before
