"""From a configuration to a model on a device, with values."""

from __future__ import annotations

import math

import torch
from torch import nn

from ..attention.api import attention as default_attention
from .config import GPT2Config, ModelConfig
from .gpt2 import GPT2
from .layers import AttentionFunction, RotaryEmbedding
from .llama3 import Llama3
from .operators import PLAIN, LayerOperators

INITIAL_STD = 0.02

Model = GPT2 | Llama3


def build_model(
    config: ModelConfig,
    attention: AttentionFunction = default_attention,
    device: torch.device | str | None = None,
    seed: int | None = None,
    operators: LayerOperators = PLAIN,
) -> Model:
    """A freshly initialised model with float32 parameters, made on `device` (default: the CPU) with no copy elsewhere.

    `attention` is any callable (q, k, v, *, causal, scale) on [B, S, H, D] tensors; the default is tileflash.attention.
    `operators` are what lies between the matrix products. `seed` None takes the device's global generator. On the device
    "meta" the model has shapes and no values.
    """
    model = empty_model(config, attention, device, operators=operators)
    if model.embedding.weight.device.type != "meta":
        initialize_weights(model, seed)
    return model


def empty_model(
    config: ModelConfig,
    attention: AttentionFunction = default_attention,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    operators: LayerOperators = PLAIN,
) -> Model:
    """A model whose parameters are allocated on `device` in `dtype` and hold anything: for a loader to fill."""
    with torch.device("meta"):  # nothing is computed there, so PyTorch's own initialisation costs nothing
        model: Model = (
            GPT2(config, attention, operators)
            if isinstance(config, GPT2Config)
            else Llama3(config, attention, operators)
        )
    model.to(dtype)
    target = torch.device("cpu" if device is None else device)
    if target.type != "meta":
        model.to_empty(device=target)
        _reset_buffers(model)
    return model


@torch.no_grad()
def initialize_weights(model: nn.Module, seed: int | None = None) -> None:
    """Normal with std 0.02, that of each projection into the residual stream divided by sqrt(2 n_layer) (GPT-2's rule).

    Norms start at 1, biases and the padding rows of the vocabulary at 0. Works in place, parameter by parameter in
    their order, so that a seed gives the same model wherever the same kind of device makes it.
    """
    config: ModelConfig = model.config  # type: ignore[assignment]
    generator = None
    if seed is not None:
        generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    residual_std = INITIAL_STD / math.sqrt(2 * config.n_layer)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.zero_()
        elif parameter.dim() == 1:
            parameter.fill_(1.0)
        elif name.endswith(("attention.output.weight", "mlp.down.weight")):
            parameter.normal_(0.0, residual_std, generator=generator)
        else:
            parameter.normal_(0.0, INITIAL_STD, generator=generator)
        if name in ("embedding.weight", "head.weight"):
            parameter[config.vocab_size :] = 0.0
    _reset_buffers(model)


def _reset_buffers(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, RotaryEmbedding):
            module.reset()
