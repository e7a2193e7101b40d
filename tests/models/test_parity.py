"""Logits against transformers' GPT2LMHeadModel and LlamaForCausalLM, in float64, bfloat16 and under autocast."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import tileflash
from tileflash.models import unfused_attention
from tileflash.weights import load_weights

transformers = pytest.importorskip("transformers")

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def sdpa(q, k, v, *, causal, scale):
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=gqa).transpose(1, 2)


def gpt2(**changes):
    values = {"vocab_size": 101, "n_positions": 80, "n_embd": 48, "n_layer": 2, "n_head": 3}
    return transformers.GPT2Config(**(values | changes))


def llama(**changes):
    values = {
        "vocab_size": 101,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return transformers.LlamaConfig(**(values | changes))


# name -> (configuration, sequence length)
CASES = {
    "gpt2": (gpt2(), 80),
    "gpt2-untied": (gpt2(tie_word_embeddings=False), 40),
    "gpt2-epsilon": (gpt2(layer_norm_epsilon=1e-2), 40),
    "gpt2-1100-positions": (gpt2(n_positions=1100, n_layer=1), 1090),
    "llama-gqa": (llama(), 70),
    "llama-mha-tied": (llama(num_key_value_heads=4, tie_word_embeddings=True), 70),
    "llama-mqa": (llama(num_key_value_heads=1), 70),
    "llama3-rope-beyond-original": (llama(rope_parameters=LLAMA3_ROPE, hidden_size=128), 200),
    "llama3-theta-epsilon": (llama(rope_parameters=LLAMA3_ROPE | {"rope_theta": 500000.0}, rms_norm_eps=1e-2), 200),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Case -> a directory with that model as transformers saved it, every weight (norms and biases too) random."""
    directories: dict[str, Path] = {}

    def make(case):
        if case not in directories:
            torch.manual_seed(len(case))
            config = CASES[case][0]
            kind = transformers.GPT2LMHeadModel if config.model_type == "gpt2" else transformers.LlamaForCausalLM
            model = kind(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.15)
            directories[case] = tmp_path_factory.mktemp(case)
            model.save_pretrained(directories[case])
        return directories[case]

    return make


def theirs(directory, dtype):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


def tokens_for(case, batch=2):
    config, length = CASES[case]
    return torch.randint(0, config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(7))


ATTENTIONS = [unfused_attention, sdpa, tileflash.attention]


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_float64_logits_equal_transformers(case, attention, saved):
    tokens = tokens_for(case, batch=1 if CASES[case][1] > 1000 else 2)
    expected = theirs(saved(case), torch.float64)(tokens).logits
    got = load_weights(saved(case), attention=attention, dtype=torch.float64)(tokens)
    assert got.dtype == torch.float64
    assert got.shape == expected.shape
    assert expected.std() > 0.5  # weights that matter
    assert (got - expected).abs().max() < 1e-10


@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("case", ["gpt2", "llama-gqa", "llama3-rope-beyond-original"])
@torch.no_grad()
def test_bfloat16_error_is_at_most_twice_transformers(case, attention, how, saved):
    tokens = tokens_for(case)
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    ours = load_weights(saved(case), attention=attention, dtype=dtype)
    reference = theirs(saved(case), dtype)
    truth = load_weights(saved(case), dtype=dtype).double()(tokens)  # of the rounded weights
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        got, expected = ours(tokens), reference(tokens).logits
    assert got.dtype == torch.bfloat16
    error, peer_error = (got - truth).abs(), (expected - truth).abs()
    assert peer_error.max() > 0  # it is a computation in bfloat16
    assert error.max() <= 2 * peer_error.max() + 1e-3
    assert error.square().mean().sqrt() <= 2 * peer_error.square().mean().sqrt() + 1e-4


@pytest.mark.parametrize("case", ["gpt2", "llama-gqa", "llama-mha-tied"])
def test_float64_gradients_equal_transformers(case, saved, tmp_path):
    """One step of plain gradient descent on both, then compared through the file format, name by name."""
    tokens = tokens_for(case)
    reference = theirs(saved(case), torch.float64)
    ours = load_weights(saved(case), dtype=torch.float64)
    for model, logits in ((reference, reference(tokens).logits), (ours, ours(tokens))):
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    reference.save_pretrained(tmp_path)
    expected = load_weights(tmp_path, dtype=torch.float64).state_dict()
    for name, value in ours.state_dict().items():
        # float64 everywhere but in Llama's norms, which go through float32 forward and backward
        assert (value - expected[name]).abs().max() < 1e-9, name


def test_autocast_gradients_are_float32_and_close(saved):
    tokens = tokens_for("llama-gqa")

    def gradients(dtype, autocast):
        model = load_weights(saved("llama-gqa"), dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(tokens)
        F.cross_entropy(logits[:, :-1].flatten(0, 1).to(dtype), tokens[:, 1:].flatten()).backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    got, truth = gradients(torch.float32, True), gradients(torch.float64, False)
    assert got.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(got.double(), truth, dim=0) > 0.999


@pytest.mark.parametrize("case", ["gpt2", "llama-gqa"])
@torch.no_grad()
def test_traced_whole_without_a_graph_break(case, saved):
    tokens = tokens_for(case)
    model = load_weights(saved(case), attention=sdpa, dtype=torch.float64)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert (compiled(tokens) - model(tokens)).abs().max() < 1e-12
