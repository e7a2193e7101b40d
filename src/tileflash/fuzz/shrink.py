"""Makes a problem that fails as small and plain as it can be, and still fail. Greedy: any step that keeps the fault is kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from tileflash.fuzz.problems import BIASES, Problem, check_problem


def shrink(
    problem: Problem,
    fails: Callable[[Problem], bool],
    seconds: float,
    on_step: Callable[[Problem], None] = lambda problem: None,
    clock: Callable[[], float] = time.monotonic,
) -> Problem:
    """The smallest problem found within `seconds` for which `fails` is true. `on_step` hears of each that is better than the last."""
    end = clock() + seconds
    tried = {problem}
    improved = True
    while improved:
        improved = False
        for candidate in _simpler(problem):
            if clock() >= end:
                return problem
            if candidate in tried or not _is_problem(candidate):
                continue
            tried.add(candidate)
            if fails(candidate):
                problem, improved = candidate, True
                on_step(problem)
                break
    return problem


def _simpler(problem: Problem) -> Iterator[Problem]:
    """Smaller or plainer problems, first those for which nothing is compiled anew."""
    yield from _smaller(problem)
    yield from _plainer(problem)


def _smaller(problem: Problem) -> Iterator[Problem]:
    plain = Problem()
    for name in ("poison", "offset", "spread"):
        if getattr(problem, name) != getattr(plain, name):
            yield _changed(problem, name, getattr(plain, name))
    if problem.lengths is None:
        for name in ("batch", "sq", "sk"):
            for value in _numbers(getattr(problem, name), 1):
                yield _changed(problem, name, value)
        if problem.layout == "packed" and problem.sq == problem.sk:
            for value in _numbers(problem.sq, 1):
                yield replace(problem, sq=value, sk=value)
    else:
        for place in range(len(problem.lengths)):
            if len(problem.lengths) > 1:
                yield replace(problem, lengths=problem.lengths[:place] + problem.lengths[place + 1 :])
        for value in _numbers(problem.slack, 0):
            yield replace(problem, slack=value)
        for place, (queries, keys) in enumerate(problem.lengths):
            pairs = [(a, b) for a in [queries, *_numbers(queries, 0)] for b in [keys, *_numbers(keys, 0)]]
            for pair in pairs[1:]:
                yield replace(problem, lengths=(*problem.lengths[:place], pair, *problem.lengths[place + 1 :]))
    group = problem.heads // problem.kv_heads
    for value in _numbers(problem.kv_heads, 1):
        yield replace(problem, kv_heads=value, heads=value * group)


def _plainer(problem: Problem) -> Iterator[Problem]:
    plain = Problem()
    for name in problem.options:
        yield replace(problem, options=tuple(option for option in problem.options if option != name))
    for name in ("layout", "gradient_layout", "bias_layout"):
        if getattr(problem, name) != "contiguous":
            yield _changed(problem, name, "contiguous")
    if problem.lengths is not None and len(problem.lengths) == 1:
        queries, keys = problem.lengths[0]
        yield replace(problem, lengths=None, slack=0, batch=1, sq=queries, sk=keys)
    if problem.window != (None, None):
        yield replace(problem, window=(None, None))
        left, right = problem.window
        for pair in ((None, right), (left, None)):
            yield replace(problem, window=pair)
        if left:
            yield replace(problem, window=(left // 2, right))
        if right:
            yield replace(problem, window=(left, right // 2))
    if problem.causal:
        yield replace(problem, causal=False)
        if problem.causal == "top-left":
            yield replace(problem, causal=True)
    if problem.heads > problem.kv_heads:
        yield replace(problem, heads=problem.kv_heads)
    if problem.dtype != torch.float32:
        yield replace(problem, dtype=torch.float32)
    if problem.option_dtype not in ("", "float32"):
        yield replace(problem, option_dtype="float32")
    if not problem.with_lse or problem.loss != "both":
        yield replace(problem, with_lse=True, loss="both")
    if problem.d != 16 or problem.dv != 16:
        yield replace(problem, d=16, dv=16)
    if problem.dv != problem.d:
        yield replace(problem, dv=problem.d)
    for name in ("d", "dv"):
        for value in _numbers(getattr(problem, name), 1):
            if getattr(problem, name) > 16:
                yield _changed(problem, name, value)
    for name in problem.options:
        if name in BIASES and name != "bias" and not name.startswith("mask"):
            yield replace(problem, options=tuple("bias" if option == name else option for option in problem.options))
    if problem.seed != plain.seed:
        yield replace(problem, seed=plain.seed)


def _changed(problem: Problem, name: str, value: Any) -> Problem:
    return replace(problem, **{name: value})


def _numbers(value: int, least: int) -> list[int]:
    """Smaller ones, the smallest first."""
    return sorted({number for number in (least, value // 2, value - value // 4, value - 1) if least <= number < value})


def _is_problem(problem: Problem) -> bool:
    try:
        check_problem(problem)
    except ValueError:
        return False
    return True
