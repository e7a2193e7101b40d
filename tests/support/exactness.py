"""The judge: a backend's error against fp64 may be at most twice that of plain PyTorch in the input dtype (flash-attn's own test)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import tileflash
from tileflash.attention.band import Band


@dataclass(frozen=True)
class Case:
    """One attention problem to draw inputs for."""

    sq: int
    sk: int
    d: int
    batch: int = 2
    heads: int = 2
    kv_heads: int = 2
    dv: int | None = None
    dtype: torch.dtype = torch.float32
    causal: Any = False
    window: tuple[int | None, int | None] = (None, None)
    scale: float | None = None

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        window = "" if self.window == (None, None) else f"-window{self.window[0]},{self.window[1]}"
        scale = "" if self.scale is None else f"-scale{self.scale}"
        dv = "" if self.dv is None else f"v{self.dv}"
        return f"{dtype}-{self.sq}x{self.sk}-d{self.d}{dv}-h{self.heads}/{self.kv_heads}-{self.causal}{window}{scale}"

    def on(self, dtype: torch.dtype) -> Case:
        """The same problem in another dtype."""
        return replace(self, dtype=dtype)

    def draw(self, device: str, seed: int = 0, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v, normally distributed, that require gradients."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return (torch.randn(*shape, generator=generator) * spread).to(device, self.dtype).requires_grad_()

        dv = self.d if self.dv is None else self.dv
        return (
            normal(self.batch, self.sq, self.heads, self.d),
            normal(self.batch, self.sk, self.kv_heads, self.d),
            normal(self.batch, self.sk, self.kv_heads, dv),
        )

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `tileflash.attention`."""
        return {"causal": self.causal, "window": self.window, "scale": self.scale}


def textbook(q: Tensor, k: Tensor, v: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    """Attention as one writes it by hand, every step in the dtype of q: (out [B, Sq, Hq, Dv], lse [B, Hq, Sq])."""
    group = case.heads // case.kv_heads
    keys, values = (t.transpose(1, 2).repeat_interleave(group, 1) for t in (k, v))
    scale = q.shape[3] ** -0.5 if case.scale is None else case.scale
    visible = Band.of(case.causal, case.window, case.sq, case.sk).mask(0, case.sq, case.sk, q.device)
    logits = (q.transpose(1, 2) @ keys.transpose(2, 3) * scale).masked_fill(~visible, -torch.inf)
    empty = ~visible.any(1)[:, None]
    weights = torch.softmax(logits.masked_fill(empty, 0), 3).masked_fill(empty, 0)
    lse = torch.logsumexp(logits.masked_fill(empty, 0).to(torch.promote_types(q.dtype, torch.float32)), 3)
    return (weights @ values).transpose(1, 2), lse.masked_fill(empty[:, 0], -torch.inf)


def assert_within_promise(
    name: str, actual: Tensor, truth: Tensor, plain: Tensor, summed: float = 0, factor: float = 2, noise: float = 0
) -> None:
    """max|actual - truth| <= factor * max|plain - truth| + one rounding of the largest value; NaN never passes.

    In fp32 both errors are a few roundings of a sum, and which of the two gets lucky is chance: sixteen roundings are allowed there. Where
    `summed` terms of about 1 cancel each other, the sum's own size says nothing: sqrt(summed) roundings of 1 are allowed then.
    """
    assert actual.shape == truth.shape, f"{name}: shape {list(actual.shape)}, expected {list(truth.shape)}"
    if truth.numel() == 0:
        return
    infinite = torch.isinf(truth)
    assert torch.equal(torch.isinf(actual), infinite), f"{name}: -inf in other places than the reference"
    difference = (actual.double() - truth).masked_fill(infinite, 0).abs().max().item()
    allowed = factor * (plain.double() - truth).masked_fill(infinite, 0).abs().max().item()
    rounding = max(torch.finfo(actual.dtype).eps, 16 * torch.finfo(torch.float32).eps)
    allowed += rounding * truth.masked_fill(infinite, 0).abs().max().item() + torch.finfo(actual.dtype).tiny
    allowed += noise + summed**0.5 * torch.finfo(torch.float32).eps
    assert difference <= allowed, f"{name}: error {difference:.3e}, allowed {allowed:.3e}"


def check(case: Case, backend: str, device: str, with_lse: bool, seed: int = 0, spread: float = 1.0) -> None:
    """Run forward and backward of a backend and hold both against fp64; the log-sum-exp and its gradient too where asked."""
    q, k, v = case.draw(device, seed, spread)
    generator = torch.Generator().manual_seed(seed + 1)
    d_out = torch.randn(case.batch, case.sq, case.heads, v.shape[3], generator=generator).to(device, case.dtype)
    d_lse = torch.randn(case.batch, case.heads, case.sq, generator=generator).to(device) if with_lse else None

    def run(function: Any, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        out, lse = function(*inputs)
        loss = (out * d_out.to(out.dtype)).sum()
        if d_lse is not None:
            finite = torch.isfinite(lse)
            loss = loss + (lse[finite] * d_lse[finite].to(lse.dtype)).sum()
        return (out.detach(), *torch.autograd.grad(loss, inputs), *([lse.detach()] if with_lse else []))

    def ours(*inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        if with_lse:
            return tileflash.attention(*inputs, **case.arguments(), return_lse=True, backend=backend)
        return tileflash.attention(*inputs, **case.arguments(), backend=backend), None

    doubles = tuple(t.detach().double().requires_grad_() for t in (q, k, v))
    truth = run(lambda *inputs: textbook(*inputs, case), doubles)
    plain = run(lambda *inputs: textbook(*inputs, case), (q, k, v))
    actual = run(ours, (q, k, v))
    for name, *tensors in zip(("out", "d_q", "d_k", "d_v", "lse"), actual, truth, plain, strict=False):
        if name != "lse":
            assert tensors[0].dtype == case.dtype, f"{name}: dtype {tensors[0].dtype}"
        assert_within_promise(f"{backend} {case} {name}", *tensors)
