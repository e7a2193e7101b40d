"""Layouts of several ranks: counts against true ranks, which there are, times, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from plan.true_ranks import count
from support.ranks import in_ranks
from tileflash.cli import app
from tileflash.models import model_config
from tileflash.parallel.layout import SINGLE, Layout
from tileflash.plan.count import Messages, Moment, StepCount, StepShape
from tileflash.plan.layouts import layouts_for, plan_layouts
from tileflash.plan.machine import LINK_SHARE, PRODUCT_SHARE, assumptions, machine
from tileflash.plan.predict import step_time
from tileflash.plan.tracker import Work

TINY = StepShape(
    model_config("llama3-tiny", n_layer=3, vocab_size=1000), 2, 32, micro_batches=3, dtype=torch.float32, on_gpu=False
)
H200 = machine("h200")


@pytest.mark.xdist_group("ranks")
def test_counts_are_those_of_true_ranks(tmp_path: Path) -> None:
    """The same step by two processes over gloo, with weights and messages that are there."""
    layouts = (
        Layout(data=2), Layout(data=2, zero_stage=1), Layout(data=2, zero_stage=3), Layout(tensor=2),
        Layout(tensor=2, sequence_parallel=True),
    )  # fmt: skip
    jobs = [(TINY, layout) for layout in layouts]
    in_ranks(2, count, jobs, tmp_path / "found.json")
    planned = plan_layouts(jobs, H200)
    for plan, (peak_bytes, sent) in zip(planned, json.loads((tmp_path / "found.json").read_text()), strict=True):
        assert plan.count.peak_bytes == pytest.approx(peak_bytes, rel=0.05), plan.layout.label
        assert {axis: messages.nbytes for axis, messages in plan.count.messages.items()} == sent, plan.layout.label
        assert plan.time is None  # fp32
    data, zero1, zero3, tensor, sequence = (plan.count.peak_bytes for plan in planned)
    assert zero3 < zero1 < data
    assert sequence < tensor < data


def test_which_layouts_there_are() -> None:
    shape = StepShape(model_config("llama3-tiny"), 1, 64, flash=True)
    found = list(layouts_for(shape, 4, 8, step_samples=4))
    assert all(layout.ranks == 4 for _, layout in found)
    assert all(each.batch * each.micro_batches * layout.data == 4 for each, layout in found)
    labels = {layout.label for _, layout in found}
    assert {"DP=4, TP=1, SP=1, PP=1, ZeRO=3", "DP=2, TP=2, SP=2, PP=1, ZeRO=0", "DP=1, TP=1, SP=1, PP=4"} <= labels
    assert not any(layout.context > 1 for _, layout in found)
    assert {layout.tensor for _, layout in layouts_for(shape, 4, 1, step_samples=4)} == {1}
    assert {layout.tensor for _, layout in layouts_for(shape, 8, 8, step_samples=8)} == {1, 2}  # it has 2 heads of keys
    long = replace(shape, length=16384)
    assert any(layout.context == 4 for _, layout in layouts_for(long, 4, 8, step_samples=4))
    assert not any(layout.context > 1 for _, layout in layouts_for(replace(long, flash=False), 4, 8, step_samples=4))


def _count(messages: dict[str, Messages]) -> StepCount:
    work = Work(product_flops=H200.gpu.bf16_tflops * 1e12 * PRODUCT_SHARE)  # a second
    return StepCount({"early": Moment({"activations": 1}, {})}, work, messages)


def test_times_by_hand() -> None:
    """Computing takes a second; a message of one second's bytes is hidden behind what it can overlap with."""
    second = Messages(H200.link_gb_per_s * LINK_SHARE * 1e9, 0)
    shape = StepShape(model_config("llama3-tiny", n_layer=4), 1, 64, micro_batches=4)

    def of(layout: Layout, axis: str) -> Any:
        return step_time(_count({axis: second}), shape, layout, H200)

    assert of(SINGLE, "data").compute_ms == pytest.approx(1000)
    # Whole gradients can hide behind the last backward pass alone, gathered weights behind everything but one layer of five.
    assert of(Layout(data=8), "data").waiting_ms["data"] == pytest.approx(1000 - 1000 * 2 / 3 / 4)
    assert of(Layout(data=8, zero_stage=3), "data").waiting_ms["data"] == pytest.approx(1000 / 5)
    assert of(Layout(tensor=8), "tensor").total_ms == pytest.approx(2000)
    # 16 data ranks on two hosts: eight networks of 50 GB/s are not slower than one link of 450; with 8 tensor ranks each has one.
    assert of(Layout(data=16, zero_stage=3), "data").waiting_ms["data"] == pytest.approx(
        1000 * max(450 / 400 - 1, 450 / 400 / 5)
    )
    crossing = of(Layout(data=2, tensor=8), "data").waiting_ms["data"]
    assert crossing == pytest.approx(1000 * (450 / 50 - 2 / 3 / 4))
    idle = step_time(_count({}), shape, Layout(pipeline=4), H200)
    assert idle.idle_ms == pytest.approx(1000 * 3 / 4)
    assert 0 < idle.waiting_ms["pipeline"] < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "k80"], "`--gpu` was 'k80'; it must be one of b200, h200-nvl, h200"),
        (["--world", "0"], "`--world` was 0"),
        (["--world", "4", "--data-parallel", "2"], "it must be the number of ranks, 4"),
        (["--world", "3", "--total-batch-size", "256"], "no layout of so many ranks"),
        (["--tensor-parallel", "8"], "tensor_parallel is 8: it must divide n_head"),
        (
            ["--pipeline-parallel", "2", "--pipeline-schedule", "zb", "--total-batch-size", "1024"],
            "the plan knows gpipe and 1f1b",
        ),
        (["--flash", "--context-parallel", "2", "--context-parallel-kind", "ulysses"], "the plan knows ring"),
        (["--data-parallel", "2", "--fused-operators"], "fused operators are for one rank"),
        (["--memory-gib", "0"], "`--memory-gib` was 0.0"),
        (["--init-from", "weights"], "init_from is set: a plan reads no weights"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["plan", "llama3-tiny", *arguments])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    assert message in result.stderr


