"""The attention suite on the CPU: judged results, honest rows for what cannot serve, the ledger, the time budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tileflash.bench import Sitting, append, read
from tileflash.bench import attention as module
from tileflash.bench.attention import AttentionSuite, CaseResult, Cell, run_suite, work_of
from tileflash.bench.attention_check import Judge, reference_head
from tileflash.bench.attention_summary import geometric_means
from tileflash.bench.attention_variants import attention_variant
from tileflash.bench.timing import TimingPlan

QUICK = TimingPlan(rounds=2, target_ms=1.0, warmup_ms=1.0, pause_ms=0.0)
SMALL = AttentionSuite(
    head_dims=(32,), lengths=(32, 96), variants=("tileflash-sdpa", "math", "reference"), tokens=96, width=64,
    dtype="float32", device="cpu", baseline="math", timing=QUICK,
)  # fmt: skip


def _cells(results: list[CaseResult]) -> dict[tuple[str, str], Cell]:
    return {(str(result.case), cell.variant): cell for result in results for cell in result.cells}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_suite_on_the_cpu(tmp_path: Path, dtype: str) -> None:
    suite = replace(SMALL, dtype=dtype)
    results = list(run_suite(suite))
    assert [result.case for result in results] == suite.cases()
    assert len(results) == 2 * 2 * 2
    for cell in _cells(results).values():
        assert (cell.flags, cell.reason) == ((), "")
        assert cell.timing is not None
        assert cell.timing.time_ms.repeats == 2
    sitting = Sitting.begin({"gpu": None, "cpu": "test", "commit": "abc"})
    for result in results:
        append(tmp_path / "attention.jsonl", result.lines(sitting, "math"))
    lines = read(tmp_path, suite="attention")
    assert len(lines) == 8 * (3 + 2)  # times of three, ratios of the two that are not the baseline
    assert {line.metric for line in lines} == {"time_ms", "speed_ratio_to_math"}
    assert lines[0].case == {
        "direction": "forward", "batch": 3, "heads": 2, "kv_heads": 2, "seq": 32, "head_dim": 32, "mask": "full",
        "dtype": dtype,
    }  # fmt: skip
    assert work_of(lines[0].case) == suite.cases()[0].work()
    means = {(mean.direction, mean.variant): mean for mean in geometric_means(results, "math")}
    assert set(means) == {(d, v) for d in ("forward", "backward") for v in ("tileflash-sdpa", "reference")}
    assert means["forward", "reference"].points == means["forward", "reference"].cases == 4


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(50, 50), (20, 50), (50, 20)])
def test_reference_head_against_fp64_autograd(
    monkeypatch: pytest.MonkeyPatch, causal: bool, seq_q: int, seq_k: int
) -> None:
    monkeypatch.setattr("tileflash.bench.attention_check._ROWS", 16)
    torch.manual_seed(0)
    q = torch.randn(seq_q, 8, dtype=torch.float64, requires_grad=True)
    k = torch.randn(seq_k, 8, dtype=torch.float64, requires_grad=True)
    v = torch.randn(seq_k, 8, dtype=torch.float64, requires_grad=True)
    d_out = torch.randn(seq_q, 8, dtype=torch.float64)
    visible = torch.ones(seq_q, seq_k, dtype=torch.bool)
    if causal:
        visible = visible.tril(seq_k - seq_q)
    seeing = visible.any(-1)
    scores = (q @ k.T / 8**0.5).masked_fill(~visible, -1e30)
    out = (torch.softmax(scores, -1) * visible) @ v
    expected = (out, *torch.autograd.grad(out, (q, k, v), d_out * seeing[:, None]))
    for got, want in zip(reference_head(q, k, v, d_out, causal), expected, strict=True):
        assert torch.allclose(got.double(), want.detach(), atol=1e-5)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_judge_of_grouped_heads(kv_heads: int) -> None:
    torch.manual_seed(0)
    q, d_out = (torch.randn(2, 40, 4, 16) for _ in range(2))
    k, v = (torch.randn(2, 40, kv_heads, 16) for _ in range(2))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in leaves), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    dq, dk, dv = torch.autograd.grad(out, leaves, d_out)
    judge = Judge(q.detach(), k.detach(), v.detach(), d_out, causal=True)
    assert judge.complaint(out=out.detach(), dq=dq, dk=dk, dv=dv) == ""
    assert "dk is wrong" in judge.complaint(dk=dk * 1.01)
    # One wrong row among many is a small error on average: the largest error shows it.
    spoiled = out.detach().clone()
    spoiled[-1, 5, -1, 3] += 0.5
    assert "out is wrong" in judge.complaint(out=spoiled)
    spoiled[-1, 5, -1, 3] = float("nan")
    assert "out is wrong" in judge.complaint(out=spoiled)


def _with_variant(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> list[CaseResult]:
    """The suite with another function in the place of `reference`."""

    def variant(name: str, *_: object) -> Any:
        return function if name == "reference" else attention_variant(name)

    monkeypatch.setattr(module, "attention_variant", variant)
    return list(run_suite(SMALL))


def test_a_wrong_variant_is_reported_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention_variant("math")
    results = _with_variant(monkeypatch, lambda q, k, v, causal: right(q, k, v, False))  # forgets the mask
    for result in results:
        cell = result.cells[2]
        if result.case.mask == "full":
            assert cell.timing is not None
        else:
            assert (cell.timing, cell.flags) == (None, ("wrong_result",))
            assert "is wrong: error" in cell.reason
        assert result.cells[0].timing is not None  # the others are timed all the same


@pytest.mark.parametrize(
    ("error", "flag", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nto allocate"), "out_of_memory", "out of memory. Tried to"),
        (RuntimeError("No available kernel. Aborting execution."), "unsupported", "No available kernel"),
        (ValueError("head_dim must be <= 256"), "unsupported", "head_dim must be <= 256"),
        (KeyError("compiler"), "failed", "compiler"),
    ],
)
def test_a_variant_that_raises_shows_its_reason(
    monkeypatch: pytest.MonkeyPatch, error: Exception, flag: str, reason: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    results = _with_variant(monkeypatch, fail)
    for result in results:
        assert result.cells[2].flags == (flag,)
        assert reason in result.cells[2].reason
        lines = list(result.lines(Sitting.begin({}), "math"))
        assert [(line.median, line.flags) for line in lines if line.variant == "reference"] == [(None, (flag,))]


def test_a_peer_that_cannot_serve_says_why() -> None:
    results = list(run_suite(replace(SMALL, variants=("math", "cudnn", "tileflash-sdpa-flash"))))
    for result in results:
        assert result.cells[1].flags == ("unsupported",)
        assert "backend" in result.cells[1].reason or "kernel" in result.cells[1].reason
        assert result.cells[2].flags == ("unsupported",)  # it runs on CUDA only, and this suite is the CPU's
        assert "cannot serve" in result.cells[2].reason


def test_faster_than_the_limit_is_flagged() -> None:
    """A timer that lies: the figure is kept and flagged."""

    class Lying:
        is_asynchronous = True

        def measure(self, call: Callable[[], object], calls: int) -> list[float]:
            call()
            return [1e-9] * calls

        def prepare(self, host_ms: float) -> None:
            pass

        def issue_ms(self, call: Callable[[], object]) -> float:
            return 0.0

        def wall_ms(self, call: Callable[[], object], calls: int) -> float:
            return 0.0

    suite = replace(SMALL, dtype="bfloat16", timing=replace(QUICK, warmup_ms=0.0))
    for result in run_suite(suite, gpu_name="NVIDIA H200", clock=Lying()):
        assert result.limit_ms is not None
        for cell in result.cells:
            assert cell.flags == ("faster_than_limit",)
            assert "faster than the limit" in cell.reason
    assert geometric_means([result], "math") == []  # flagged figures are in no mean
    unknown = next(iter(run_suite(suite, gpu_name="Some GPU", clock=Lying())))
    assert (unknown.limit_ms, unknown.cells[0].flags) == (None, ())


def test_the_budget_ends_the_suite_in_time() -> None:
    times = iter(range(0, 1000, 10))  # each look at the clock is 10 s after the last
    results = list(run_suite(replace(SMALL, budget_seconds=70.0), now=lambda: float(next(times))))
    assert [result.case for result in results] == SMALL.cases()[:3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"masks": ("full", "band")}, "`masks` was 'full, band'; it must be some of full, causal"),
        ({"directions": ()}, "`directions` was ''"),
        ({"variants": ("math", "math")}, "`variants` was 'math, math'"),
        ({"variants": ("fa9",)}, "`variants` named 'fa9'"),
        (
            {"variants": ("tileflash-fast",)},
            "`variants` named 'tileflash-fast'; BACKEND must be one of auto, sdpa, triton",
        ),
        ({"tokens": 0}, "`tokens` was 0; it must be at least 1"),
        ({"width": -64}, "`width` was -64; it must be at least 1"),
        ({"variants": ("tileflash-",)}, "`variants` named 'tileflash-'"),
        ({"lengths": (64,)}, r"`lengths` was \(64,\); each must be at least 1 and divide `tokens` = 96"),
        ({"head_dims": (0,)}, "`head_dims` was"),
        ({"dtype": "int8"}, "`dtype` was 'int8'"),
        ({"budget_seconds": 0.0}, "`budget_seconds` was 0.0"),
    ],
)
def test_bad_suites(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **changes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the Triton kernels and PyTorch's pinned peers")
def test_on_a_gpu_every_variant_is_right_and_below_the_limit() -> None:
    suite = AttentionSuite(
        head_dims=(64, 128), lengths=(512, 2048), tokens=4096, width=512, variants=("tileflash-triton", "fa2", "math"),
        timing=TimingPlan(rounds=2, target_ms=5.0, warmup_ms=5.0, pause_ms=1.0),
    )  # fmt: skip
    results = list(run_suite(suite, gpu_name=torch.cuda.get_device_name()))
    for key, cell in _cells(results).items():
        assert cell.flags == (), (key, cell.reason)
