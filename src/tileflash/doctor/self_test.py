"""A few small problems for each backend, forward and backward, against an fp64 reference. Runs in the doctor's child process.

The bound is that of the tests: twice the error of plain PyTorch in the input dtype, and one rounding (in fp32 eight) of the largest
value.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tileflash
from tileflash.attention.backends.triton import loading_error
from tileflash.attention.band import Band, Causal
from tileflash.attention.dispatch import BACKENDS


@dataclass(frozen=True)
class Case:
    """Sizes of a problem: q [batch, query_length, heads, head_dim], k and v with key_length and kv_heads, v head_dim_v wide."""

    batch: int
    query_length: int
    key_length: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    causal: Causal = False
    window: tuple[int | None, int | None] = (None, None)

    def __str__(self) -> str:
        return (
            f"q [{self.batch}, {self.query_length}, {self.heads}, {self.head_dim}], "
            f"k [{self.batch}, {self.key_length}, {self.kv_heads}, {self.head_dim}], v {self.head_dim_v} wide, "
            f"causal {self.causal}, window {self.window}"
        )

    def inputs(self, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(self.batch, rows, heads, columns, generator=generator).to(device, dtype).requires_grad_()
            for rows, heads, columns in (
                (self.query_length, self.heads, self.head_dim),
                (self.key_length, self.kv_heads, self.head_dim),
                (self.key_length, self.kv_heads, self.head_dim_v),
            )
        )
        return q, k, v


def _candidates(length: int) -> tuple[tuple[Case, ...], ...]:
    """Of each group a backend gets the first that it serves: a regular problem, then an odd one."""
    odd = length // 2 + 13
    return (
        (
            Case(1, length, length, 4, 2, 64, 64, causal=True),
            Case(1, length, length, 4, 4, 64, 64, causal=True),
        ),
        (
            Case(2, odd, odd - 24, 4, 2, 40, 24, window=(20, 3)),
            Case(2, odd, odd, 4, 2, 40, 40, causal=True),
            Case(2, odd, odd, 4, 4, 40, 40, causal=True),
        ),
    )


def _settings(device: str) -> tuple[torch.dtype, int]:
    """dtype and length: on a CPU the kernels run in Triton's interpreter, where small is slow enough."""
    if device == "cpu":
        return torch.float32, 48
    return (torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16), 128


def _served(name: str, device: str) -> tuple[list[Case], list[str]]:
    """The cases that a backend serves on a device, and the reasons against the first where there is none."""
    dtype, length = _settings(device)
    cases: list[Case] = []
    against: list[str] = []
    for group in _candidates(length):
        for case in group:
            explained = tileflash.explain(
                *case.inputs(device, dtype), causal=case.causal, window=case.window, backend=name
            )
            reasons = explained.reasons[name]
            if not reasons:
                cases.append(case)
                break
            against = against or reasons
    return cases, [] if cases else against


def _devices() -> tuple[str, ...]:
    return ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)


def survey() -> list[dict[str, Any]]:
    """Each backend: where it serves the small problems (None: nowhere), or the reasons on the first device."""
    found = []
    for name, backend in BACKENDS.items():
        device: str | None = None
        reasons: list[str] = []
        for candidate in _devices():
            cases, against = _served(name, candidate)
            if cases:
                device = candidate
                break
            reasons = reasons or against
        found.append(
            {
                "name": name,
                "summary": backend.summary,
                "loads": name != "triton" or loading_error() is None,
                "load_error": (loading_error() or "") if name == "triton" else "",
                "serves": device is not None,
                "device": device,
                "reasons": [] if device else reasons,
            }
        )
    return found


def run_self_test(name: str) -> dict[str, Any]:
    """Every case that the backend serves: the errors and what is allowed; the time of first runs (compiling) and of second ones."""
    device = next(device for device in _devices() if _served(name, device)[0])
    dtype, _ = _settings(device)
    compile_s = run_s = 0.0
    told: list[dict[str, Any]] = []
    for case in _served(name, device)[0]:
        inputs = case.inputs(device, dtype)
        d_out = _gradient(case, device, dtype)
        first_s, _ = _timed(name, case, inputs, d_out)
        second_s, actual = _timed(name, case, inputs, d_out)
        compile_s += max(0.0, first_s - second_s)
        run_s += second_s
        truth = _plain(case, tuple(tensor.detach().double().requires_grad_() for tensor in inputs), d_out)
        plain = _plain(case, inputs, d_out)
        results = [
            {"name": result, **_judge(*tensors)}
            for result, *tensors in zip(("out", "d_q", "d_k", "d_v"), actual, truth, plain, strict=True)
        ]
        told.append({"case": str(case), "results": results})
    return {
        "device": device,
        "dtype": str(dtype).removeprefix("torch."),
        "ok": all(result["ok"] for case in told for result in case["results"]),
        "cases": told,
        "compile_s": round(compile_s, 3),
        "run_s": round(run_s, 3),
    }


def _gradient(case: Case, device: str, dtype: torch.dtype) -> Tensor:
    shape = (case.batch, case.query_length, case.heads, case.head_dim_v)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)


def _timed(name: str, case: Case, inputs: tuple[Tensor, ...], d_out: Tensor) -> tuple[float, tuple[Tensor, ...]]:
    start = time.perf_counter()
    out = tileflash.attention(*inputs, causal=case.causal, window=case.window, backend=name)
    gradients = torch.autograd.grad(out, inputs, d_out)
    if out.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start, (out.detach(), *gradients)


def _plain(case: Case, inputs: tuple[Tensor, ...], d_out: Tensor) -> tuple[Tensor, ...]:
    """out, d_q, d_k, d_v by the textbook formula in the inputs' own dtype, every step rounded to it."""
    q, k, v = inputs
    group = case.heads // case.kv_heads
    keys, values = (tensor.transpose(1, 2).repeat_interleave(group, 1) for tensor in (k, v))  # [B, Hq, Sk, D]
    band = Band.of(case.causal, case.window, case.query_length, case.key_length)
    visible = band.mask(0, case.query_length, case.key_length, q.device)
    unseen = ~visible.any(1)[:, None]  # rows that see no key: out 0
    logits = (q.transpose(1, 2) @ keys.transpose(2, 3) * case.head_dim**-0.5).masked_fill(~visible, -torch.inf)
    weights = torch.softmax(logits.masked_fill(unseen, 0), 3).masked_fill(unseen, 0)
    out = (weights @ values).transpose(1, 2)
    return (out.detach(), *torch.autograd.grad(out, inputs, d_out.to(out.dtype)))


def _judge(actual: Tensor, truth: Tensor, plain: Tensor) -> dict[str, Any]:
    error = (actual.double() - truth).abs().max().item()
    rounding = max(torch.finfo(actual.dtype).eps, 8 * torch.finfo(torch.float32).eps)
    tolerance = 2 * (plain.double() - truth).abs().max().item() + rounding * truth.abs().max().item()
    # JSON has no NaN: an error that is none is told as null, and never passes.
    return {"error": error if error == error else None, "tolerance": tolerance, "ok": error <= tolerance}
