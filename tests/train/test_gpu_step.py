"""On a GPU: AdamW's kernels, split masters, compiled layers and recomputation, eager and captured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tileflash.models import build_model, model_config, unfused_attention
from tileflash.train import TrainConfig, train
from tileflash.train.adamw import FusedAdamW
from tileflash.train.data_source import StepBatch
from tileflash.train.fused import FUSED, fuse_embedding, fused_loss
from tileflash.train.graph import CapturedStep
from tileflash.train.layers import Recomputation
from tileflash.train.masters import join_master, widen_stream
from tileflash.train.optimizer import build_fused_optimizer, build_optimizer
from tileflash.train.step import Limits, finish_step, train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch sees"),
]

OPEN, CLOSED = Limits(3e38, 3e38), Limits(0.0, 3e38)


@pytest.mark.parametrize("split", [False, True])
def test_the_update_is_pytorchs_within_rounding(split: bool) -> None:
    """A few units in the last place a step; over ten steps, with clipping, and one step that is skipped."""
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    initial = [drawn(1000, 333) * 0.02, drawn(768), drawn(5), drawn(50000, 16) * 0.02]
    ours, theirs = ([torch.nn.Parameter(tensor.clone()) for tensor in initial] for _ in range(2))
    optimizer = FusedAdamW(ours, lr=1e-3, weight_decay=0.1, split=split)
    reference = torch.optim.AdamW(theirs, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    loss = torch.ones((), device="cuda")
    for step in range(10):
        for weight, other in zip(ours, theirs, strict=True):
            gradient = drawn(*other.shape).to(weight.dtype)
            weight.grad, other.grad = gradient, gradient.float()
        skips = step == 4
        limits = CLOSED if skips else OPEN
        result = finish_step(torch.nn.Module(), optimizer, loss, gradient_clip=1.0, limits=limits)
        norm = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        if not skips:
            reference.step()
        torch.testing.assert_close(result[1], norm, rtol=1e-5, atol=0)
        assert result[2] == float(skips)
    for weight, other in zip(ours, theirs, strict=True):
        master = join_master(weight, optimizer.state[weight]["low_bits"]) if split else weight
        ulp = torch.maximum(other.abs(), torch.full_like(other, 1e-3)) * 2.0**-23
        assert ((master - other).abs() <= 32 * ulp).all()  # a few a step
        for moment in ("exp_avg", "exp_avg_sq"):
            expected = reference.state[other][moment]
            torch.testing.assert_close(
                optimizer.state[weight][moment], expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max())
            )


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_captured_step_with_split_masters_is_the_eager_one(micro_batches: int, recompute: str) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    batches = []
    for _ in range(4):  # different data: a replay must not see the first one's
        tokens = torch.randint(257, (micro_batches, 4, 64), generator=generator, device="cuda")
        batches.append(StepBatch(tokens, tokens.roll(-1, -1), 256 * micro_batches))
    results = []
    for captured in (False, True):
        model = build_model(model_config("gpt2-tiny"), unfused_attention, "cuda", seed=0, operators=FUSED)
        optimizer = build_fused_optimizer(model, 1e-3, 0.1, split=True, sum_in_fp32=True)
        widen_stream(model)
        fuse_embedding(model)
        Recomputation(model, recompute)
        options = {"dtype": torch.bfloat16, "gradient_clip": 1.0, "loss_function": fused_loss}
        step = CapturedStep(model, optimizer, batches[0], **options) if captured else None
        for number, batch in enumerate(batches):
            limits = CLOSED if number == 2 else OPEN
            if step is not None:
                result = step(batch, 1e-3, limits)
            else:
                data = (batch.tokens, batch.targets, batch.valid_tokens)
                result = train_step(model, optimizer, *data, limits=limits, **options)
            results.append(result.tolist())
    for eager, replayed in zip(results[:4], results[4:], strict=True):
        np.testing.assert_allclose(replayed, eager, rtol=1e-3, atol=0)
    assert [result[2] for result in results[:4]] == [0.0, 0.0, 1.0, 0.0]


def test_fp32_weights_learn_as_with_pytorchs_optimizer() -> None:
    tokens = torch.randint(257, (1, 4, 64), generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    losses = []
    for build in (build_optimizer, build_fused_optimizer):
        model = build_model(model_config("llama3-tiny"), unfused_attention, "cuda", seed=0)
        own = {"split": False, "sum_in_fp32": True} if build is build_fused_optimizer else {}
        optimizer = build(model, 1e-3, 0.1, **own)
        for _ in range(5):
            result = train_step(
                model, optimizer, tokens, tokens.roll(-1, -1), 256, dtype=torch.float32, gradient_clip=1.0, limits=OPEN
            )
            losses.append(result[0].item())
    np.testing.assert_allclose(losses[5:], losses[:5], rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama3-tiny"])
def test_runs_agree_within_bfloat16(
    tmp_path: Path, name: str, numbers: Callable[[Path], list[tuple[float, ...]]]
) -> None:
    """The baseline, and all that stands in docs/operators.md together, but for compilation."""
    ways = {
        "baseline": {},
        "split": {"master_weights": "split", "flash": True},
        "all": {"master_weights": "split", "flash": True, "fused_operators": True, "recompute": "selective"},
    }
    for way, settings in ways.items():
        train(
            TrainConfig(
                model=name, data_directory=str(tmp_path / "data"), num_iteration=20, dtype="bfloat16", device="cuda",
                tensorboard=False, log_json=str(tmp_path / way), cuda_graph=True, **settings,
            )
        )  # fmt: skip
    baseline = np.array(numbers(tmp_path / "baseline"))
    for way in ("split", "all"):
        np.testing.assert_allclose(np.array(numbers(tmp_path / way))[:, 1], baseline[:, 1], rtol=0, atol=3e-2)


def test_compiled_layers_can_be_captured(tmp_path: Path, numbers: Callable[[Path], list[tuple[float, ...]]]) -> None:
    for compiled in (False, True):
        train(
            TrainConfig(
                model="gpt2-tiny", model_overrides={"n_layer": 2}, data_directory=str(tmp_path / "data"), num_iteration=10,
                dtype="bfloat16", device="cuda", tensorboard=False, log_json=str(tmp_path / str(compiled)), cuda_graph=True,
                master_weights="split", flash=True, fused_operators=True, compile=compiled, sample_every=5, text_length=8,
            )
        )  # fmt: skip
    plain, compiled_run = (np.array(numbers(tmp_path / str(on))) for on in (False, True))
    np.testing.assert_allclose(compiled_run[:, 1], plain[:, 1], rtol=0, atol=2e-2)


def test_a_memory_budget_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str], read_events) -> None:
    """One that all fits into, then four fifths of what that took; trying changes nothing of the run."""
    common = {
        "model": "gpt2-tiny", "data_directory": str(tmp_path / "data"), "num_iteration": 3, "dtype": "bfloat16", "device": "cuda",
        "tensorboard": False, "flash": True, "fused_operators": True, "batch_size": 64, "sequence_length": 512,
    }  # fmt: skip
    losses, budget = [], 10.0
    for number in range(2):
        log = tmp_path / f"{number}.jsonl"
        train(TrainConfig(**common, memory_budget=budget, log_json=str(log)))
        steps = read_events(log, "step")
        losses.append([step["train_loss"] for step in steps])
        assert steps[-1]["peak_used_bytes"] <= 1.1 * budget * 1e9  # the capture has a cuBLAS workspace of its own
        assert ("recompute: none" in capsys.readouterr().out) == (number == 0)
        budget = 0.8 * steps[-1]["peak_used_bytes"] / 1e9
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)
    with pytest.raises(ValueError, match=r"memory_budget is 0.001 GB"):
        train(TrainConfig(**common, memory_budget=0.001))
