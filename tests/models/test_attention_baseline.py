"""The unfused baseline against an independent float64 computation, forward and backward."""

import math

import pytest
import torch

from tileflash.models import unfused_attention


def reference(q, k, v, causal, scale):
    """One query at a time, from the definition; differentiable."""
    group = q.shape[2] // k.shape[2]
    shift = k.shape[1] - q.shape[1]
    rows = []
    for b in range(q.shape[0]):
        for i in range(q.shape[1]):
            for h in range(q.shape[2]):
                last = i + shift + 1 if causal else k.shape[1]
                weights = torch.exp(scale * (k[b, :last, h // group] @ q[b, i, h]))
                rows.append(weights @ v[b, :last, h // group] / weights.sum())
    return torch.stack(rows).view(*q.shape[:3], v.shape[-1])


def inputs(dtype=torch.float64, shape=(2, 5, 7, 4, 2, 8), requires_grad=False):
    batch, query_length, key_length, heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(3)
    sizes = [(query_length, heads), (key_length, kv_heads), (key_length, kv_heads)]
    made = (torch.randn(batch, length, n, dim, generator=generator, dtype=torch.float64) for length, n in sizes)
    return [tensor.to(dtype).requires_grad_(requires_grad) for tensor in made]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_forward_and_gradients(heads, kv_heads, scale, causal):
    q, k, v = inputs(shape=(2, 5, 7, heads, kv_heads, 8), requires_grad=True)
    weight = torch.randn(2, 5, heads, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    expected = reference(q, k, v, causal, 1 / math.sqrt(8) if scale is None else scale)
    expected_gradients = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    got = unfused_attention(q, k, v, causal=causal, scale=scale)
    gradients = torch.autograd.grad((got * weight).sum(), (q, k, v))
    assert (got - expected).abs().max() < 1e-13
    for gradient, truth in zip(gradients, expected_gradients, strict=True):
        assert (gradient - truth).abs().max() < 1e-13


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-2)])
def test_lower_precision_is_within_rounding(dtype, tolerance):
    q, k, v = inputs(dtype)
    expected = reference(q.double(), k.double(), v.double(), True, 1 / math.sqrt(8))
    got = unfused_attention(q, k, v, causal=True)
    assert got.dtype == dtype
    assert (got - expected).abs().max() < tolerance


def test_autocast_runs_the_products_in_bfloat16():
    q, k, v = inputs(torch.float32, requires_grad=True)
    expected = reference(q.double(), k.double(), v.double(), True, 1 / math.sqrt(8))
    with torch.autocast("cpu", torch.bfloat16):
        got = unfused_attention(q, k, v, causal=True)
    assert got.dtype == torch.bfloat16
    assert (got - expected).abs().max() < 3e-2
    got.float().sum().backward()
    assert q.grad.dtype == torch.float32


def test_causal_hides_the_future_even_when_it_is_not_finite():
    q, k, v = inputs(shape=(1, 6, 6, 2, 2, 8))
    before = unfused_attention(q, k, v, causal=True)
    k[:, 4:] = float("inf")
    after = unfused_attention(q, k, v, causal=True)
    assert torch.equal(after[:, :4], before[:, :4])


def test_a_matrix_of_scores_is_held():
    """It is the baseline because it pays for the S x S matrix; the comparison means nothing otherwise."""
    q, k, v = inputs(torch.float32, shape=(1, 64, 64, 2, 2, 8), requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.shape) or tensor, lambda t: t):
        unfused_attention(q, k, v, causal=True)
    assert (1, 2, 64, 64) in [tuple(shape) for shape in saved]


def test_bad_input_is_named():
    q, k, v = inputs(shape=(1, 5, 5, 3, 2, 8))
    with pytest.raises(ValueError, match=r"q has 3 heads.*multiple of the 2 heads of k"):
        unfused_attention(q, k, v)
    q, k, v = inputs(shape=(1, 5, 4, 2, 2, 8))
    with pytest.raises(ValueError, match=r"q has 5 positions.*at most the 4 of k"):
        unfused_attention(q, k, v, causal=True)
