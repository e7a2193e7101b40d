"""On a GPU: flash and baseline train alike in bfloat16, a step waits once, skipping and resuming work there too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tileflash.models import build_model, model_config, unfused_attention
from tileflash.train import TrainConfig, TrainingOutOfMemoryError, train
from tileflash.train.data_source import StepBatch
from tileflash.train.graph import CapturedStep
from tileflash.train.optimizer import build_optimizer
from tileflash.train.step import Limits, train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch sees"),
]


def config(tmp_path: Path, **changes: object) -> TrainConfig:
    settings = {
        "model": "gpt2-tiny",
        "data_directory": str(tmp_path / "data"),
        "num_iteration": 5,
        "dtype": "bfloat16",
        "device": "cuda",
        "tensorboard": False,
    }
    return TrainConfig(**{**settings, **changes})


@pytest.mark.parametrize("model", ["gpt2-tiny", "llama3-tiny"])
def test_flash_and_baseline_agree_within_bfloat16(tmp_path: Path, model: str, numbers) -> None:
    for name, flash in (("baseline", False), ("flash", True)):
        train(config(tmp_path, model=model, flash=flash, log_json=str(tmp_path / name)))
    baseline, flash = (np.array(numbers(tmp_path / name)) for name in ("baseline", "flash"))
    assert len(baseline) == 5
    np.testing.assert_allclose(flash[:, 1], baseline[:, 1], rtol=0, atol=2e-2)


def test_a_step_waits_for_the_gpu_only_when_its_result_is_read() -> None:
    model = build_model(model_config("gpt2-tiny"), attention=unfused_attention, device="cuda", seed=0)
    optimizer = build_optimizer(model, 1e-3, 0.1)
    tokens = torch.randint(257, (2, 4, 64), device="cuda")

    def step(limits: Limits) -> torch.Tensor:
        return train_step(model, optimizer, tokens, tokens, 512, dtype=torch.bfloat16, gradient_clip=1.0, limits=limits)

    opened = Limits(3e38, 3e38)
    step(opened).tolist()  # the first makes the optimizer's state
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = step(opened)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        skipped = step(Limits(0.0, 3e38))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.tolist()[2] == 0.0
    assert skipped.tolist()[2] == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_resuming_deterministically_gives_the_same_bits(tmp_path: Path, numbers) -> None:
    whole = config(tmp_path, deterministic=True, num_iteration=8, output=str(tmp_path / "whole"), save_every=4)
    train(whole)
    train(replace(whole, load=str(tmp_path / "whole" / "checkpoint_step_000004"), output=str(tmp_path / "part")))
    assert numbers(tmp_path / "part" / "log.jsonl") == numbers(tmp_path / "whole" / "log.jsonl")[4:]


def test_a_checkpoint_of_the_gpu_goes_on_on_the_cpu(tmp_path: Path) -> None:
    train(config(tmp_path, output=str(tmp_path / "gpu")))
    result = train(config(tmp_path, load=str(tmp_path / "gpu"), device="cpu", dtype="float32", num_iteration=6))
    assert (result.status, result.step) == ("finished", 6)


def test_a_real_out_of_memory_is_told(tmp_path: Path) -> None:
    with pytest.raises(TrainingOutOfMemoryError, match=r"(?s)more were asked for; this run holds .* --batch-size"):
        train(config(tmp_path, batch_size=2**9, sequence_length=800, model_overrides={"n_head": 128}))


@pytest.mark.parametrize("model", ["gpt2-tiny", "llama3-tiny"])
@pytest.mark.parametrize("flash", [False, True])
def test_a_captured_step_trains_as_an_eager_one_does(tmp_path: Path, model: str, flash: bool, numbers) -> None:
    settings = {"model": model, "flash": flash, "dtype": "float32", "num_iteration": 8, "total_batch_size": 512}
    for name, captured in (("eager", False), ("graph", True)):
        train(config(tmp_path, **settings, cuda_graph=captured, warmup_iterations=3, log_json=str(tmp_path / name)))
        assert json.loads((tmp_path / name).read_text().splitlines()[0])["cuda_graph"] is captured
    eager, graph = (np.array(numbers(tmp_path / name)) for name in ("eager", "graph"))
    assert len(graph) == 8
    np.testing.assert_allclose(graph, eager, rtol=1e-4, atol=1e-6)


def test_capturing_changes_nothing_and_a_replay_skips_on_the_device() -> None:
    model = build_model(model_config("gpt2-tiny"), attention=unfused_attention, device="cuda", seed=0)
    optimizer = build_optimizer(model, 1e-3, 0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def batch(seed: int) -> StepBatch:
        tokens = torch.randint(257, (2, 4, 64), generator=torch.Generator().manual_seed(seed)).cuda()
        return StepBatch(tokens, tokens.roll(-1, -1), 512)

    step = CapturedStep(model, optimizer, batch(0), dtype=torch.bfloat16, gradient_clip=1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(state["step"].item() == 0 for state in optimizer.state.values())
    losses = [step(batch(seed), 1e-3, Limits(0.0, 3e38)).tolist() for seed in (1, 2, 1)]
    assert [skipped for _, _, skipped in losses] == [1.0, 1.0, 1.0]
    assert losses[0] == losses[2] != losses[1]  # the data of each replay is its own
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    applied = step(batch(1), 1e-3, Limits(3e38, 3e38)).tolist()
    assert applied[2] == 0.0
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_captured_run_resumes_with_the_same_bits(tmp_path: Path, numbers) -> None:
    whole = config(
        tmp_path,
        deterministic=True,
        cuda_graph=True,
        flash=True,
        num_iteration=8,
        output=str(tmp_path / "whole"),
        save_every=4,
    )
    train(whole)
    train(replace(whole, load=str(tmp_path / "whole" / "checkpoint_step_000004"), output=str(tmp_path / "part")))
    assert numbers(tmp_path / "part" / "log.jsonl") == numbers(tmp_path / "whole" / "log.jsonl")[4:]


def test_capturing_needs_no_more_memory(tmp_path: Path) -> None:
    peaks = []
    for captured in (False, True):
        torch._C._cuda_clearCublasWorkspaces()  # earlier tests' streams have some, the default stream among them
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        train(config(tmp_path, cuda_graph=captured, batch_size=16, sequence_length=512))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 1.05 * peaks[0]
