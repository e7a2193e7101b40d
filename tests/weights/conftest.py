"""Small models whose every number is random, and a way to compare two models bit for bit."""

import pytest
import torch

from tileflash.models import build_model, model_config

SIZES = {
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 4, "max_sequence_length": 24, "vocab_size": 131},
    "llama3": {
        "n_layer": 3,
        "n_embd": 32,
        "n_head": 4,
        "n_kv_head": 2,
        "intermediate_size": 80,
        "max_sequence_length": 64,
        "vocab_size": 131,
        "rope_scaling": {"factor": 8.0},
    },
}


@pytest.fixture
def small():
    """small(family, tied=..., seed=..., **fields): a model with random weights, norms and biases included."""

    def make(family, *, tied=True, seed=0, **fields):
        config = model_config(f"{family}-tiny", tied=tied, **(SIZES[family] | fields))
        model = build_model(config, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter += torch.randn(parameter.shape, generator=generator)
                if name in ("embedding.weight", "head.weight"):
                    parameter[config.vocab_size :] = 0
        return model

    return make


@pytest.fixture
def bit_equal():
    """bit_equal(one, other): same configuration, same parameters to the last bit."""

    def check(one, other):
        first, second = one.state_dict(), other.state_dict()
        assert one.config == other.config
        assert first.keys() == second.keys()
        for name, value in first.items():
            assert value.dtype == second[name].dtype, name
            assert torch.equal(value, second[name]), name

    return check
