"""Presets, configurations, initialisation, counts."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tileflash.models import (
    PRESETS,
    RopeScaling,
    build_model,
    empty_model,
    flops_per_token,
    initialize_weights,
    matmul_parameter_count,
    model_config,
    parameter_count,
    unfused_attention,
)
from tileflash.models.layers import RotaryEmbedding, inverse_frequencies
from tileflash.models.operators import apply_rotary

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama3-1b": 1_235_814_400,
    "llama3-3b": 3_212_749_824,
    "llama3-8b": 8_030_261_248,
}
TINY = ["gpt2-tiny", "llama3-tiny"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name):
    assert parameter_count(PRESETS[name]) == PUBLISHED[name]
    model = build_model(model_config(name, vocab_multiple=1), device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_every_preset_is_counted_or_tiny():
    assert set(PRESETS) == set(PUBLISHED) | set(TINY)


@pytest.mark.parametrize("name", TINY)
def test_tiny_presets_take_the_bytes_vocabulary_and_are_small(name):
    config = PRESETS[name]
    assert config.vocab_size == 257
    assert parameter_count(config) < 1_000_000
    assert build_model(config, seed=0)(torch.randint(0, 257, (2, 9))).shape == (2, 9, 257)
    assert model_config(name, vocab_size=50257).vocab_size == 50257


@pytest.mark.parametrize("name", TINY)
def test_seed_decides_the_weights(name):
    config = model_config(name, n_layer=1)
    one, same, other = (build_model(config, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not torch.equal(one["embedding.weight"], other["embedding.weight"])
    torch.manual_seed(5)
    first, second = build_model(config), build_model(config)
    assert not torch.equal(first.embedding.weight, second.embedding.weight)  # no seed: the global generator goes on


@pytest.mark.parametrize(("name", "tied"), [("gpt2-tiny", True), ("gpt2-tiny", False), ("llama3-tiny", False)])
def test_initial_statistics(name, tied):
    config = model_config(name, tied=tied, vocab_multiple=128, n_embd=256, n_layer=3)
    for key, parameter in build_model(config, seed=0).named_parameters():
        if key.endswith(".bias"):
            assert (parameter == 0).all(), key
        elif parameter.dim() == 1:
            assert (parameter == 1).all(), key
        else:
            residual = key.endswith(("attention.output.weight", "mlp.down.weight"))
            expected = 0.02 / math.sqrt(2 * 3) if residual else 0.02
            rows = parameter[:257] if key in ("embedding.weight", "head.weight") else parameter
            # The standard deviation of n normal numbers has a relative standard error of 1 / sqrt(2 n).
            assert abs(rows.std().item() / expected - 1) < 5 / math.sqrt(2 * rows.numel()), key
            assert abs(rows.mean().item()) < 5 * expected / math.sqrt(rows.numel()), key
            assert (parameter[257:] == 0).all() or rows is parameter, key


@pytest.mark.parametrize("name", TINY)
def test_meta_then_materialised_equals_built(name):
    """As sharded training makes models: shapes first, memory later."""
    config = model_config(name, n_layer=1)
    model = build_model(config, device="meta")
    model.to_empty(device="cpu")
    for tensor in model.state_dict(keep_vars=True).values():
        tensor.data.fill_(float("nan"))
    initialize_weights(model, seed=3)
    tokens = torch.arange(20)[None]
    assert torch.equal(model(tokens), build_model(config, seed=3)(tokens))


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("tied", [True, False])
def test_padding_rows_give_no_logit_and_get_no_gradient(name, tied):
    config = model_config(name, vocab_multiple=128, tied=tied, n_layer=1)
    assert config.padded_vocab_size == 384
    padded, plain = build_model(config, seed=0), build_model(model_config(name, n_layer=1, tied=tied, vocab_multiple=1))
    weights = {
        key: value[:257] if key in ("embedding.weight", "head.weight") else value
        for key, value in padded.state_dict().items()
    }
    plain.load_state_dict(weights)
    tokens = torch.randint(0, 257, (2, 12))
    logits = padded(tokens)
    assert logits.shape == (2, 12, 257)
    assert torch.allclose(logits, plain(tokens), atol=1e-6)
    logits.logsumexp(-1).sum().backward()
    assert (padded.head_weight.grad[257:] == 0).all()
    assert (padded.head_weight.grad[:257] != 0).any()


@pytest.mark.parametrize("name", TINY)
def test_features_times_head_weight_are_the_logits(name):
    model = build_model(PRESETS[name], seed=0)
    tokens = torch.randint(0, 257, (1, 7))
    logits = (model.features(tokens) @ model.head_weight.T)[..., :257]
    assert torch.allclose(logits, model(tokens), atol=1e-6)


@pytest.mark.parametrize("name", TINY)
def test_too_long_a_sequence_is_refused(name):
    model = build_model(model_config(name, max_sequence_length=8, n_layer=1))
    assert model(torch.zeros(1, 8, dtype=torch.int64)).shape == (1, 8, 257)
    with pytest.raises(ValueError, match=r"tokens has 9 positions; it must have at most max_sequence_length, 8"):
        model(torch.zeros(1, 9, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_changing_the_dtype_keeps_every_bit_of_the_rotary_frequencies(dtype):
    config = PRESETS["llama3-tiny"]
    model = build_model(config, seed=0).to(dtype)
    held = model.rotary.inverse_frequency_bits.view(torch.float32)
    assert torch.equal(held, inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling))
    assert model(torch.arange(5)[None]).dtype == dtype
    assert not any("rotary" in key for key in model.state_dict())


@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11), (torch.float32, 2**-22)])
def test_rotation_rounds_once(dtype, unit):
    """Only the result is rounded to the dtype, never the cosines: late positions would suffer."""
    x = torch.randn(2, 500, 3, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    cos, sin = RotaryEmbedding(32, 10000.0, None)(500)
    got, truth = apply_rotary(x, cos, sin), apply_rotary(x.double(), cos, sin)
    assert got.dtype == dtype
    assert ((got - truth).abs() <= unit * truth.abs() + 1e-6).all()


def test_rotation_is_that_of_the_paper():
    """Pair (i, i + D / 2) at position p, taken as a complex number, is multiplied by exp(i p frequency)."""
    x = torch.randn(1, 40, 2, 16, dtype=torch.float64)
    frequencies = 500000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    turn = torch.polar(torch.ones(40, 8, dtype=torch.float64), torch.outer(torch.arange(40.0).double(), frequencies))
    expected = torch.complex(x[..., :8], x[..., 8:]) * turn[None, :, None]
    got = apply_rotary(x, *RotaryEmbedding(16, 500000.0, None)(40))
    assert (got - torch.cat((expected.real, expected.imag), dim=-1)).abs().max() < 1e-5  # angles are float32


def test_rotary_scaling_has_three_bands():
    scaling = RopeScaling(factor=8.0, original_max_sequence_length=64)
    plain, scaled = inverse_frequencies(64, 10000.0, None), inverse_frequencies(64, 10000.0, scaling)
    wavelength = 2 * math.pi / plain
    kept, stretched = wavelength < 64 / 4, wavelength > 64
    between = ~(kept | stretched)
    assert kept.any()
    assert stretched.any()
    assert between.any()
    assert torch.equal(scaled[kept], plain[kept])
    assert torch.equal(scaled[stretched], plain[stretched] / 8)
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


@pytest.mark.parametrize("name", TINY)
def test_flops_equal_those_counted_by_pytorch(name):
    """PyTorch counts the products of the unfused baseline, masked half included: 12 L C T instead of 6."""
    config = model_config(name, vocab_multiple=1, n_layer=2)
    model = build_model(config, attention=unfused_attention, seed=0)
    batch, length = 2, 24
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(0, 257, (batch, length))).sum().backward()
    half = 6 * config.n_layer * config.n_embd * length
    assert counter.get_total_flops() == batch * length * (flops_per_token(config, length) + half)


def test_flops_of_gpt2_by_hand():
    config = PRESETS["gpt2"]
    assert matmul_parameter_count(config) == 12 * 12 * 768**2 + 50257 * 768
    assert flops_per_token(config, 1024) == 6 * (12 * 12 * 768**2 + 50257 * 768) + 6 * 12 * 768 * 1024
    with pytest.raises(ValueError, match="sequence_length is 0"):
        flops_per_token(config, 0)


def test_unknown_names_are_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"model is 'gpt3'; it must be one of gpt2-tiny, gpt2, .*llama3-8b"):
        model_config("gpt3")
    with pytest.raises(ValueError, match=r"gpt2 has no field n_kv_head; its fields are vocab_size"):
        model_config("gpt2", n_kv_head=2)
    with pytest.raises(ValueError, match=r"rope_scaling has no field factr; its fields are factor"):
        model_config("llama3-1b", rope_scaling={"factr": 2})


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("gpt2", {"n_layer": 0}, "n_layer is 0; it must be a positive integer"),
        ("gpt2", {"n_layer": 2.0}, "n_layer is 2.0; it must be a positive integer"),
        ("gpt2", {"n_head": True}, "n_head is True; it must be a positive integer"),
        ("gpt2", {"n_embd": 100, "n_head": 3}, "n_embd is 100; it must be a multiple of n_head, 3"),
        ("gpt2", {"norm_epsilon": float("nan")}, "norm_epsilon is nan; it must be a positive number"),
        ("gpt2", {"tied": "yes"}, "tied is 'yes'; it must be true or false"),
        ("llama3-1b", {"n_kv_head": 5}, "n_head is 32; it must be a multiple of n_kv_head, 5"),
        ("llama3-1b", {"n_embd": 96}, r"head_dim \(n_embd / n_head\) is 3; it must be a multiple"),
        ("llama3-1b", {"rope_scaling": 8.0}, "rope_scaling is 8.0; it must be None or a RopeScaling"),
        ("llama3-1b", {"rope_scaling": {"factor": -1.0}}, "factor is -1.0; it must be a positive number"),
        ("llama3-1b", {"rope_scaling": {}}, "rope_scaling is {}; it must give a factor"),
        ("llama3-1b", {"rope_theta": 0}, "rope_theta is 0; it must be a positive number"),
    ],
)
def test_values_out_of_range_are_named(name, overrides, message):
    with pytest.raises(ValueError, match=message):
        model_config(name, **overrides)


def test_rope_scaling_from_a_mapping_or_none():
    assert model_config("llama3-1b", rope_scaling={"factor": 8.0}).rope_scaling == RopeScaling(factor=8.0)
    assert model_config("llama3-1b", rope_scaling=None).rope_scaling is None


def test_empty_model_is_on_the_device_in_the_dtype():
    model = empty_model(PRESETS["gpt2-tiny"], dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
