"""Attention as one writes it by hand, in any dtype, for every option: the judge's own, apart from all that it judges.

Packed sequences are laid out as a padded batch first, so that one set of matrices serves all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tileflash.attention.philox import kept
from tileflash.fuzz.drawing import Drawn


@dataclass
class Scene:
    """What does not depend on the numbers in q, k and v: who sees whom. [B, H, Sq, Sk], where B and H may be 1.

    `rows` and `columns` say of packed sequences where each padded row comes from ([B, S]; the row behind the last one is a row of
    zeros), `places` where each packed row went.
    """

    visible: Tensor
    away: Tensor  # |i + shift - j|
    keep: Tensor | None
    rows: Tensor | None = None
    columns: Tensor | None = None
    query_places: Tensor | None = None
    key_places: Tensor | None = None


def make_scene(drawn: Drawn) -> Scene:
    """Positions, band, prefix, documents, mask and dropout of a problem."""
    problem, arguments = drawn.problem, drawn.arguments
    device = drawn.tensors["q"].device
    sq, sk = problem.query_length, problem.key_length
    i = torch.arange(sq, device=device)[None, :, None]  # [1, Sq, 1]
    j = torch.arange(sk, device=device)[None, None, :]  # [1, 1, Sk]
    shift: int | Tensor = 0 if problem.causal == "top-left" else sk - sq
    scene = Scene(torch.empty(0), torch.empty(0), None)
    exists = None
    if drawn.starts is not None:
        cu_q, cu_k = arguments["cu_seqlens_q"].long(), arguments["cu_seqlens_k"].long()
        lengths_q, lengths_k = cu_q.diff()[:, None, None], cu_k.diff()[:, None, None]
        exists = (i < lengths_q) & (j < lengths_k)
        if problem.causal != "top-left":
            shift = lengths_k - lengths_q
        scene.rows, scene.query_places = _padding(cu_q, sq, problem.query_shape[1])
        scene.columns, scene.key_places = _padding(cu_k, sk, problem.key_shape[1])
    position = i + shift
    visible = torch.ones_like(position - j, dtype=torch.bool)
    left, right = problem.window
    if problem.causal:
        right = 0
    if left is not None:
        visible = visible & (j >= position - left)
    if right is not None:
        visible = visible & (j <= position + right)
    if "prefix_lengths" in arguments:
        visible = visible | (j < arguments["prefix_lengths"][:, None, None])
    if exists is not None:
        visible = visible & exists
    if "document_ids" in arguments:
        own, other = arguments["document_ids"]
        if scene.rows is not None and scene.columns is not None:
            own, other = take(own, scene.rows), take(other, scene.columns)
        visible = visible & (own[:, :, None] == other[:, None, :])
    visible = visible[:, None]
    for bias in (arguments.get("bias"), drawn.tensors.get("bias")):
        if bias is not None:
            visible = visible & (bias if bias.dtype == torch.bool else bias.detach() != -torch.inf)
    scene.visible, scene.away = visible, (position - j).abs()[:, None]
    if "dropout_p" in arguments:
        streams = torch.arange(problem.sequences * problem.heads, device=device)
        weights = kept(arguments["dropout_seed"], arguments["dropout_p"], streams, 0, sq, sk)
        scene.keep = weights.view(problem.sequences, problem.heads, sq, sk)
    return scene


def textbook(drawn: Drawn, scene: Scene, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """out and lse in the shapes of `attention` or `attention_varlen`; every step in the dtype of q, but lse at least in fp32."""
    problem, arguments = drawn.problem, drawn.arguments
    q, k, v = (tensors[name] for name in "qkv")
    dtype = q.dtype
    if scene.rows is not None and scene.columns is not None:
        q, k, v = take(q, scene.rows), take(k, scene.columns), take(v, scene.columns)
    group = problem.heads // problem.kv_heads
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, H, S, D]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    batch, heads, sq, sk = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    logits = q @ k.transpose(2, 3) * arguments.get("scale", problem.d**-0.5)
    if "softcap" in arguments:
        logits = arguments["softcap"] * torch.tanh(logits / arguments["softcap"])
    if "alibi_slopes" in tensors:
        logits = logits - tensors["alibi_slopes"].to(dtype).view(-1, heads, 1, 1) * scene.away.to(dtype)
    if "bias" in tensors:
        logits = logits + tensors["bias"].to(dtype)
    logits = torch.where(scene.visible, logits, -torch.inf)
    if "sinks" in tensors:
        sinks = tensors["sinks"].to(dtype)[None, :, None, None].expand(batch, heads, sq, 1)
        logits = torch.cat([logits, sinks], 3)
        empty = None  # every row sees the sink
    else:
        empty = ~scene.visible.any(3, keepdim=True)
        # The softmax of a row of -inf is NaN, in its gradient too: such rows are computed from zeros and then replaced.
        logits = logits.masked_fill(empty, 0.0)
    if logits.shape[3] == 0:
        out, lse = logits @ v, logits.sum(3).to(torch.promote_types(dtype, torch.float32)) - torch.inf
    else:
        lse = torch.logsumexp(logits.to(torch.promote_types(dtype, torch.float32)), 3)
        weights = torch.softmax(logits, 3)[..., :sk]
        if empty is not None:
            weights, lse = weights.masked_fill(empty, 0.0), lse.masked_fill(empty[..., 0], -torch.inf)
        if scene.keep is not None:
            weights = torch.where(scene.keep, weights / (1 - arguments["dropout_p"]), 0.0)
        out = weights @ v  # [B, H, Sq, Dv]
    out = out.transpose(1, 2)
    if scene.query_places is None:
        return out, lse
    return packed(out, scene.query_places), packed(lse.transpose(1, 2), scene.query_places, -torch.inf).transpose(0, 1)


def packed(padded: Tensor, where: Tensor, filling: float = 0.0) -> Tensor:
    """Rows of [N, S, ...] behind each other as they were packed; `filling` in rows that belong to no sequence."""
    flat = padded.flatten(0, 1)
    rest = torch.full((1, *flat.shape[1:]), filling, dtype=flat.dtype, device=flat.device)
    return torch.cat([flat, rest]).index_select(0, where)


def take(rows: Tensor, where: Tensor) -> Tensor:
    """rows [total, ...] as a padded batch [N, S, ...]."""
    extended = torch.cat([rows, rows.new_zeros((1, *rows.shape[1:]))])
    return extended.index_select(0, where.flatten()).unflatten(0, where.shape)


def _padding(cu: Tensor, longest: int, total: int) -> tuple[Tensor, Tensor]:
    """(where each padded row comes from [N, longest], where each packed row went [total]); one behind the last for none."""
    steps = torch.arange(longest, device=cu.device)
    rows = torch.where(steps < cu.diff()[:, None], cu[:-1, None] + steps, total)
    number = torch.arange(total, device=cu.device)
    sequence = torch.searchsorted(cu, number, right=True) - 1
    inside = sequence < cu.shape[0] - 1
    sequence = sequence.clamp(max=max(0, cu.shape[0] - 2))
    places = sequence * longest + (number - cu[sequence])
    return rows, torch.where(inside, places, (cu.shape[0] - 1) * longest)
