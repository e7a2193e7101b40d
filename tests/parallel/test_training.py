"""Several ranks do what one does: losses, gradients, looks, in every layout; with valid tokens spread unevenly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support.ranks import FLASH, Job, config, run_ranks, steps, tensors_of
from support.sparse_targets import AFTER_THE_FIRST, prepare
from tileflash.train import train

pytestmark = pytest.mark.xdist_group("ranks")

ONE = "one rank"
SP: dict[str, Any] = {"sequence_parallel": True}
RING: dict[str, Any] = {"context_parallel": 2, **FLASH}
ULYSSES: dict[str, Any] = {**RING, "context_parallel_kind": "ulysses"}
AT_ONCE: dict[str, Any] = {"batch_size": 8}  # one micro-batch: many ranks on few cores take long
PP: dict[str, Any] = {"pipeline_parallel": 2}
ZB: dict[str, Any] = {**PP, "pipeline_schedule": "zb"}
TWO: dict[str, dict[str, Any]] = {
    "DP 2": {"data_parallel": 2},
    **{f"DP 2, ZeRO {stage}": {"data_parallel": 2, "zero_stage": stage} for stage in (1, 2, 3)},
    "TP 2": {"tensor_parallel": 2},
    "TP 2, SP": {"tensor_parallel": 2, **SP},
    "ring 2": RING,
    "Ulysses 2, ZeRO 1": {**ULYSSES, "zero_stage": 1},
    "1F1B 2": PP,
    "GPipe 2": {**PP, "pipeline_schedule": "gpipe"},
    "interleaved 2": {**PP, "pipeline_schedule": "interleaved"},
    "zero bubble 2": ZB,
}
FOUR: dict[str, dict[str, Any]] = {
    "DP 4, ZeRO 3": {"data_parallel": 4, "zero_stage": 3},
    "TP 4, SP": {"tensor_parallel": 4, **SP, **AT_ONCE},
    "DP 2, TP 2": {"data_parallel": 2, "tensor_parallel": 2},
    "DP 2, TP 2, SP, ZeRO 3": {"data_parallel": 2, "tensor_parallel": 2, "zero_stage": 3, **SP},
    "ring 4, ZeRO 2": {**RING, "context_parallel": 4, "zero_stage": 2, **AT_ONCE},
    "DP 2, ring 2, ZeRO 3": {**RING, "data_parallel": 2, "zero_stage": 3},
    "TP 2, SP, ring 2": {**RING, "tensor_parallel": 2, **SP, **AT_ONCE},
    "TP 2, Ulysses 2": {**ULYSSES, "tensor_parallel": 2, **AT_ONCE},
    "1F1B 4": {"pipeline_parallel": 4, "batch_size": 2},
    "1F1B 2, DP 2": {**PP, "data_parallel": 2},
    "1F1B 2, TP 2, SP": {**PP, "tensor_parallel": 2, **SP},
    "zero bubble 2, DP 2, ZeRO 3": {**ZB, "data_parallel": 2, "zero_stage": 3},
    "zero bubble 2, TP 2": {**ZB, "tensor_parallel": 2},
    "zero bubble 2, ring 2": {**ZB, **RING},
}
EIGHT: dict[str, dict[str, Any]] = {
    "DP 2, TP 2, SP, ring 2, ZeRO 1": {
        **RING,
        **SP,
        "data_parallel": 2,
        "tensor_parallel": 2,
        "zero_stage": 1,
        "batch_size": 4,
    },
    "1F1B 2, TP 2, ring 2": {**PP, "tensor_parallel": 2, **RING},
}
CASES = [
    *(("gpt2", layout) for layout in ("DP 2", "DP 2, ZeRO 1", "DP 2, ZeRO 2", "DP 2, ZeRO 3", "TP 2", "TP 2, SP")),
    ("gpt2", "ring 2"),
    *(("gpt2", layout) for layout in ("DP 4, ZeRO 3", "DP 2, TP 2")),
    *(("llama3", layout) for layout in ("DP 2, ZeRO 3", "TP 2", "DP 2, TP 2, SP, ZeRO 3")),
    ("llama3", "TP 2, Ulysses 2"),
    *(("gpt2-odd-vocabulary", layout) for layout in ("DP 2, ZeRO 3", "TP 2", "TP 4, SP")),
    ("llama3-untied", "TP 2, SP"),
    *(("llama3, documents", layout) for layout in ("ring 2", "DP 2, ring 2, ZeRO 3", *EIGHT)),
    *(("gpt2, documents", layout) for layout in ("Ulysses 2, ZeRO 1", "ring 4, ZeRO 2", "TP 2, SP, ring 2")),
    *(("gpt2", layout) for layout in ("1F1B 2", "GPipe 2", "1F1B 2, DP 2")),
    *(("llama3-untied", layout) for layout in ("1F1B 2", "1F1B 2, TP 2, SP")),
    *(("gpt2-4-layers", layout) for layout in ("zero bubble 2", "1F1B 4", "zero bubble 2, DP 2, ZeRO 3")),
    ("gpt2-4-layers", "zero bubble 2, TP 2"),
    *(("llama3-5-layers, documents", layout) for layout in ("interleaved 2", "zero bubble 2, ring 2")),
]
LOOKED_AT = [
    ("gpt2", "DP 2, ZeRO 2"),
    ("gpt2-odd-vocabulary", "TP 2"),
    ("llama3", "DP 2, TP 2, SP, ZeRO 3"),
    ("llama3, documents", "DP 2, ring 2, ZeRO 3"),
    ("gpt2, documents", "Ulysses 2, ZeRO 1"),
    ("llama3-untied", "1F1B 2, TP 2, SP"),
    ("llama3-5-layers, documents", "zero bubble 2, ring 2"),
]
LOOKS: dict[str, Any] = {
    "val_loss_every": 10,
    "val_max_batches": 3,
    "sample_every": 20,
    "text_length": 11,
    "temperature": 0.0,
    "tokenizer": "bytes",
}


@pytest.fixture(scope="module")
def output(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank's and several ranks' runs: of each case a log of 20 steps, and a checkpoint after the first step."""
    root = tmp_path_factory.mktemp("ranks")

    def job(model: str, layout: str, settings: dict[str, Any]) -> Job:
        name = f"{model}, {layout}"
        looks = LOOKS | {"input_val_bin": str(tokens)} if layout == ONE or (model, layout) in LOOKED_AT else {}
        saves = {"output": str(root / name), "save_every": AFTER_THE_FIRST}
        return name, config(model, tokens, log_json=str(root / f"{name}.jsonl"), **looks, **saves, **settings)

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        prepare(0, patch)
        for model in dict(CASES):
            train(job(model, ONE, {})[1])
    for world, layouts in ((2, TWO), (4, FOUR), (8, EIGHT)):
        jobs = [job(model, layout, layouts[layout]) for model, layout in CASES if layout in layouts]
        run_ranks(world, jobs, prepare)
    return root


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_losses_and_norms_are_those_of_one_rank(output: Path, model: str, layout: str) -> None:
    one, several = (steps(output / f"{model}, {which}.jsonl") for which in (ONE, layout))
    assert [event["step"] for event in several] == list(range(1, 21))
    for key, tolerance in (("train_loss", 1e-5), ("gradient_norm", 5e-5)):
        assert [event[key] for event in several] == pytest.approx([event[key] for event in one], abs=tolerance)
    assert one[-1]["train_loss"] < one[0]["train_loss"] - 1  # equal losses that do not move would show little


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_weights_and_moments_after_one_step_are_those_of_one_rank(output: Path, model: str, layout: str) -> None:
    """The first moment after one step is a tenth of the clipped gradient."""
    one, several = (tensors_of(output / f"{model}, {which}", step=1) for which in (ONE, layout))
    assert several.keys() == one.keys()
    for name, expected in one.items():
        largest = float(expected.abs().max())
        if name.startswith("model."):
            # Adam's first step is lr * sign(gradient), wherever the gradient is no rounding error.
            moment = one[f"optimizer.{name.removeprefix('model.')}.exp_avg"].abs()
            sure = moment > 1e-4 * moment.max()
            torch.testing.assert_close(several[name][sure], expected[sure], rtol=0, atol=2e-5)
        else:
            torch.testing.assert_close(several[name], expected, rtol=0, atol=max(largest, 1e-30) * 2e-5, msg=name)


@pytest.mark.parametrize(("model", "layout"), LOOKED_AT)
def test_validation_and_samples_are_those_of_one_rank(output: Path, model: str, layout: str) -> None:
    one, several = (
        [json.loads(line) for line in (output / f"{model}, {which}.jsonl").read_text().splitlines()]
        for which in (ONE, layout)
    )
    losses = [[event["loss"] for event in events if event["event"] == "validation"] for events in (one, several)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert len(losses[0]) == 2
    texts = [[event["text"] for event in events if event["event"] == "sample"] for events in (one, several)]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 1
