"""What a checkpoint holds, and how it goes back: nothing that the next step depends on may be left out."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

_MOMENTS = ("exp_avg", "exp_avg_sq")


def model_facts(model_config: Any) -> dict[str, Any]:
    """The model's configuration as plain values, as JSON gives it back."""
    facts = {"family": model_config.family, **dataclasses.asdict(model_config)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in facts.items()}


def differences(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """What differs, as `name: saved -> current`, for messages."""
    names = [*saved, *(name for name in current if name not in saved)]
    return [
        f"{name}: {saved.get(name)} -> {current.get(name)}" for name in names if saved.get(name) != current.get(name)
    ]


def gather_tensors(
    model: nn.Module, optimizer: torch.optim.AdamW, sampling: torch.Generator, device: torch.device
) -> dict[str, torch.Tensor]:
    """All tensors that a checkpoint holds, by name; weights and moments are the very tensors in use, not copies.

    Moments that do not exist yet (before the first step) are made here as zeros, so that there is always something to
    load into.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():  # a weight shared by two layers comes once
        tensors[f"model.{name}"] = parameter.detach()
        if not parameter.requires_grad:
            continue
        moments = optimizer.state[parameter]
        if not moments:
            # Where and how the fused optimizer keeps its step count: on the device, in fp32.
            moments["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            moments.update({moment: torch.zeros_like(parameter) for moment in _MOMENTS})
        tensors |= {f"optimizer.{name}.{key}": moments[key] for key in ("step", *_MOMENTS)}
    persistent = model.state_dict(keep_vars=True)
    tensors |= {f"buffer.{name}": buffer for name, buffer in model.named_buffers() if name in persistent}
    tensors["random.cpu"] = torch.get_rng_state()
    tensors["random.sampling"] = sampling.get_state()
    if device.type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state(device)
    return tensors


def apply_random_states(tensors: dict[str, torch.Tensor], sampling: torch.Generator, device: torch.device) -> None:
    """Set the random generators to the states in `tensors`, which, unlike weights, are copies."""
    torch.set_rng_state(tensors["random.cpu"])
    sampling.set_state(tensors["random.sampling"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(tensors["random.cuda"], device)


@torch.no_grad()
def weights_are_finite(model: nn.Module) -> bool:
    """Whether no weight is NaN or Inf; one wait for the device."""
    # The largest magnitude is NaN or Inf if any of them is, and cannot overflow as a sum could.
    weights = [parameter.detach() for parameter in model.parameters()]
    return bool(nn.utils.get_total_norm(weights, norm_type=float("inf")).isfinite())
