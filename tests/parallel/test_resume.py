"""A run saved in one layout goes on in any other, as if it had never stopped; in the same one bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.ranks import FLASH, Job, config, run_ranks, steps, tensors_of
from tileflash.train import train
from tileflash.train.checkpoint import checkpoints
from tileflash.train.export import load_trained

pytestmark = pytest.mark.xdist_group("ranks")

ONE = "one rank"
RANKS = {
    ONE: 1,
    "DP 2": 2,
    "TP 2": 2,
    "PP 2": 2,
    "ring 2, ZeRO 2": 2,
    "DP 4, ZeRO 3": 4,
    "DP 2, TP 2": 4,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    ONE: {},
    "DP 2": {"data_parallel": 2},
    "TP 2": {"tensor_parallel": 2},
    "PP 2": {"pipeline_parallel": 2},
    "ring 2, ZeRO 2": {"context_parallel": 2, "zero_stage": 2, **FLASH},
    "DP 4, ZeRO 3": {"data_parallel": 4, "zero_stage": 3},
    "DP 2, TP 2": {"data_parallel": 2, "tensor_parallel": 2},
}
STOP, LAST = 3, 5
# GPT-2's own vocabulary, a prime number: no two ranks have as many rows of it.
LARGE = "gpt2-50257"
LARGE_PAIRS = [("DP 2, TP 2", "DP 4, ZeRO 3"), ("DP 4, ZeRO 3", ONE), (ONE, "DP 2, TP 2")]


@pytest.fixture(scope="module")
def root(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of every layout a run without a stop, and one that stops; of every pair the second going on in another layout."""
    root = tmp_path_factory.mktemp("resumed")
    jobs: list[list[tuple[str, Job]]] = [[], []]  # those that save, those that load

    def job(name: str, layout: str, steps: int, model: str = "gpt2-odd-vocabulary", **more: Any) -> None:
        settings = {"num_iteration": steps, "final_learning_rate_fraction": 1.0, **LAYOUTS[layout], **more}
        log = str(root / f"{name}.jsonl")
        made = name, config(model, tokens, log_json=log, output=str(root / name), **settings)
        jobs["load" in more].append((layout, made))

    for layout in LAYOUTS:
        job(f"{layout}, whole", layout, LAST)
        job(layout, layout, STOP)
    for a in LAYOUTS:
        for b in LAYOUTS:
            job(f"{a} to {b}", b, LAST, load=str(root / a))
    job(f"{LARGE}, {ONE}, whole", ONE, 2, LARGE)
    for a, b in LARGE_PAIRS:
        job(f"{LARGE}, {a}", a, 1, LARGE)
        job(f"{LARGE}, {a} to {b}", b, 2, LARGE, load=str(root / f"{LARGE}, {a}"))

    torch.set_num_threads(1)
    for these in jobs:
        for layout, (_, settings) in these:
            if layout == ONE:
                train(settings)
        for world in (2, 4):
            run_ranks(world, [made for layout, made in these if RANKS[layout] == world])
    return root


@pytest.mark.parametrize("resumed", LAYOUTS)
@pytest.mark.parametrize("saved", LAYOUTS)
def test_any_layout_goes_on_in_any_other(root: Path, saved: str, resumed: str) -> None:
    whole, rest = steps(root / f"{ONE}, whole.jsonl"), steps(root / f"{saved} to {resumed}.jsonl")
    assert [event["step"] for event in rest] == list(range(STOP + 1, LAST + 1))
    for event, expected in zip(rest, whole[STOP:], strict=True):
        assert event["train_loss"] == pytest.approx(expected["train_loss"], abs=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_layout_goes_on_bit_for_bit(root: Path, layout: str) -> None:
    whole, rest = steps(root / f"{layout}, whole.jsonl"), steps(root / f"{layout} to {layout}.jsonl")
    for key in ("train_loss", "gradient_norm"):
        assert [event[key] for event in rest] == [event[key] for event in whole[STOP:]]
    expected, tensors = (tensors_of(root / f"{layout}{which}", step=LAST) for which in (", whole", f" to {layout}"))
    assert tensors.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(tensors[name], expected[name])] == []


@pytest.mark.parametrize(("saved", "resumed"), LARGE_PAIRS)
def test_a_vocabulary_that_does_not_divide_is_cut_anew(root: Path, saved: str, resumed: str) -> None:
    whole, (event,) = steps(root / f"{LARGE}, {ONE}, whole.jsonl"), steps(root / f"{LARGE}, {saved} to {resumed}.jsonl")
    assert event["train_loss"] == pytest.approx(whole[1]["train_loss"], abs=1e-5)
    assert event["gradient_norm"] == pytest.approx(whole[1]["gradient_norm"], abs=5e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_writes_about_its_share(root: Path, layout: str) -> None:
    (_, path), ranks = checkpoints(root / layout)[-1], RANKS[layout]
    sizes = [(path / "tensors" / f"__{rank}_0.distcp").stat().st_size for rank in range(ranks)]
    assert len(list((path / "tensors").glob("*.distcp"))) == ranks
    if layout != "PP 2":  # whose ranks have different layers
        # Small tensors are one rank's, and each comes with a kilobyte of PyTorch's own.
        assert max(sizes) < 1.5 * min(sizes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_model_can_be_taken_out_of_any(root: Path, layout: str) -> None:
    """As `tileflash weights convert` takes it."""
    model, _ = load_trained(root / layout, print)
    stored = tensors_of(root / layout, step=STOP)
    one = tensors_of(root / ONE, step=STOP)
    assert stored.keys() == one.keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, stored[f"model.{name}"])
        torch.testing.assert_close(parameter.detach(), one[f"model.{name}"], rtol=0, atol=2e-4)
