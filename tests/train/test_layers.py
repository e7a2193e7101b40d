"""Runs with split masters, recomputed and compiled layers: the losses of the baseline, exact resuming, less kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tileflash
from tileflash.models import build_model, model_config, unfused_attention
from tileflash.parallel.layout import Layout
from tileflash.train import TrainConfig, train
from tileflash.train.data_source import StepBatch
from tileflash.train.fused import FUSED, fused_loss
from tileflash.train.layers import Recomputation
from tileflash.train.masters import widen_stream
from tileflash.train.optimizer import build_fused_optimizer
from tileflash.train.setup import prepare_setup
from tileflash.train.step import forward_backward
from tileflash.train.trainer import Trainer

Make = Callable[..., TrainConfig]
LLAMA = {
    "vocab_size": 257,
    "n_layer": 1,
    "n_head": 2,
    "n_kv_head": 1,
    "n_embd": 32,
    "intermediate_size": 48,
    "max_sequence_length": 32,
}


@pytest.mark.parametrize("model", ["gpt2-tiny", "llama3-tiny"])
@pytest.mark.parametrize(
    "settings",
    [
        {"master_weights": "split"},
        {"master_weights": "split", "fused_operators": True, "total_batch_size": 64},
        {"fused_operators": True},
        {"master_weights": "split", "gradient_dtype": "bfloat16", "total_batch_size": 64},
        {"recompute": "selective"},
        {"master_weights": "split", "fused_operators": True, "recompute": "full"},
    ],
)
def test_losses_of_twenty_steps_are_the_baselines_within_bfloat16(
    tmp_path: Path, tiny: Make, numbers, model: str, settings: dict[str, object]
) -> None:
    sizes = {"model": model, **({"model_overrides": LLAMA} if model == "llama3-tiny" else {})}
    common = {**sizes, "num_iteration": 20, "dtype": "bfloat16", "total_batch_size": settings.get("total_batch_size")}
    train(tiny(**common, log_json=str(tmp_path / "baseline")))
    train(tiny(**{**common, **settings}, log_json=str(tmp_path / "other")))
    baseline, other = (np.array(numbers(tmp_path / name)) for name in ("baseline", "other"))
    assert baseline[-3:, 1].mean() < baseline[:3, 1].mean() - 0.3  # it learns
    np.testing.assert_allclose(other[:, 1], baseline[:, 1], rtol=0, atol=3e-2)


@pytest.mark.parametrize("fused", [False, True])
def test_a_resumed_run_with_split_masters_has_the_same_bits(tmp_path: Path, tiny: Make, numbers, fused: bool) -> None:
    settings = {"dtype": "bfloat16", "master_weights": "split", "fused_operators": fused}
    train(tiny(**settings, log_json=str(tmp_path / "whole")))
    settings |= {"output": str(tmp_path / "run"), "save_every": 3, "keep": 5}
    train(tiny(**settings, num_iteration=6, final_learning_rate_fraction=0.1))
    train(
        tiny(**settings | {"output": str(tmp_path / "second")}, load=str(tmp_path / "run" / "checkpoint_step_000003"))
    )
    whole, second = numbers(tmp_path / "whole"), numbers(tmp_path / "second" / "log.jsonl")
    assert second == whole[3:]


def test_a_checkpoint_holds_whole_masters(tmp_path: Path, tiny: Make, numbers) -> None:
    """It says nothing of how a run kept them: the run goes on with fp32 weights, and back."""
    run = {"dtype": "bfloat16", "output": str(tmp_path / "run")}
    train(tiny(**run, num_iteration=2, master_weights="split"))
    train(tiny(**run, num_iteration=4, resume=True))
    train(tiny(**run, num_iteration=6, resume=True, master_weights="split"))
    train(tiny(dtype="bfloat16", log_json=str(tmp_path / "baseline")))
    mixed, baseline = (np.array(numbers(path)) for path in (tmp_path / "run" / "log.jsonl", tmp_path / "baseline"))
    assert len(mixed) == 6
    np.testing.assert_allclose(mixed[:2, 1], baseline[:2, 1], rtol=0, atol=3e-2)


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama3-tiny"])
@pytest.mark.parametrize("fused", [False, True])
def test_recomputation_keeps_less_and_gives_the_same_gradients(name: str, fused: bool) -> None:
    tokens = torch.randint(257, (1, 2, 16), generator=torch.Generator().manual_seed(0))
    gradients, kept = [], []
    for kind in ("none", "selective", "full"):
        config = model_config(name, n_layer=2)
        attention = functools.partial(tileflash.attention, backend="reference")
        operators = {"operators": FUSED} if fused else {}
        model = build_model(config, attention, seed=0, **operators)
        Recomputation(model, kind)
        sizes: dict[int, int] = {}

        def note(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            forward_backward(model, tokens, tokens.roll(-1, -1), 32, torch.bfloat16, fused_loss)
        kept.append(sum(sizes.values()))
        gradients.append([parameter.grad for parameter in model.parameters()])
    for other in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], other, strict=True))
    assert kept[2] < kept[0]


def test_bf16_weights_ask_for_no_casts_of_weights() -> None:
    """Autocast over fp32 weights copies each in every step; over bf16 weights it must not."""
    model = build_model(model_config("gpt2-tiny", n_layer=2), unfused_attention, seed=0, operators=FUSED)
    build_fused_optimizer(model, 1e-3, 0.1, split=True, sum_in_fp32=True)
    widen_stream(model)
    tokens = torch.randint(257, (1, 2, 16), generator=torch.Generator().manual_seed(0))
    matrices = {parameter.numel() for parameter in model.parameters() if parameter.dim() == 2}
    copied: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, arguments=(), options=None):  # type: ignore[no-untyped-def]
            if operator is torch.ops.aten._to_copy.default:
                copied.append(arguments[0].numel())
            return operator(*arguments, **(options or {}))

    with Watch():
        forward_backward(model, tokens, tokens.roll(-1, -1), 32, torch.bfloat16, fused_loss)
    head = model.embedding.weight.numel()
    assert not (matrices - {head}) & set(copied)


def test_settings_that_do_not_go_together_are_refused(tiny: Make) -> None:
    with pytest.raises(ValueError, match="master_weights is split and dtype float32"):
        tiny(master_weights="split", dtype="float32")
    with pytest.raises(
        ValueError, match=r"master_weights is split and the computation is in torch.float32 on cpu: add --dtype"
    ):
        prepare_setup(tiny(master_weights="split"))
    with pytest.raises(ValueError, match="gradient_dtype is bfloat16 and master_weights float32"):
        tiny(gradient_dtype="bfloat16")
    with pytest.raises(ValueError, match="compile is set and recompute is selective"):
        tiny(compile=True, recompute="selective")
    for settings, told in (
        ({"master_weights": "split", "dtype": "bfloat16"}, "master_weights is split and there are 2 ranks"),
        ({"compile": True}, "compile is set and there are 2 ranks"),
        ({"recompute": "full"}, "recompute is full and there are 2 ranks"),
    ):
        with pytest.raises(ValueError, match=told):
            prepare_setup(tiny(**settings), Layout(data=2))
    with pytest.raises(ValueError, match='recompute is "some"'):
        Recomputation(build_model(model_config("gpt2-tiny"), device="meta"), "some")


@pytest.mark.xdist_group("compile")
def test_compiled_layers_train_alike(
    tmp_path: Path, tiny: Make, token_file: Path, numbers, read_events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fused operators and split masters; validation and samples of text go past the compiler."""
    common = {
        "dtype": "bfloat16", "master_weights": "split", "fused_operators": True, "num_iteration": 4, "input_val_bin": str(token_file),
        "val_loss_every": 2, "sample_every": 4, "tokenizer": "bytes", "text_length": 6,
    }  # fmt: skip
    # Of the compiler all but its code generator, which takes a minute here; tests/train/test_gpu_step.py has that.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    for compiled in (False, True):
        train(tiny(**common, compile=compiled, log_json=str(tmp_path / str(compiled))))
    plain, compiled_run = (np.array(numbers(tmp_path / str(on))) for on in (False, True))
    np.testing.assert_allclose(compiled_run[:, 1], plain[:, 1], rtol=0, atol=1e-2)
    assert all("text" in event for event in read_events(tmp_path / "True", "sample"))
    assert len(read_events(tmp_path / "True", "validation")) == 2


