"""What acts on a model's layers from outside: compilation, and computing again in the backward pass instead of keeping."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

RECOMPUTE = ("none", "selective", "full")


def compile_layers(model: nn.Module) -> None:
    """Compile each layer of `model`, when it is first called; layers of one shape share what was compiled.

    Names of weights stay as they are.
    """
    for layer in _layers(model):
        layer.forward = torch.compile(layer.forward)


def layers_as_written(compiled: bool) -> AbstractContextManager[Any]:
    """A context in which layers that `compile_layers` has compiled run as they are written: a look at the model with other shapes
    and without gradients would have them compiled again for each."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def recompute_layers(model: nn.Module, kind: str) -> None:
    """Let the backward pass of each layer compute again what `kind` says: "none"; "selective" (what costs little: norms, activations,
    rotary embedding; results of matrix products with weights and of fused attention are kept); "full" (all but the layer's inputs).

    Comes after `compile_layers`, which "selective" does not go with. ValueError for another kind.
    """
    if kind not in RECOMPUTE:
        raise ValueError(f'recompute is "{kind}": it must be one of {", ".join(RECOMPUTE)}')
    if kind == "none":
        return
    # Nothing in a layer is random, and a capture could not read the generator's state.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if kind == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    for layer in _layers(model):
        layer.forward = functools.partial(checkpoint, layer.forward, **options)


def _policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    name = operator.name() if isinstance(operator, torch._ops.OpOverload) else ""
    kept = name.startswith(("aten::mm", "aten::addmm", "tileflash::attention"))
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _layers(model: nn.Module) -> list[nn.Module]:
    layers = model.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList)
    return list(layers)
