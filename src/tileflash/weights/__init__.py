"""Weights in and out: Hugging Face directories (safetensors) and llm.c's `.bin` files."""

from .huggingface_write import replaced_by_huggingface, save_huggingface
from .llmc import save_llmc
from .load import config_from_path, load_into, load_weights, open_weights
from .tensor_map import WeightSource

__all__ = [
    "WeightSource",
    "config_from_path",
    "load_into",
    "load_weights",
    "open_weights",
    "replaced_by_huggingface",
    "save_huggingface",
    "save_llmc",
]
