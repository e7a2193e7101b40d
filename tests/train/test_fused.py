"""Fused operators train alike: the same losses over 20 steps and the same gradients in fp32, with and without."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tileflash.models import build_model, model_config, unfused_attention
from tileflash.models.operators import PLAIN
from tileflash.parallel.layout import Layout
from tileflash.train import TrainConfig, train
from tileflash.train import setup as run_setup
from tileflash.train.fused import FUSED, fuse_embedding, fused_loss, fused_operators
from tileflash.train.step import LossFunction, forward_backward, plain_loss

Make = Callable[..., TrainConfig]
SIZES = {"vocab_size": 67, "n_layer": 2, "n_head": 2, "n_embd": 16, "max_sequence_length": 8}
LLAMA_SIZES = SIZES | {"n_kv_head": 1, "intermediate_size": 24}


@pytest.mark.parametrize("model", ["gpt2-tiny", "llama3-tiny"])
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_losses_of_twenty_steps_agree(
    tmp_path: Path, tiny: Make, numbers, monkeypatch: pytest.MonkeyPatch, model: str, backend: str
) -> None:
    """By plain PyTorch, as on a CPU, and by the kernels (in Triton's interpreter)."""
    sizes = {"vocab_size": 257, "n_layer": 1, "n_head": 2, "n_embd": 32, "max_sequence_length": 32}
    if model == "llama3-tiny":
        sizes |= {"n_kv_head": 1, "intermediate_size": 48}
    settings = {"model": model, "model_overrides": sizes, "num_iteration": 20}
    if backend == "triton":
        settings["batch_size"] = 1  # the interpreter takes its time
    monkeypatch.setattr(run_setup, "fused_loss", functools.partial(fused_loss, backend=backend))
    monkeypatch.setattr(run_setup, "FUSED", fused_operators(backend))
    for fused in (False, True):
        train(tiny(**settings, fused_operators=fused, log_json=str(tmp_path / str(fused))))
    plain, fused = (np.array(numbers(tmp_path / str(on))) for on in (False, True))
    assert len(plain) == 20
    assert plain[-3:, 1].mean() < plain[:3, 1].mean() - 0.3  # it learns
    np.testing.assert_allclose(fused[:, 1], plain[:, 1], rtol=0, atol=1e-5)
    np.testing.assert_allclose(fused[:, 3], plain[:, 3], rtol=1e-4, atol=0)


@pytest.mark.parametrize(("name", "sizes"), [("gpt2-tiny", SIZES), ("llama3-tiny", LLAMA_SIZES)])
@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_agree(name: str, sizes: dict[str, int], backend: str, tied: bool) -> None:
    tokens = torch.randint(67, (2, 2, 8), generator=torch.Generator().manual_seed(0))  # two micro-batches
    targets = tokens.roll(-1, -1)
    targets[1, 0, :5] = -100

    def gradients(fused: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        config = model_config(name, **sizes, tied=tied)
        operators = fused_operators(backend) if fused else PLAIN
        model = build_model(config, attention=unfused_attention, seed=0, operators=operators)
        if fused:
            fuse_embedding(model, backend)
        loss_function = functools.partial(fused_loss, backend=backend) if fused else plain_loss
        loss = forward_backward(model, tokens, targets, 27, torch.float32, loss_function)
        return loss, {name: parameter.grad for name, parameter in model.named_parameters()}

    (plain, plain_gradients), (fused, fused_gradients) = map(gradients, (False, True))
    torch.testing.assert_close(fused, plain, rtol=1e-6, atol=0)
    assert plain_gradients.keys() == fused_gradients.keys()
    for key, wanted in plain_gradients.items():
        torch.testing.assert_close(
            fused_gradients[key], wanted, rtol=1e-4, atol=1e-7, msg=lambda said, key=key: f"{key}: {said}"
        )


def test_in_bf16_the_gradient_of_the_head_is_nearer_to_that_of_fp32() -> None:
    """It is summed in fp32, where autocast's matrix product leaves it in bf16."""
    tokens = torch.randint(67, (1, 4, 8), generator=torch.Generator().manual_seed(0))

    def gradient(loss_function: LossFunction, dtype: torch.dtype) -> torch.Tensor:
        model = build_model(model_config("gpt2-tiny", **SIZES, tied=False), attention=unfused_attention, seed=0)
        forward_backward(model, tokens, tokens.roll(-1, -1), 32, dtype, loss_function)
        return model.head.weight.grad

    exact = gradient(plain_loss, torch.float32)
    plain, fused = (gradient(function, torch.bfloat16) for function in (plain_loss, fused_loss))
    assert (fused - exact).norm() <= (plain - exact).norm()


def test_validation_and_a_resumed_run_are_the_same(tmp_path: Path, tiny: Make, token_file: Path, read_events) -> None:
    losses = []
    for fused in (False, True):
        log = tmp_path / f"{fused}.jsonl"
        train(tiny(fused_operators=fused, input_val_bin=str(token_file), val_loss_every=3, log_json=str(log)))
        losses.append([event["loss"] for event in read_events(log, "validation")])
    assert len(losses[0]) == 2
    np.testing.assert_allclose(losses[1], losses[0], rtol=0, atol=1e-5)
    # A checkpoint knows nothing of the operators.
    train(tiny(num_iteration=3, output=str(tmp_path / "run")))
    result = train(tiny(output=str(tmp_path / "run"), resume=True, fused_operators=True))
    assert result.step == 6


def test_off_is_the_default(tiny: Make) -> None:
    assert not tiny().fused_operators
    plain, fused = (run_setup.prepare_setup(tiny(fused_operators=on)) for on in (False, True))
    assert (plain.operators, plain.loss_function) == (PLAIN, plain_loss)
    assert (fused.operators, fused.loss_function) == (FUSED, fused_loss)


def test_several_ranks_are_refused(tiny: Make) -> None:
    with pytest.raises(ValueError, match="fused_operators is set and there are 2 ranks"):
        run_setup.prepare_setup(tiny(fused_operators=True), Layout(data=2))
