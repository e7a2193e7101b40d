"""Tensors of a problem, from its seed. On a GPU nothing waits: numbers are drawn there, integers are sent from pinned memory."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tileflash.fuzz.layouts import bias_place, places
from tileflash.fuzz.problems import Problem

SOFTCAPS = (1.5, 30.0, 0.5)
DROPOUTS = (0.3, 0.1, 0.8)
NEGATIVE_SCALE = -0.4


@dataclass
class Drawn:
    """Differentiable tensors by the names of `attention`'s arguments, the other arguments, and the gradients of the results.

    `d_lse` has the shape of lse. `starts` are cu_seqlens on the host: of the queries, of the keys.
    """

    problem: Problem
    tensors: dict[str, Tensor]
    d_out: Tensor
    d_lse: Tensor
    arguments: dict[str, Any] = field(default_factory=dict)
    starts: tuple[list[int], list[int]] | None = None


def draw(problem: Problem, device: str) -> Drawn:
    """The same tensors for the same problem on the same kind of device."""
    generator = torch.Generator(device).manual_seed(problem.seed)
    tensors, d_out = _draw_main(problem, device, generator)
    shape = (problem.query_shape[0], problem.heads, problem.query_shape[1])
    d_lse = torch.randn(shape, generator=generator, device=device)
    if problem.lengths is not None:
        tensors = {name: tensor[0] for name, tensor in tensors.items()}
        d_out, d_lse = d_out[0], d_lse[0]
    drawn = Drawn(problem, {name: tensor.requires_grad_() for name, tensor in tensors.items()}, d_out, d_lse)
    _draw_integers(drawn, device)
    _draw_options(drawn, device, generator)
    return drawn


def _draw_main(problem: Problem, device: str, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """q, k, v [B, S, H, D] and d_out as views of one storage."""
    found = places(problem)
    storage = torch.randn(max(1, *(here.end for here in found.values())) + 8, generator=generator, device=device)
    if problem.spread != 1:
        # q and k come first; in a packed storage v lies between their rows, and is spread like them
        storage[: max(found["q"].end, found["k"].end)].mul_(problem.spread)
    for here in found.values():
        if here.strides[2] == here.shape[3] + 5:  # "gapped": what lies between rows must not be read
            view = storage.as_strided(*here)
            values = view.clone()
            storage[here.offset : here.end + 5].fill_(torch.nan)
            view.copy_(values)
    if problem.offset and problem.d > 1 and problem.layout != "expanded":
        storage.as_strided(*found["q"])[..., 0] = 1.0
        storage.as_strided(*found["k"])[..., 0] += problem.offset
    storage = storage.to(problem.dtype)
    tensors = {name: storage.as_strided(*found[name]) for name in ("q", "k", "v")}
    return tensors, storage.as_strided(*found["d_out"])


def _draw_integers(drawn: Drawn, device: str) -> None:
    """cu_seqlens, document ids, prefix lengths and the dropout's seed, in one copy."""
    problem, numbers = drawn.problem, random.Random(problem_stream(drawn.problem))
    parts: dict[str, list[int]] = {}
    if "dropout" in problem.options:
        # int64 [2] as four words: seed and offset, both longer than 32 bits
        parts["rng"] = [numbers.getrandbits(31), numbers.getrandbits(31), 17, 3]
    if problem.lengths is not None:
        drawn.starts = tuple(list(accumulate((pair[i] for pair in problem.lengths), initial=0)) for i in (0, 1))  # type: ignore[assignment]
        assert drawn.starts is not None
        parts["cu_seqlens_q"], parts["cu_seqlens_k"] = drawn.starts
        if problem.bias:
            drawn.arguments["max_seqlen_q"] = max(1, problem.query_length)
            drawn.arguments["max_seqlen_k"] = max(1, problem.key_length)
    if "documents" in problem.options:
        for name, (batch, rows) in (("ids_q", problem.query_shape[:2]), ("ids_k", problem.key_shape[:2])):
            parts[name] = [number for _ in range(batch) for number in sorted(numbers.choices(range(3), k=rows))]
    if "prefix" in problem.options:
        parts["prefix_lengths"] = [numbers.randint(0, problem.key_length) for _ in range(problem.sequences)]
    words = torch.tensor([word for part in parts.values() for word in part], dtype=torch.int32)
    if device.startswith("cuda") and words.numel():
        words = words.pin_memory()
    pieces = dict(
        zip(parts, words.to(device, non_blocking=True).split([len(part) for part in parts.values()]), strict=True)
    )
    for name in ("cu_seqlens_q", "cu_seqlens_k", "prefix_lengths"):
        if name in pieces:
            drawn.arguments[name] = pieces[name]
    if "rng" in pieces:
        drawn.arguments["dropout_seed"] = pieces["rng"].view(torch.int64)
        drawn.arguments["dropout_p"] = DROPOUTS[problem.seed % 3]
    if "documents" in problem.options:
        shapes = [
            shape[:2] if problem.lengths is None else shape[1:2] for shape in (problem.query_shape, problem.key_shape)
        ]
        drawn.arguments["document_ids"] = (pieces["ids_q"].view(shapes[0]), pieces["ids_k"].view(shapes[1]))


def _draw_options(drawn: Drawn, device: str, generator: torch.Generator) -> None:
    """Bias, mask, slopes, sinks (in `dtype_of_options`), and what is a number."""
    problem, dtype = drawn.problem, drawn.problem.dtype_of_options
    if problem.bias:
        here = bias_place(problem)
        storage = torch.randn(max(1, here.end), generator=generator, device=device)
        if problem.bias.startswith("mask"):
            drawn.arguments["bias"] = (storage < 0.5).as_strided(*here)  # 69 % are visible
        else:
            if problem.bias == "bias_hiding":
                hidden = torch.rand(storage.shape, generator=generator, device=device) < 0.3
                storage = storage.masked_fill(hidden, -torch.inf)
            drawn.tensors["bias"] = storage.to(dtype).as_strided(*here).requires_grad_()
    for name in problem.options:
        if name in ("alibi", "alibi_batch"):
            shape = (problem.heads,) if name == "alibi" else (problem.sequences, problem.heads)
            slopes = torch.randn(shape, generator=generator, device=device) * 0.3
            drawn.tensors["alibi_slopes"] = slopes.to(dtype).requires_grad_()
        elif name == "sinks":
            sinks = torch.randn(problem.heads, generator=generator, device=device)
            drawn.tensors["sinks"] = sinks.to(dtype).requires_grad_()
        elif name == "softcap":
            drawn.arguments["softcap"] = SOFTCAPS[problem.seed % 3]
        elif name == "negative_scale":
            drawn.arguments["scale"] = NEGATIVE_SCALE


def problem_stream(problem: Problem) -> str:
    """The seed of Python's numbers for a problem."""
    return f"integers {problem.seed}"