@pytest.mark.parametrize(
    ("compiled", "needed", "chosen"),
    [
        (False, {"none": 5, "selective": 4, "full": 3}, "none"),
        (False, {"none": 6, "selective": 5, "full": 3}, "selective"),
        (False, {"none": None, "selective": 6, "full": 3}, "full"),
        (True, {"none": 6, "full": 3}, "full"),
        (False, {"none": None, "selective": 7, "full": 6}, None),
    ],
)
def test_a_memory_budget_chooses_the_least_recomputation(
    tiny: Make, monkeypatch: pytest.MonkeyPatch, compiled: bool, needed: dict[str, int | None], chosen: str | None
) -> None:
    """What steps need is made up; tests/train/test_gpu_step.py has real steps."""
    monkeypatch.setattr(torch, "compile", lambda function: function)
    config = tiny(memory_budget=5.0, compile=compiled)
    told: list[str] = []
    logs = SimpleNamespace(say=told.append, step=lambda metrics: None)
    trainer = Trainer(config, prepare_setup(replace(config, memory_budget=None)), logs, None, None)

    def step_bytes(self: Trainer, batch: StepBatch) -> int | None:
        gigabytes = needed[self.recomputation.kind]
        return None if gigabytes is None else gigabytes * 10**9

    monkeypatch.setattr(Trainer, "_step_bytes", step_bytes)
    if chosen is None:
        message = r"memory_budget is 5 GB: .*\(none more than there is, selective 7.00 GB, full 6.00 GB\)"
        with pytest.raises(ValueError, match=message):
            trainer._step(None)
        return
    for _ in range(2):
        trainer._step(None)
    assert trainer.recomputation.kind == chosen
    assert told == [f"recompute: {chosen} (a step uses {needed[chosen]}.00 of 5 GB)"]


def test_a_memory_budget_is_for_gpus_and_alone(tiny: Make) -> None:
    with pytest.raises(ValueError, match="memory_budget is set and recompute is full"):
        tiny(memory_budget=1.0, recompute="full")
    with pytest.raises(ValueError, match="memory_budget is set and the device is cpu"):
        prepare_setup(tiny(memory_budget=1.0))
