"""Attention problems with any options, drawn from a seed, and the judge of backends on them: fp64, gradients of options included."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import tileflash
from support.exactness import assert_within_promise
from tileflash.attention.band import Band
from tileflash.attention.philox import kept

# Each adds one argument; a problem has any of them, but at most one bias.
BIASES = ("bias", "bias_heads", "bias_keys", "bias_queries", "bias_one", "bias_hiding", "mask", "mask_keys")
OTHERS = ("alibi", "alibi_batch", "softcap", "documents", "prefix", "sinks", "dropout", "negative_scale")
OPTIONS = BIASES + OTHERS


@dataclass(frozen=True)
class Problem:
    """One problem. With `lengths` its sequences are packed: (queries, keys) of each, and `slack` rows behind the last one."""

    options: tuple[str, ...] = ()
    sq: int = 50
    sk: int = 50
    d: int = 16
    dv: int = 16
    batch: int = 2
    heads: int = 2
    kv_heads: int = 2
    causal: Any = False
    window: tuple[int | None, int | None] = (None, None)
    dtype: torch.dtype = torch.float32
    lengths: tuple[tuple[int, int], ...] | None = None
    slack: int = 0
    seed: int = 0
    spread: float = 1.0

    def __str__(self) -> str:
        shape = (
            f"{self.sq}x{self.sk}" if self.lengths is None else "packed" + "_".join(f"{a}.{b}" for a, b in self.lengths)
        )
        names = "+".join(self.options) or "plain"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{names}-{shape}-d{self.d}v{self.dv}-h{self.heads}/{self.kv_heads}-{self.causal}-{self.window}-{dtype}"

    def on(self, dtype: torch.dtype) -> Problem:
        return replace(self, dtype=dtype)


@dataclass
class Drawn:
    """Tensors of a problem: differentiable ones by name, and the other arguments."""

    tensors: dict[str, Tensor]
    arguments: dict[str, Any]
    causal: Any
    window: tuple[int | None, int | None]
    logits: int
    sequences: list[tuple[slice, slice]] | None = None


def draw(problem: Problem, device: str) -> Drawn:
    """Inputs in the problem's dtype; biases, slopes and sinks in fp32 but for half of the seeds."""
    generator = torch.Generator().manual_seed(problem.seed)
    batch = problem.batch if problem.lengths is None else len(problem.lengths)
    sq = problem.sq if problem.lengths is None else max((a for a, _ in problem.lengths), default=0)
    sk = problem.sk if problem.lengths is None else max((b for _, b in problem.lengths), default=0)
    option_dtype = problem.dtype if problem.seed % 2 else torch.float32

    def normal(*shape: int, dtype: torch.dtype = problem.dtype, spread: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * spread).to(device, dtype).requires_grad_()

    def chance(*shape: int, probability: float) -> Tensor:
        return (torch.rand(*shape, generator=generator) < probability).to(device)

    rows = ((problem.batch, problem.sq), (problem.batch, problem.sk))
    arguments: dict[str, Any] = {}
    sequences = None
    if problem.lengths is not None:
        ends = [0], [0]
        for pair in problem.lengths:
            for end, length in zip(ends, pair, strict=True):
                end.append(end[-1] + length)
        rows = ((ends[0][-1] + problem.slack,), (ends[1][-1] + problem.slack,))
        arguments["cu_seqlens_q"], arguments["cu_seqlens_k"] = (
            torch.tensor(e, dtype=torch.int32, device=device) for e in ends
        )
        bounds = (list(pairwise(e)) for e in ends)
        sequences = [(slice(*a), slice(*b)) for a, b in zip(*bounds, strict=True)]
    tensors = {
        "q": normal(*rows[0], problem.heads, problem.d, spread=problem.spread),
        "k": normal(*rows[1], problem.kv_heads, problem.d, spread=problem.spread),
        "v": normal(*rows[1], problem.kv_heads, problem.dv),
    }
    bias_shapes = {
        "bias": (batch, problem.heads, sq, sk), "bias_heads": (problem.heads, sq, sk), "bias_keys": (batch, 1, 1, sk),
        "bias_queries": (1, 1, sq, 1), "bias_one": (1,), "bias_hiding": (1, problem.heads, sq, sk),
        "mask": (batch, 1, sq, sk), "mask_keys": (batch, 1, 1, sk),
    }  # fmt: skip
    for name in problem.options:
        if name in bias_shapes:
            if problem.lengths is not None:
                arguments["max_seqlen_q"], arguments["max_seqlen_k"] = sq, sk
            if name.startswith("mask"):
                arguments["bias"] = chance(*bias_shapes[name], probability=0.7)
                continue
            tensors["bias"] = normal(*bias_shapes[name], dtype=option_dtype)
            if name == "bias_hiding":
                with torch.no_grad():
                    tensors["bias"][chance(*bias_shapes[name], probability=0.3)] = -torch.inf
        elif name in ("alibi", "alibi_batch"):
            shape = (problem.heads,) if name == "alibi" else (batch, problem.heads)
            tensors["alibi_slopes"] = normal(*shape, dtype=option_dtype, spread=0.3)
        elif name == "sinks":
            tensors["sinks"] = normal(problem.heads, dtype=option_dtype)
        elif name == "softcap":
            arguments["softcap"] = 1.5
        elif name == "negative_scale":
            arguments["scale"] = -0.4
        elif name == "dropout":
            arguments["dropout_p"] = 0.3
            arguments["dropout_seed"] = (0x1234567890ABCDEF + problem.seed, (3 << 32) + 17)
        elif name == "documents":
            ids = [
                torch.randint(3, shape, generator=generator, dtype=torch.int32).sort(-1).values.to(device)
                for shape in rows
            ]
            arguments["document_ids"] = (ids[0], ids[1])
        elif name == "prefix":
            arguments["prefix_lengths"] = torch.randint(0, sk + 1, (batch,), generator=generator, dtype=torch.int32).to(
                device
            )
        else:
            raise KeyError(name)
    return Drawn(tensors, arguments, problem.causal, problem.window, batch * problem.heads * sq * sk, sequences)


