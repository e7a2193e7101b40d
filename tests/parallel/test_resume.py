"""A run saved in one layout goes on in any other, as if it had never stopped; in the same one bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.ranks import FLASH, config, run_ranks, steps, tensors_of
from tileflash.train import TrainConfig, train

pytestmark = pytest.mark.xdist_group("ranks")

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "DP 2, ZeRO 1": {"data_parallel": 2, "zero_stage": 1},
    "TP 2": {"tensor_parallel": 2},
    "DP 2, ZeRO 3": {"data_parallel": 2, "zero_stage": 3},
    "PP 2": {"pipeline_parallel": 2},
    "ring 2, ZeRO 2": {"context_parallel": 2, "zero_stage": 2, **FLASH},
}
STOP, LAST = 4, 8


@pytest.fixture(scope="module")
def root(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of every layout a run without a stop, and one that stops; of every pair the second going on in another layout."""
    root = tmp_path_factory.mktemp("resumed")

    def job(name: str, layout: str, steps: int, **more: Any) -> tuple[str, TrainConfig]:
        settings = {"num_iteration": steps, "final_learning_rate_fraction": 1.0, **LAYOUTS[layout], **more}
        log = str(root / f"{name}.jsonl")
        return layout, config("gpt2-odd-vocabulary", tokens, log_json=log, output=str(root / name), **settings)

    jobs = [job(f"{layout}, whole", layout, LAST) for layout in LAYOUTS]
    jobs += [job(layout, layout, STOP) for layout in LAYOUTS]
    jobs += [job(f"{a} to {b}", b, LAST, load=str(root / a)) for a in LAYOUTS for b in LAYOUTS]

    def alone(these: list[tuple[str, TrainConfig]]) -> None:
        for layout, settings in these:
            if layout == "one rank":
                train(settings)

    torch.set_num_threads(1)
    alone(jobs[: 2 * len(LAYOUTS)])
    run_ranks(2, [(name, settings) for name, settings in jobs if name != "one rank"])
    alone(jobs[2 * len(LAYOUTS) :])
    return root


@pytest.mark.parametrize("resumed", LAYOUTS)
@pytest.mark.parametrize("saved", LAYOUTS)
def test_any_layout_goes_on_in_any_other(root: Path, saved: str, resumed: str) -> None:
    whole, rest = steps(root / "one rank, whole.jsonl"), steps(root / f"{saved} to {resumed}.jsonl")
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
