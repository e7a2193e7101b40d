"""GPT-2 and LLaMA-3 as plain PyTorch modules, their presets, and the unfused attention they are compared with."""

from .attention_baseline import unfused_attention
from .build import Model, build_model, empty_model, initialize_weights
from .config import GPT2Config, Llama3Config, ModelConfig, RopeScaling
from .counts import flops_per_token, matmul_parameter_count, parameter_count
from .gpt2 import GPT2
from .layers import AttentionFunction
from .llama3 import Llama3
from .operators import LayerOperators
from .presets import PRESETS, model_config

__all__ = [
    "GPT2",
    "PRESETS",
    "AttentionFunction",
    "GPT2Config",
    "LayerOperators",
    "Llama3",
    "Llama3Config",
    "Model",
    "ModelConfig",
    "RopeScaling",
    "build_model",
    "empty_model",
    "flops_per_token",
    "initialize_weights",
    "matmul_parameter_count",
    "model_config",
    "parameter_count",
    "unfused_attention",
]
