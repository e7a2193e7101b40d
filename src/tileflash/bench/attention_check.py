"""Before a variant is timed its result is judged: one head of the very problem, against fp32 mathematics."""

from __future__ import annotations

import math

import torch

_ROWS = 1024  # queries at a time: the scores held are [_ROWS, Sk], never [Sq, Sk]
# Bounds of the error's root mean square relative to the result's. Rounding to the input's type alone gives a third of
# these; one wrong tile gives several times as much.
_TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
_PEAK_FACTOR = 8.0  # the largest error, relative to the largest value, may be this many times the bound above


def reference_head(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_out: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, dq, dk, dv), fp32, of one head: q [Sq, D], k [Sk, D], v [Sk, D], d_out [Sq, D]; causal is bottom-right."""
    q, k, v, d_out = (tensor.float() for tensor in (q, k, v, d_out))
    scale = 1.0 / math.sqrt(q.shape[1])
    shift = k.shape[0] - q.shape[0]
    out, dq = torch.empty_like(q), torch.empty_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    keys = torch.arange(k.shape[0], device=q.device)
    for start in range(0, q.shape[0], _ROWS):
        rows = slice(start, min(start + _ROWS, q.shape[0]))
        scores = q[rows] @ k.T * scale  # [_ROWS, Sk]
        if causal:
            queries = torch.arange(rows.start, rows.stop, device=q.device)
            scores = scores.masked_fill(keys[None, :] > queries[:, None] + shift, -math.inf)
        weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)  # a row that sees no key gives 0
        out[rows] = weights @ v
        d_weights = d_out[rows] @ v.T
        d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True)) * scale
        dq[rows] = d_scores @ k
        dk += d_scores.T @ q[rows]
        dv += weights.T @ d_out[rows]
    return out, dq, dk, dv


def complaint_of_inputs(**inputs: torch.Tensor) -> str:
    """What is wrong with inputs, in words; empty when they can tell right from wrong.

    On zeros, or on any constant, every row of V is its own mean, so that a kernel which reads nothing passes; and a GPU's multipliers,
    which then hardly switch, draw less power and run at higher clocks than they ever do on data.
    """
    for name, tensor in inputs.items():
        deviation = float(tensor.float().std())
        if not 0.1 < deviation < 10.0:  # NaN is wrong too
            return f"{name} has a standard deviation of {deviation:.3g}; inputs must be random, with one of about 1"
    return ""


class Judge:
    """Knows the right answer for the last head of the last batch, where wrong offsets show first.

    With grouped heads it takes the last group: dk and dv are sums over the group's query heads.
    """

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_out: torch.Tensor, causal: bool) -> None:
        group = q.shape[2] // k.shape[2]
        heads = [
            reference_head(q[-1, :, -i], k[-1, :, -1], v[-1, :, -1], d_out[-1, :, -i], causal)
            for i in range(1, group + 1)
        ]
        self._dtype = q.dtype
        self._expected = {
            "out": heads[0][0],
            "dq": heads[0][1],
            "dk": torch.stack([head[2] for head in heads]).sum(0),
            "dv": torch.stack([head[3] for head in heads]).sum(0),
        }

    def complaint(self, **results: torch.Tensor) -> str:
        """What is wrong with `out`, `dq`, `dk`, `dv` [B, S, H, D], in words; empty when all are right."""
        for name, result in results.items():
            expected = self._expected[name]
            error = (result[-1, :, -1].float() - expected).abs()
            bound = _TOLERANCE[self._dtype]
            rms = float(error.square().mean().sqrt() / expected.square().mean().sqrt().clamp_min(1e-30))
            peak = float(error.max() / expected.abs().max().clamp_min(1e-30))
            if not (rms <= bound and peak <= _PEAK_FACTOR * bound):  # NaN is wrong too
                return (
                    f"{name} is wrong: error {rms:.1e} (root mean square) and {peak:.1e} (largest), relative to the "
                    f"fp32 reference; at most {bound:.0e} and {_PEAK_FACTOR * bound:.0e} are rounding"
                )
        return ""
