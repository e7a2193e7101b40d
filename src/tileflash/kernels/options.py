"""What a call of attention may ask for beyond q, k, v, scale and band, as kernels get it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Options(NamedTuple):
    """All that is optional; the defaults change nothing. Checked and brought to these forms by tileflash.attention.

    Args:
        bias: [1 or B, 1 or Hq, 1 or Sq, 1 or Sk], added to the logits; a bool one says which keys are visible.
        alibi_slopes: [Hq] or [B, Hq]; slope * |i + shift - j| is taken from the logit of query i and key j.
        sinks: [Hq], logits of keys without a value that every query sees.
        rng: int64 [2], seed and offset of the dropout.
        query_ids, key_ids: int32 or int64 [B, Sq], [B, Sk]; a query sees keys of its own number only.
        prefix_lengths: int32 [B]; every query sees this many first keys, whatever the band says.
        cu_seqlens_q, cu_seqlens_k: int32 [N + 1]; tensors hold N packed sequences: q [1, total, Hq, D], lse [1, Hq, total].
        max_seqlen_q, max_seqlen_k: no packed sequence is longer; 0 where nobody said.
        softcap: c > 0 puts the scaled products between -c and c by c * tanh(x / c), before ALiBi and bias; 0 is none.
        dropout_p: the probability, in [0, 1), that a weight is dropped.
        top_left: query 0 stands at key 0; otherwise the last query at the last key. Packed sequences' bands count from there.
        allow_tf32: fp32 products may be made of TF32 operands.
        bias_gradient: the gradient of the bias is wanted.
    """

    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    rng: Tensor | None = None
    query_ids: Tensor | None = None
    key_ids: Tensor | None = None
    prefix_lengths: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    softcap: float = 0.0
    dropout_p: float = 0.0
    top_left: bool = False
    allow_tf32: bool = False
    bias_gradient: bool = False

    @property
    def packed(self) -> bool:
        """Whether the tensors hold packed sequences."""
        return self.cu_seqlens_q is not None

    @property
    def differentiable(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The options that may have gradients: the first fields, in the order of OptionGradients."""
        return self.bias, self.alibi_slopes, self.sinks

    @property
    def requires_grad(self) -> bool:
        """Whether one of them wants one."""
        return any(tensor is not None and tensor.requires_grad for tensor in self.differentiable)


PLAIN = Options()


class OptionGradients(NamedTuple):
    """Gradients of options, each None where there is none to have."""

    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None


NO_GRADIENTS = OptionGradients()


def drop_below(dropout_p: float) -> int:
    """A weight is dropped where its 31 random bits are a smaller number than this."""
    return min(round(dropout_p * 2**31), 2**31 - 1)
