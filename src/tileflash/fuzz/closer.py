"""What the very numbers of a problem excuse: allowances for results that look wrong at first. fp64, step by step, no autograd.

Plain PyTorch's error is a sample. Where a result has few elements, or few that weigh, the sample may be 0 by luck while another
order of the same roundings is not. Here the size of the terms that are rounded is made instead, with u = half a unit of the dtype:

- P and dS are rounded to the input dtype before a product: the root of the sum of squares of the terms.
- delta is made from the rounded out, and out from the rounded P: an error e_i of row i changes dS_ij by -P_ij e_i, and all that is
  made from dS. Where the values of a row cancel, P's part of it is the larger one. Where the logits are small or a window is full,
  all rows have nearly the same out, and the same roundings of it: the e_i of all rows count as one, and their sum is a sum of
  absolute values, not the root of a sum of squares.
- Everything is summed in fp32: sixteen roundings of the sum of the terms' absolute values, times the size of the logits, whose
  rounding is a factor of P. An element of P or dS below the smallest normal number of fp32 is 0 on a GPU. And the
  soft cap's derivative, 1 - tanh^2, is nearly 0 beyond the cap: what is left of it is the rounding of tanh.

A wrong result is wrong by terms as a whole and not by roundings of them, so these allowances hide nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tileflash.fuzz.drawing import Drawn
from tileflash.fuzz.textbook import Scene, take

_SUMS = 16 * torch.finfo(torch.float32).eps
_VANISHES = torch.finfo(torch.float32).tiny / _SUMS  # added to what is multiplied by _SUMS


def allowances(drawn: Drawn, scene: Scene) -> dict[str, float]:
    """What the error of each result may be beyond the first allowance."""
    if (
        0 in (*drawn.problem.query_shape, *drawn.problem.key_shape)
        or drawn.problem.key_length * drawn.problem.query_length == 0
    ):
        return {}
    return {
        name: float(value.abs().amax()) if value.numel() else 0.0 for name, value in _allowances(drawn, scene).items()
    }


def _allowances(drawn: Drawn, scene: Scene) -> dict[str, Tensor]:
    problem, arguments = drawn.problem, drawn.arguments
    heads, group = problem.heads, problem.heads // problem.kv_heads
    unit = torch.finfo(problem.dtype).eps
    scale = abs(arguments.get("scale", problem.d**-0.5))
    q, k, v, d_out = (
        t.detach().double() for t in (drawn.tensors["q"], drawn.tensors["k"], drawn.tensors["v"], drawn.d_out)
    )
    d_lse = drawn.d_lse.double()
    if scene.rows is not None and scene.columns is not None:
        q, k, v, d_out = (
            take(q, scene.rows),
            take(k, scene.columns),
            take(v, scene.columns),
            take(d_out, scene.rows),
        )
        d_lse = take(d_lse.T, scene.rows).transpose(1, 2)
    q, k, v, d_out = (t.transpose(1, 2) for t in (q, k, v, d_out))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)  # [B, H, S, D]
    if problem.loss == "lse" and problem.with_lse:
        d_out = torch.zeros_like(d_out)
    if problem.loss == "out" or not problem.with_lse:
        d_lse = torch.zeros_like(d_lse)

    products = q @ k.transpose(2, 3) * arguments.get("scale", problem.d**-0.5)
    terms = q.abs() @ k.abs().transpose(2, 3) * scale  # the sizes that logits are summed from
    slope = torch.ones_like(products)
    logits = products
    if "softcap" in arguments:
        cap = torch.tanh(products / arguments["softcap"])
        logits, slope = arguments["softcap"] * cap, 1 - cap * cap
    if "alibi_slopes" in drawn.tensors:
        added = drawn.tensors["alibi_slopes"].detach().double().view(-1, heads, 1, 1) * scene.away
        logits, terms = logits - added, terms + added.abs()
    if "bias" in drawn.tensors:
        bias = drawn.tensors["bias"].detach().double()
        logits, terms = logits + bias, terms + bias.abs().nan_to_num(posinf=0.0)
    visible = scene.visible.expand(logits.shape)
    logits = logits.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(logits, 3, keepdim=True)
    if "sinks" in drawn.tensors:
        sinks = drawn.tensors["sinks"].detach().double().view(1, heads, 1, 1)
        lse = torch.logaddexp(lse, sinks)
    p = torch.exp(logits - lse).masked_fill(~visible, 0.0)
    kept = torch.ones_like(p) if scene.keep is None else scene.keep.double() / (1 - arguments["dropout_p"])
    dropped = p * kept
    p_summed = (p + _VANISHES).masked_fill(~visible, 0.0)
    size = 1 + terms.masked_fill(~visible, 0.0).amax((2, 3), keepdim=True)  # [B, H, 1, 1]

    out = dropped @ v
    d_p = kept * (d_out @ v.transpose(2, 3))
    delta = (out * d_out).sum(3, keepdim=True) - d_lse[..., None]
    d_s = p * (d_p - delta)
    away = p_summed * (
        kept * (d_out.abs() @ v.abs().transpose(2, 3))
        + (dropped @ v.abs() * d_out.abs()).sum(3, keepdim=True)
        + d_lse[..., None].abs()
    ) + (_VANISHES * visible)
    capped = _SUMS * d_s.abs() if "softcap" in arguments else torch.zeros_like(d_s)
    # P, dS and the d_p that make dS are rounded, and delta is off by what out is: its own rounding and that of the P it is made of.
    # Beside a sink that takes nearly all of a row, fp16 has few bits for out and P, or none: below the normal numbers their rounding
    # is that of the smallest of these.
    smallest = torch.finfo(problem.dtype).tiny
    rounded_out = (out.abs().clamp(min=smallest) * d_out).square().sum(3, keepdim=True)
    rounded_p = (p.clamp(min=smallest) * visible * d_p).square().sum(3, keepdim=True)
    off = unit * (rounded_out + rounded_p).sqrt()  # [B, H, Sq, 1]
    found = {
        "out": unit * (dropped.square() @ v.square()).sqrt() + _SUMS * size * ((kept * p_summed) @ v.abs()),
        "lse": _SUMS * size.expand(*p.shape[:3], 1),
        "d_q": scale
        * (
            unit * ((d_s * slope).square() @ k.square()).sqrt()
            + off * ((p * slope) @ k).abs()
            + (_SUMS * size * away * slope + capped) @ k.abs()
        ),
        "d_k": scale
        * (
            _over(unit * d_s * slope, q, group)
            + 3 * _over(off * p * slope, q, group)
            + _together(off * p * slope, q, group)
            + _absolutely(_SUMS * size * away * slope + capped, q.abs(), group)
        ),
        "d_v": _over(unit * dropped, d_out, group) + _SUMS * _absolutely(size * kept * p_summed, d_out, group),
    }
    rough = (3 * off * p).square() + (_SUMS * size * away).square()  # of dS as such, squared
    if "bias" in drawn.tensors:
        shape = (1,) * (4 - drawn.tensors["bias"].dim()) + tuple(drawn.tensors["bias"].shape)
        found["d_bias"] = _broadcast_sum(rough, shape).sqrt() + _broadcast_sum(off * p, shape)
    if "alibi_slopes" in drawn.tensors:
        rows = off * (p * scene.away).sum(3, keepdim=True).abs()
        sums = _SUMS * size * (away * scene.away.abs()).sum(3, keepdim=True)
        squares = ((3 * rows).square() + sums.square()).sum((0, 2, 3))
        found["d_alibi_slopes"] = squares.sqrt() + rows.sum((0, 2, 3))
    if "sinks" in drawn.tensors:
        sunk = torch.exp(sinks - lse)
        magnitude = (dropped @ v.abs() * d_out.abs()).sum(3, keepdim=True) + d_lse[..., None].abs()
        squares = (
            (3 * off * sunk).square() + (_SUMS * size * (sunk * magnitude + _VANISHES * (1 + magnitude))).square()
        ).sum((0, 2, 3))
        found["d_sinks"] = squares.sqrt() + (off * sunk).sum((0, 2, 3))
    return found


def _over(weights: Tensor, rows: Tensor, group: int) -> Tensor:
    """Root of the sum of squares of weights^T rows, over queries and the heads that share a key: [B, Hkv, Sk, D]."""
    return (weights.square().transpose(2, 3) @ rows.square()).unflatten(1, (-1, group)).sum(2).sqrt()


def _together(weights: Tensor, rows: Tensor, group: int) -> Tensor:
    """Size of the sum of weights^T rows, over queries and the heads that share a key: [B, Hkv, Sk, D]."""
    return (weights.transpose(2, 3) @ rows).unflatten(1, (-1, group)).sum(2).abs()


def _absolutely(weights: Tensor, rows: Tensor, group: int) -> Tensor:
    return (weights.abs().transpose(2, 3) @ rows.abs()).unflatten(1, (-1, group)).sum(2)


def _broadcast_sum(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Summed over the dimensions in which `shape` is 1."""
    return tensor.sum([place for place, size in enumerate(shape) if size == 1], keepdim=True)
