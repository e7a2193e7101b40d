"""On a GPU: training with fused operators agrees with training without, and its step can be captured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tileflash.models import build_model, model_config, unfused_attention
from tileflash.train import TrainConfig, train
from tileflash.train.data_source import StepBatch
from tileflash.train.fused import FUSED, fused_loss
from tileflash.train.graph import CapturedStep
from tileflash.train.optimizer import build_optimizer
from tileflash.train.step import Limits, train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch sees"),
]


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama3-tiny"])
def test_training_agrees_within_bfloat16(tmp_path: Path, name: str, numbers) -> None:
    for fused in (False, True):
        train(
            TrainConfig(
                model=name, data_directory=str(tmp_path / "data"), num_iteration=20, dtype="bfloat16", device="cuda", flash=True,
                tensorboard=False, fused_operators=fused, log_json=str(tmp_path / str(fused)),
            )
        )  # fmt: skip
    plain, fused = (np.array(numbers(tmp_path / str(on))) for on in (False, True))
    np.testing.assert_allclose(fused[:, 1], plain[:, 1], rtol=0, atol=2e-2)


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama3-tiny"])
def test_a_captured_step_is_the_eager_one(name: str) -> None:
    tokens = torch.randint(257, (1, 4, 64), generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    batch = StepBatch(tokens, tokens.roll(-1, -1), 256)
    losses = []
    for captured in (False, True):
        model = build_model(model_config(name), unfused_attention, "cuda", seed=0, operators=FUSED)
        optimizer = build_optimizer(model, 1e-3, 0.1)
        step = CapturedStep(
            model, optimizer, batch, dtype=torch.bfloat16, gradient_clip=1.0, loss_function=fused_loss
        ) if captured else None  # fmt: skip
        for _ in range(3):
            if step is not None:
                result = step(batch, 1e-3, Limits(3e38, 3e38))
            else:
                result = train_step(
                    model, optimizer, batch.tokens, batch.targets, batch.valid_tokens, dtype=torch.bfloat16, gradient_clip=1.0,
                    limits=Limits(3e38, 3e38), loss_function=fused_loss,
                )  # fmt: skip
            losses.append(result.tolist())
    for eager, replayed in zip(losses[:3], losses[3:], strict=True):
        np.testing.assert_allclose(replayed, eager, rtol=1e-4, atol=0)