def textbook(drawn: Drawn, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The problem as one writes it by hand, every step in q's dtype; packed sequences one by one."""
    if drawn.sequences is None:
        return _textbook(drawn, tensors, drawn.arguments, 0)
    q, k, v = (tensors[name] for name in "qkv")
    outs, all_lse = [], []
    for number, (rows, columns) in enumerate(drawn.sequences):
        own = {"q": q[None, rows], "k": k[None, columns], "v": v[None, columns]}
        arguments = {
            key: drawn.arguments[key]
            for key in ("softcap", "scale", "dropout_p", "dropout_seed")
            if key in drawn.arguments
        }
        length, keys = rows.stop - rows.start, columns.stop - columns.start
        for name, holder, source in (("bias", own, tensors), ("bias", arguments, drawn.arguments)):
            if name in source:
                bias = source[name][(None,) * (4 - source[name].dim())]
                bias = bias[number : number + 1] if bias.shape[0] > 1 else bias
                holder[name] = bias[:, :, : length if bias.shape[2] > 1 else 1, : keys if bias.shape[3] > 1 else 1]
        if "alibi_slopes" in tensors:
            slopes = tensors["alibi_slopes"]
            own["alibi_slopes"] = slopes if slopes.dim() == 1 else slopes[number : number + 1]
        if "sinks" in tensors:
            own["sinks"] = tensors["sinks"]
        if "document_ids" in drawn.arguments:
            ids = drawn.arguments["document_ids"]
            arguments["document_ids"] = (ids[0][None, rows], ids[1][None, columns])
        if "prefix_lengths" in drawn.arguments:
            arguments["prefix_lengths"] = drawn.arguments["prefix_lengths"][number : number + 1]
        out, lse = _textbook(drawn, own, arguments, number)
        outs.append(out[0])
        all_lse.append(lse[0])
    slack = q.shape[0] - sum(out.shape[0] for out in outs)
    outs.append(q.new_zeros(slack, q.shape[1], v.shape[2]))
    all_lse.append(
        torch.full((q.shape[1], slack), -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    )
    return torch.cat(outs), torch.cat(all_lse, 1)


def _textbook(drawn: Drawn, tensors: dict[str, Tensor], arguments: dict[str, Any], first: int) -> tuple[Tensor, Tensor]:
    q, k, v = (tensors[name].transpose(1, 2) for name in "qkv")  # [B, H, S, D]
    batch, heads, sq, d = q.shape
    sk = k.shape[2]
    k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    logits = q @ k.transpose(2, 3) * arguments.get("scale", d**-0.5)
    if "softcap" in arguments:
        logits = arguments["softcap"] * torch.tanh(logits / arguments["softcap"])
    visible = Band.of(drawn.causal, drawn.window, sq, sk).mask(0, sq, sk, q.device)[None, None]
    columns = torch.arange(sk, device=q.device)
    if "prefix_lengths" in arguments:
        visible = visible | (columns < arguments["prefix_lengths"][:, None])[:, None, None]
    if "document_ids" in arguments:
        own, other = arguments["document_ids"]
        visible = visible & (own[:, None, :, None] == other[:, None, None, :])
    if "alibi_slopes" in tensors:
        shift = 0 if drawn.causal == "top-left" else sk - sq
        away = (torch.arange(sq, device=q.device)[:, None] + shift - columns).abs()
        slopes = tensors["alibi_slopes"].to(q.dtype)
        logits = logits - slopes.view(-1, heads, 1, 1) * away
    if "bias" in tensors:
        bias = tensors["bias"]
        visible = visible & (bias != -torch.inf)
        logits = logits + bias.to(q.dtype).masked_fill(bias == -torch.inf, 0.0)
    if "bias" in arguments:
        visible = visible & arguments["bias"]
    logits = logits.masked_fill(~visible, -torch.inf)
    if "sinks" in tensors:
        logits = torch.cat([logits, tensors["sinks"].to(q.dtype)[None, :, None, None].expand(batch, heads, sq, 1)], 3)
    empty = (logits == -torch.inf).all(3, keepdim=True)
    safe = logits.masked_fill(empty, 0.0)
    if safe.shape[3] == 0:
        return (safe @ v).transpose(1, 2), safe.sum(3) - torch.inf
    weights = torch.softmax(safe, 3).masked_fill(empty, 0.0)[..., :sk]
    lse = torch.logsumexp(safe.to(torch.promote_types(q.dtype, torch.float32)), 3).masked_fill(
        empty[..., 0], -torch.inf
    )
    if "dropout_p" in arguments:
        p = arguments["dropout_p"]
        rng = torch.tensor(arguments["dropout_seed"])
        streams = torch.arange(first * heads, (first + batch) * heads)
        keep = kept(rng, p, streams, 0, sq, sk).view(batch, heads, sq, sk).to(q.device)
        weights = torch.where(keep, weights / (1 - p), 0.0)
    return (weights @ v).transpose(1, 2), lse


def check(problem: Problem, backend: str, device: str, with_lse: bool = True) -> None:
    """Forward and backward of a backend against fp64: out, lse, and the gradients of every differentiable tensor.

    By promise 1, but three times plain PyTorch's error instead of twice: with few keys in a row the rounding of out, from which delta is
    made in every FlashAttention, weighs more than all that plain PyTorch rounds (a row with one key has dS = 0 there, exactly).
    """
    drawn = draw(problem, device)
    function = tileflash.attention if problem.lengths is None else tileflash.attention_varlen
    generator = torch.Generator().manual_seed(problem.seed + 1)
    names = list(drawn.tensors)
    weights: list[Tensor] = []

    def run(compute: Any, tensors: dict[str, Tensor]) -> list[Tensor]:
        out, lse = compute(tensors)
        if not weights:
            weights.append(torch.randn(out.shape, generator=generator).to(device))
            weights.append(torch.randn(out.shape[:-1], generator=generator).movedim(-1, -2).contiguous().to(device))
        loss = (out * weights[0].to(problem.dtype).to(out.dtype)).sum()
        if lse is not None:
            finite = torch.isfinite(lse)
            loss = loss + (lse[finite] * weights[1][finite].to(lse.dtype)).sum()
        loss = loss + 0 * sum(tensor.flatten()[:0].sum() for tensor in tensors.values())  # a graph, even of nothing
        gradients = torch.autograd.grad(loss, [tensors[name] for name in names], materialize_grads=True)
        return [out.detach(), *gradients, *([] if lse is None else [lse.detach()])]

    def ours(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        arguments = {
            **drawn.arguments,
            **tensors,
            "causal": problem.causal,
            "window": problem.window,
            "backend": backend,
        }
        return function(**arguments, return_lse=True) if with_lse else (function(**arguments), None)

    def by_hand(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        out, lse = textbook(drawn, tensors)
        return out, lse if with_lse else None

    truth = run(by_hand, {name: tensor.detach().double().requires_grad_() for name, tensor in drawn.tensors.items()})
    plain = run(by_hand, drawn.tensors)
    actual = run(ours, drawn.tensors)
    for name, *tensors in zip(["out", *(f"d_{name}" for name in names), "lse"], actual, truth, plain, strict=False):
        noise = 0.0
        summed = drawn.logits / max(1, tensors[0].numel()) if name in ("d_bias", "d_alibi_slopes", "d_sinks") else 0.0
        if name == "d_alibi_slopes":
            summed *= (drawn.tensors["k"].shape[-3] / 4) ** 2  # its terms are multiplied by distances
        if summed:  # each row's delta carries the rounding of out, which a row's dS sum to (plain PyTorch's sum to 0)
            rows = problem.batch * problem.heads * drawn.tensors["q"].shape[-3] / max(1, tensors[0].numel())
            away = drawn.tensors["k"].shape[-3] / 4 if name == "d_alibi_slopes" else 1.0
            noise = torch.finfo(problem.dtype).eps * (problem.dv * max(1.0, rows)) ** 0.5 * away
        assert_within_promise(f"{backend} {problem} {name}", *tensors, summed=summed, factor=3, noise=noise)