def test_one_device_by_the_command(tmp_path: Path) -> None:
    settings = tmp_path / "run.toml"
    settings.write_text('model = "llama3-tiny"\nflash = true\nsequence-length = 128\n')
    result = CliRunner().invoke(app, ["plan", str(settings), "--batch-size", "2"])
    assert result.exit_code == 0, result.output
    assert "a step of 256 tokens, DP=1" in result.stdout
    for word in (
        "parameters",
        "optimizer",
        "logits",
        "workspace",
        "peak",
        "fits H200",
        "ms a step",
        "fitted to one H200",
    ):
        assert word in result.stdout
    small = CliRunner().invoke(app, ["plan", str(settings), "--memory-gib", "0.7", "--json"])
    assert small.exit_code == 1
    (record,) = json.loads(small.stdout)["plans"]
    assert record["fits"] is False
    assert record["peak_bytes"] == sum(record["parts_bytes"].values())
    assert record["tokens_per_s"] == pytest.approx(record["step_tokens"] / record["step_ms"] * 1e3)
    assert assumptions(machine("a100"), ranks=1)[0].startswith("A100: 76%")


def test_a_block_of_a_page_is_filled(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- tileflash:plan -->\nold\n<!-- tileflash:end -->\nafter\n")
    result = CliRunner().invoke(app, ["plan", "gpt2-tiny", "--write", str(page)])
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert text.startswith("before\n<!-- tileflash:plan -->\ngpt2-tiny: ")
    assert text.endswith("<!-- tileflash:end -->\nafter\n")
    assert "| peak | " in text
    assert "old" not in text
    page.write_text("no block\n")
    assert "holds no block" in CliRunner().invoke(app, ["plan", "gpt2-tiny", "--write", str(page)]).stderr


@pytest.mark.xdist_group("ranks")
def test_the_documented_table_is_what_is_planned_now() -> None:
    """Its first row anew, and of all rows the step and the order."""
    text = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text(encoding="utf-8")
    block = text.partition("<!-- tileflash:plan -->")[2].partition("<!-- tileflash:end -->")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines() if line.startswith("|")
    ][2:]
    assert [row[0] for row in rows] == [gpus for gpus in ("8", "64", "256", "1,024") for _ in range(3)]
    assert all(int(row[1].replace(",", "")) == 4096 * int(row[0].replace(",", "")) for row in rows)
    assert "(assumed)" in block
    assert "--world 8,64,256,1024" in block
    values = dict(pair.split("=") for pair in rows[0][2].split(", "))
    layout = Layout(
        int(values["DP"]), int(values["TP"]), values["SP"] != "1", int(values["ZeRO"]), pipeline=int(values["PP"])
    )
    shape = StepShape(model_config("llama3-8b"), 1, 4096, int(rows[0][3]), flash=True)
    (plan,) = plan_layouts([(shape, layout)], H200, by_few_layers=True)
    assert f"{plan.count.peak_bytes / 1e9:.1f}" == rows[0][4]
    assert plan.time is not None
    assert f"{plan.time.total_ms:,.0f}" == rows[0][7]


@pytest.mark.xdist_group("ranks")
def test_every_layout_of_two_ranks_by_the_command() -> None:
    """Also that many layers follow from few: all of them are counted with two layers and with three."""
    arguments = [
        "llama3-tiny",
        "--flash",
        "--world",
        "2",
        "--json",
        "--batch-size",
        "2",
        "--model-override",
        "n_layer=8",
    ]
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == 0, result.output
    plans = {record["layout"]: record for record in json.loads(result.stdout)["plans"]}
    assert len(plans) == 5
    assert {record["step_tokens"] for record in plans.values()} == {2 * 2 * 64}
    named = CliRunner().invoke(app, ["plan", *arguments, "--data-parallel", "2", "--zero-stage", "3"])
    (record,) = json.loads(named.stdout)["plans"]
    assert record["peak_bytes"] == pytest.approx(plans[record["layout"]]["peak_bytes"], rel=0.001)
    assert record["step_ms"] == pytest.approx(plans[record["layout"]]["step_ms"], rel=0.001)
