"""The judge: one problem, all of a backend's results against fp64, as numbers on the device that are read once.

By promise 1: the error is at most that of the same formula in plain PyTorch in the input dtype, times a factor, plus some roundings.
Flash-attn's factor is 2. Here it is 3: with few keys in a row the rounding of out, from which delta is made in every
FlashAttention, weighs more than all that plain PyTorch rounds. And with so many small problems one is always lucky: what fails is
looked at once more with allowances made for its very numbers (`closer`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tileflash
from tileflash.fuzz.closer import allowances
from tileflash.fuzz.drawing import Drawn, draw
from tileflash.fuzz.problems import HIDING, Problem
from tileflash.fuzz.textbook import Scene, make_scene, packed, textbook

FACTOR = 3.0
# Hidden keys that are not finite reach no row: promised by these backends, by the others only for keys that nobody sees.
KEEPS_HIDDEN_APART = ("triton", "hopper")


@dataclass(frozen=True)
class Mismatch:
    """One result that is wrong: how far from fp64 its worst element is, and how far it may be."""

    backend: str
    result: str
    error: float
    allowed: float

    def __str__(self) -> str:
        return f"{self.backend}: {self.result}: error {self.error:.3e}, allowed {self.allowed:.3e}"


@dataclass
class Measured:
    """Numbers of one problem, still on the device: a row of (error, plain PyTorch's error, largest value) for each result."""

    problem: Problem
    names: list[tuple[str, str]]
    numbers: Tensor


@dataclass
class _Setting:
    """A problem drawn, with what fp64 and plain PyTorch say of it."""

    drawn: Drawn
    scene: Scene
    truth: dict[str, Tensor]
    plain: dict[str, Tensor]


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """torch.empty, empty_like and empty_strided give NaN meanwhile, so that an element nobody wrote shows."""
    makers = {name: getattr(torch, name) for name in ("empty", "empty_like", "empty_strided")}

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return made

    for name, make in makers.items():
        setattr(torch, name, filled(make))
    try:
        yield
    finally:
        for name, make in makers.items():
            setattr(torch, name, make)


def measure(problem: Problem, backends: Sequence[str], device: str) -> Measured:
    """Run a problem on each backend; nothing waits for a GPU."""
    setting = _prepare(problem, device)
    names: list[tuple[str, str]] = []
    rows: list[Tensor] = []
    for backend, actual in _run_all(setting, backends):
        for name, row in _compare(actual, setting.truth, setting.plain).items():
            names.append((backend, name))
            rows.append(row)
    return Measured(problem, names, torch.stack(rows))


def read(measured: Sequence[Measured], closely: bool = True) -> list[tuple[Problem, list[Mismatch]]]:
    """The problems with results that are wrong, and these; waits for the GPU once, and again for what looks wrong at first.

    `closely=False` says what looks wrong at first.
    """
    if not measured:
        return []
    table = torch.cat([one.numbers for one in measured]).tolist()
    device = str(measured[0].numbers.device)
    found = []
    first = 0
    for one in measured:
        rows = table[first : first + len(one.names)]
        first += len(one.names)
        wrong = _wrong(one.problem, one.names, rows, {})
        if wrong and closely:
            wrong = _look_closer(one.problem, tuple(dict.fromkeys(backend for backend, _ in one.names)), device)
        if wrong:
            found.append((one.problem, wrong))
    return found


def examine(problem: Problem, backend: str, device: str = "cuda") -> list[Mismatch]:
    """What is wrong with a backend's results on one problem; empty where nothing is."""
    found = read([measure(problem, (backend,), device)])
    return found[0][1] if found else []


def _look_closer(problem: Problem, backends: Sequence[str], device: str) -> list[Mismatch]:
    setting = _prepare(problem, device)
    allowed = allowances(setting.drawn, setting.scene)
    names, rows = [], []
    for backend, actual in _run_all(setting, backends):
        for name, row in _compare(actual, setting.truth, setting.plain).items():
            names.append((backend, name))
            rows.append(row.tolist())
    return _wrong(problem, names, rows, allowed)


def _wrong(
    problem: Problem, names: list[tuple[str, str]], rows: list[list[float]], extra: dict[str, float]
) -> list[Mismatch]:
    wrong = []
    for (backend, name), (error, plain_error, largest) in zip(names, rows, strict=True):
        dtype = torch.float32 if name == "lse" else problem.dtype
        if name in ("d_bias", "d_alibi_slopes", "d_sinks"):
            dtype = problem.dtype_of_options
        # In fp32 both errors are a few roundings of a sum, and which of the two gets lucky is chance.
        rounding = max(torch.finfo(dtype).eps, 16 * torch.finfo(torch.float32).eps)
        allowed = FACTOR * plain_error + rounding * largest + torch.finfo(dtype).tiny + extra.get(name, 0.0)
        if math.isnan(allowed):  # plain PyTorch overflows here; ours must be finite
            allowed = math.inf
        if math.isnan(error) or error > allowed or error == math.inf:
            wrong.append(Mismatch(backend, name, error, allowed))
    return wrong


def _prepare(problem: Problem, device: str) -> _Setting:
    drawn = draw(problem, device)
    scene = make_scene(drawn)
    doubles = {name: tensor.detach().double().requires_grad_() for name, tensor in drawn.tensors.items()}
    truth = _results(drawn, doubles, textbook(drawn, scene, doubles))
    plain = _results(drawn, drawn.tensors, textbook(drawn, scene, drawn.tensors))
    return _Setting(drawn, scene, truth, plain)


def _run_all(setting: _Setting, backends: Sequence[str]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Each backend's results; keys and queries that must not matter are spoilt before the call."""
    drawn, poison = setting.drawn, setting.drawn.problem.poison
    apart = None
    # what is spoilt stays spoilt: those that get it come last
    for backend in sorted(backends, key=lambda name: name in KEEPS_HIDDEN_APART):
        if poison.startswith("unseen") or (poison and backend in KEEPS_HIDDEN_APART):
            judged = _spoil(drawn, setting.scene)
            apart = judged if poison.startswith("hidden") else None
        actual = _run(drawn, backend)
        if apart is not None:
            actual = {
                name: torch.where(
                    apart if name == "lse" else _beside_rows(apart), tensor, setting.truth[name].to(tensor.dtype)
                )
                for name, tensor in actual.items()
                if name in ("out", "lse", "d_q")
            }
        yield backend, actual


def _run(drawn: Drawn, backend: str) -> dict[str, Tensor]:
    problem = drawn.problem
    function: Any = tileflash.attention if problem.lengths is None else tileflash.attention_varlen
    arguments = {
        **drawn.arguments,
        **drawn.tensors,
        "causal": problem.causal,
        "window": problem.window,
        "backend": backend,
    }
    with poisoned_memory():
        results = function(**arguments, return_lse=True) if problem.with_lse else (function(**arguments), None)
        return _results(drawn, drawn.tensors, results)


def _results(drawn: Drawn, tensors: dict[str, Tensor], results: tuple[Tensor, Tensor | None]) -> dict[str, Tensor]:
    """out, the gradients of all tensors, and lse where it is asked for."""
    problem = drawn.problem
    out, lse = results
    pairs = []
    if problem.loss != "lse" or not problem.with_lse:
        pairs.append((out, drawn.d_out.to(out.dtype)))
    if problem.loss != "out" and problem.with_lse:
        assert lse is not None
        pairs.append((lse, drawn.d_lse.to(lse.dtype)))
    # What is made of nothing may be a constant: its gradient is 0.
    pairs = [(result, gradient) for result, gradient in pairs if result.requires_grad]
    leaves = list(tensors.values())
    gradients: Sequence[Tensor] = [torch.zeros_like(leaf) for leaf in leaves]
    if pairs:
        outputs, d_outputs = [result for result, _ in pairs], [gradient for _, gradient in pairs]
        gradients = torch.autograd.grad(outputs, leaves, d_outputs, materialize_grads=True, allow_unused=True)
    found = {"out": out.detach(), **{f"d_{name}": grad for name, grad in zip(tensors, gradients, strict=True)}}
    if lse is not None and problem.with_lse:
        found["lse"] = lse.detach()
    return found


def _compare(actual: dict[str, Tensor], truth: dict[str, Tensor], plain: dict[str, Tensor]) -> dict[str, Tensor]:
    """(error, plain PyTorch's error, largest value) of each result, fp64 [3] on the device.

    Infinities must stand where fp64 has them: elsewhere, and for NaN, the error is inf.
    """
    names = list(actual)
    for name in names:
        assert actual[name].shape == truth[name].shape, f"{name}: {list(actual[name].shape)} {list(truth[name].shape)}"
    ours, exact, by_hand = (
        torch.cat([results[name].flatten().double() for name in names]) for results in (actual, truth, plain)
    )
    infinite = torch.isinf(exact)
    # inf - inf is NaN, as is all that must not be; where both are infinite and alike there is no error
    error = torch.where(infinite & (ours == exact), 0.0, (ours - exact).abs()).nan_to_num(
        nan=torch.inf, posinf=torch.inf
    )
    plain_error = torch.where(infinite, 0.0, (by_hand - exact).abs())
    table = torch.stack([error, plain_error, exact.abs().masked_fill(infinite, 0.0)])
    zeros = table.new_zeros(3)
    sizes = [actual[name].numel() for name in names]
    return {
        name: part.amax(1) if part.shape[1] else zeros for name, part in zip(names, table.split(sizes, 1), strict=True)
    }


def _spoil(drawn: Drawn, scene: Scene) -> Tensor:
    """Write NaN or Inf into keys (and queries) that must not matter. Returns which rows of lse are judged."""
    problem = drawn.problem
    kind, _, what = problem.poison.partition("-")
    value = float(what)
    batch, heads, sq, sk = problem.sequences, problem.heads, problem.query_length, problem.key_length
    visible = scene.visible.expand(batch, heads, sq, sk)
    seen = visible.any(2).unflatten(1, (problem.kv_heads, -1)).any(2).transpose(1, 2)  # [B, Sk, Hkv]
    if kind == "hidden":
        chosen = torch.arange(sk, device=visible.device) % 5 == problem.seed % 5  # [Sk]
        seen = ~chosen[None, :, None].expand(batch, sk, problem.kv_heads)
        judged = ~(visible & chosen).any(3)  # [B, H, Sq]
    else:
        judged = torch.ones((batch, heads, sq), dtype=torch.bool, device=visible.device)
    alone = visible.any(3).transpose(1, 2)  # [B, Sq, H]: sees something
    if scene.key_places is not None and scene.query_places is not None:
        seen = packed(seen, scene.key_places, False)  # slack rows are seen by nobody
        alone = packed(alone, scene.query_places, False)
        judged = packed(judged.transpose(1, 2), scene.query_places, True).transpose(0, 1)
    with torch.no_grad():
        if problem.layout != "expanded":  # one key's memory is another's there
            drawn.tensors["k"].masked_fill_(~seen[..., None], value)
            drawn.tensors["v"].masked_fill_(~seen[..., None], value)
        if kind == "unseen" and not _hides(drawn):
            drawn.tensors["q"].masked_fill_(~alone[..., None], value)
    return judged


def _hides(drawn: Drawn) -> bool:
    """Keys are hidden from rows within a tile: what such rows of q hold may reach the keys' gradients (docs/semantics.md)."""
    return any(name in HIDING for name in drawn.problem.options)


def _beside_rows(judged: Tensor) -> Tensor:
    """[B, H, Sq] or [H, total] -> as out and d_q have it, with a last dimension of 1."""
    return judged.transpose(-1, -2)[..., None]
