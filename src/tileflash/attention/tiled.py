"""Attention in plain PyTorch with O(S) memory: a strip of queries at a time, forward and backward. Slow, but runs anywhere."""

import torch
from torch import Tensor

from tileflash.attention.band import Band
from tileflash.attention.problem import compute_dtype

# A strip's logits hold at most this many elements (64 MiB in fp32), whatever the sequence length.
_STRIP_ELEMENTS = 2**24


def strip_rows(batch: int, heads: int, key_length: int) -> int:
    """Queries of a strip: of all heads and batches at once, so that their logits [B, Hq, rows, Sk] keep within the bound."""
    return max(1, _STRIP_ELEMENTS // max(1, batch * heads * key_length))


def _strips(q: Tensor, k: Tensor) -> list[tuple[int, int]]:
    query_length = q.shape[1]
    rows = strip_rows(q.shape[0], q.shape[2], k.shape[1])
    return [(begin, min(begin + rows, query_length)) for begin in range(0, query_length, rows)]


def _grouped(tensor: Tensor, kv_heads: int, compute: torch.dtype) -> Tensor:
    """[B, S, Hq, D] -> [B, Hkv, Hq // Hkv, S, D]: the query heads that share a K/V head side by side."""
    batch, length, heads, head_dim = tensor.shape
    return tensor.to(compute).view(batch, length, kv_heads, heads // kv_heads, head_dim).permute(0, 2, 3, 1, 4)


def _shared(tensor: Tensor, seen: Tensor, compute: torch.dtype) -> Tensor:
    """[B, S, Hkv, D] -> [B, Hkv, 1, S, D], with keys that no query of the strip sees set to 0, for 0 * NaN is NaN."""
    return torch.where(seen[None, :, None, None], tensor, 0).to(compute).transpose(1, 2).unsqueeze(2)


def tiled_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, low: int | None, high: int | None
) -> tuple[Tensor, Tensor]:
    """out [B, Sq, Hq, Dv] and lse [B, Hq, Sq] (fp32; fp64 for fp64 inputs) of q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v likewise."""
    compute = compute_dtype(q.dtype)
    batch, query_length, heads, _ = q.shape
    kv_heads = k.shape[2]
    out = torch.zeros((batch, query_length, heads, v.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.full((batch, heads, query_length), -torch.inf, dtype=compute, device=q.device)
    if k.shape[1] == 0 or lse.numel() == 0:
        return out, lse
    for begin, end in _strips(q, k):
        visible = Band(low, high).mask(begin, end, k.shape[1], q.device)  # [rows, Sk]
        seen = visible.any(0)
        keys, values = _shared(k, seen, compute), _shared(v, seen, compute)
        logits = (
            _grouped(q[:, begin:end], kv_heads, compute) @ keys.transpose(3, 4) * scale
        )  # [B, Hkv, group, rows, Sk]
        logits = logits.masked_fill(~visible, -torch.inf)
        row_lse = torch.logsumexp(logits, 4)  # [B, Hkv, group, rows]
        weights = torch.exp(logits - row_lse.masked_fill(row_lse == -torch.inf, 0.0)[..., None])
        strip = (weights @ values).permute(0, 3, 1, 2, 4)  # [B, rows, Hkv, group, Dv]
        out[:, begin:end] = strip.reshape(batch, end - begin, heads, -1).to(q.dtype)
        lse[:, :, begin:end] = row_lse.reshape(batch, heads, end - begin)
    return out, lse


def tiled_backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float, low: int | None, high: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """d_q, d_k, d_v: the strip's weights are made again from lse, as FlashAttention does."""
    compute = lse.dtype
    batch, _, heads, _ = q.shape
    kv_heads = k.shape[2]
    d_q = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    d_k = torch.zeros(k.shape, dtype=compute, device=q.device).transpose(1, 2)  # [B, Hkv, Sk, D]
    d_v = torch.zeros(v.shape, dtype=compute, device=q.device).transpose(1, 2)
    for begin, end in _strips(q, k) if k.shape[1] and lse.numel() else []:
        visible = Band(low, high).mask(begin, end, k.shape[1], q.device)
        seen = visible.any(0)
        keys, values = _shared(k, seen, compute), _shared(v, seen, compute)
        queries, d_outs, outs = (_grouped(tensor[:, begin:end], kv_heads, compute) for tensor in (q, d_out, out))
        queries = queries.masked_fill(
            ~visible.any(1)[:, None], 0.0
        )  # what a query that sees nothing holds must not reach d_k
        row_lse = lse[:, :, begin:end].unflatten(1, (kv_heads, -1))
        logits = (queries @ keys.transpose(3, 4) * scale).masked_fill(~visible, -torch.inf)
        weights = torch.exp(logits - row_lse.masked_fill(row_lse == -torch.inf, 0.0)[..., None])
        delta = (d_outs * outs).sum(4)
        if d_lse is not None:
            delta = delta - d_lse[:, :, begin:end].unflatten(1, (kv_heads, -1))
        d_logits = (weights * (d_outs @ values.transpose(3, 4) - delta[..., None])).masked_fill(~visible, 0.0)
        d_v += (weights.transpose(3, 4) @ d_outs).sum(2)
        d_k += (d_logits.transpose(3, 4) @ queries).sum(2) * scale
        d_q[:, begin:end] = (
            (d_logits @ keys * scale).permute(0, 3, 1, 2, 4).reshape(batch, end - begin, heads, -1).to(q.dtype)
        )
    return d_q, d_k.transpose(1, 2).to(k.dtype).contiguous(), d_v.transpose(1, 2).to(v.dtype).contiguous()
