"""What acts on a model's layers from outside: compilation, and computing again in the backward pass instead of keeping."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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


class Recomputation:
    """What the backward pass of each layer computes again instead of keeping it; `kind` may be changed between steps.

    "none"; "selective" (what costs little: norms, activations, rotary embedding; results of matrix products with weights and of fused
    attention are kept); "full" (all but the layer's inputs). Made after `compile_layers`, which "selective" does not go with.
    """

    def __init__(self, model: nn.Module, kind: str = "none") -> None:
        if kind not in RECOMPUTE:
            raise ValueError(f'recompute is "{kind}": it must be one of {", ".join(RECOMPUTE)}')
        self.kind = kind
        for layer in _layers(model):
            layer.forward = functools.partial(self._call, layer.forward)

    def _call(self, forward: Callable[..., Any], *inputs: Any) -> Any:
        if self.kind == "none":
            return forward(*inputs)
        # Nothing in a layer is random, and a capture could not read the generator's state.
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if self.kind == "selective":
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(forward, *inputs, **options)


def choose_recompute(
    kinds: Sequence[str], step_bytes: Callable[[str], int | None], budget_bytes: float
) -> tuple[str, int]:
    """The first of `kinds`, which compute ever more again, whose step needs at most `budget_bytes`, and what it needs.

    `step_bytes` measures a step's peak with a kind; None: memory ran out. ValueError where none fits.
    """
    told = []
    for kind in kinds:
        needed = step_bytes(kind)
        if needed is not None and needed <= budget_bytes:
            return kind, needed
        told.append(f"{kind} {'more than there is' if needed is None else f'{needed / 1e9:.2f} GB'}")
    raise ValueError(
        f"memory_budget is {budget_bytes / 1e9:g} GB: a step needs more with every recomputation ({', '.join(told)}); lower batch_size "
        "or sequence_length, or raise it"
    )


def _policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    name = operator.name() if isinstance(operator, torch._ops.OpOverload) else ""
    kept = name.startswith(("aten::mm", "aten::addmm", "tileflash::attention"))
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _layers(model: nn.Module) -> list[nn.Module]:
    layers = model.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList)
    return list(layers)
