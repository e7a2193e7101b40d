"""What a checkpoint holds, and how it goes back: nothing that the next step depends on may be left out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tileflash.train.adamw import MOMENTS, FusedAdamW
from tileflash.train.masters import join_master, split_master


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


def gather_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The tensors of model and optimizer, by name: the very tensors in use, not copies, but for split masters.

    Those are given whole, in fp32 in the host's memory, so that a checkpoint says nothing of how a run keeps them;
    `take_tensors` puts what was loaded into them back. Moments that do not exist yet (before the first step) are made
    here as zeros, so that there is always something to load into.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():  # a weight shared by two layers comes once
        tensors[f"model.{name}"] = _master(parameter, optimizer)
        if not parameter.requires_grad:
            continue
        moments = optimizer.state[parameter]
        if not moments:
            # Where and how the fused optimizer keeps its step count: on the device, in fp32.
            moments["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            moments.update({moment: torch.zeros_like(parameter) for moment in MOMENTS})
        tensors |= {f"optimizer.{name}.{key}": moments[key] for key in ("step", *MOMENTS)}
    persistent = model.state_dict(keep_vars=True)
    tensors |= {f"buffer.{name}": buffer for name, buffer in model.named_buffers() if name in persistent}
    return tensors


def take_tensors(tensors: dict[str, torch.Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put `tensors`, as `gather_tensors` named them, back where those are copies."""
    if not (isinstance(optimizer, FusedAdamW) and optimizer.split):
        return
    for name, parameter in model.named_parameters():
        weight, low_bits = split_master(tensors[f"model.{name}"])
        parameter.detach().copy_(weight)
        optimizer.state[parameter]["low_bits"].copy_(low_bits)


def _master(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    if isinstance(optimizer, FusedAdamW) and optimizer.split:
        return join_master(parameter, optimizer.state[parameter]["low_bits"]).cpu()
    return parameter.detach()


def random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Copies of the states of PyTorch's global generators of the CPU and of `device`, by name."""
    states = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["random.cuda"] = torch.cuda.get_rng_state(device)
    return states


def apply_random_states(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """Put back what `random_states` gave."""
    torch.set_rng_state(states["random.cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["random.cuda"], device)


@torch.no_grad()
def weights_are_finite(model: nn.Module) -> bool:
    """Whether no weight is NaN or Inf; one wait for the device."""
    # The largest magnitude is NaN or Inf if any of them is, and cannot overflow as a sum could.
    weights = [parameter.detach() for parameter in model.parameters()]
    return bool(nn.utils.get_total_norm(weights, norm_type=float("inf")).isfinite())


def check_same_model(saved: dict[str, Any], current: dict[str, Any], checkpoint: Path) -> None:
    """ValueError that names every field in which the models differ."""
    if current["family"] != "gpt2":
        # Positions of rotary models are computed, not learned: a run may go on with longer sequences.
        saved = {**saved, "max_sequence_length": current["max_sequence_length"]}
    changed = differences(saved, current)
    if changed:
        raise ValueError(
            f"{checkpoint} holds another model than this run's ({'; '.join(changed)}): to go on it must be the same"
        )


def resume_sample(state: dict[str, Any], sequence_length: int) -> int:
    """Samples of `sequence_length` tokens that lie behind a checkpoint, whatever its own batch and length were."""
    tokens: int = state["sample"] * state["config"]["sequence_length"]
    return tokens // sequence_length
