"""Tables in Markdown come from the ledger alone: newest run of each GPU, both languages, and never half a block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.lines import H200, attention_lines, train_lines
from tileflash.bench.tables import BLOCKS, fill, language_of, render


def test_attention_in_short() -> None:
    lines = [*attention_lines(), *attention_lines(direction="backward", ours_ms=0.8)]
    rows = render("attention-summary", lines, "en").splitlines()
    assert rows[0] == "|  | d | tileflash-triton / fa2 |"
    assert rows[2:6] == [
        "| forward | 128 | 2.00x |",
        "| forward | all | 2.00x |",
        "| backward | 128 | 1.25x |",
        "| backward | all | 1.25x |",
    ]
    ratio = next(line for line in lines if line.metric == "speed_ratio_to_fa2")
    flagged = [replace(line, flags=("faster_than_limit",)) if line is ratio else line for line in lines]
    block = render("attention-summary", flagged, "en")
    assert "| forward | 128 | 2.00x |" in block  # the mean of the other point
    assert block.endswith(" Flagged figures that are left out: 1.")
    assert render("attention-summary", flagged, "zh").endswith("1 个带标记的数值未计入。")
    assert "left out" not in render("attention-summary", lines, "en")
    gone = [replace(line, flags=("faster_than_limit",)) for line in lines]
    assert "| forward | 128 | – |" in render("attention-summary", gone, "en")
    assert "前向" in render("attention-summary", lines, "zh")
    assert "tileflash bench attention" in render("attention-summary", [], "en")


def test_attention_rows() -> None:
    block = render("attention-forward", attention_lines(), "en")
    rows = block.splitlines()
    assert rows[0] == (
        "| d | mask | S | tileflash-triton, TFLOP/s | fa2, TFLOP/s | cudnn, TFLOP/s | tileflash-triton / fa2 | "
        "limit, TFLOP/s |"
    )
    # 4 B H S S D / 2 at S = 1024: 68.7 GFLOP in 0.5 ms and 1 ms, and 0.1 ms at the limit.
    assert rows[3] == "| 128 | causal | 1024 | 137.4 | 68.7 | unsupported | 2.00x (1.80 – 2.20) | 687.2 |"
    assert rows[2].startswith("| 128 | causal | 512 | 68.7 | 34.4 |")
    assert "Geometric mean of tileflash-triton / fa2: **2.00x** over 2 points." in block
    assert (
        "*NVIDIA H200; torch 2.11.0+cu130, driver 580.159.04; commit abc1234; 2026-12-01. Repeat it: `tileflash bench "
        "attention --head-dims 128 --lengths 512,1024 --masks causal --direction forward --variants "
        "tileflash-triton,fa2,cudnn --tokens 16384 --width 2048 --rounds 3`*"
    ) in block


def test_the_command_that_is_printed_is_understood() -> None:
    """The line `Repeat it` must be a command: its flags are those of tileflash bench attention."""
    from typer.testing import CliRunner

    from tileflash.cli import app

    line = render("attention-backward", attention_lines(direction="backward"), "en").splitlines()[-1]
    words = line.split("`")[1].split()
    assert words[0] == "tileflash"
    result = CliRunner().invoke(app, [*words[1:], "--device", "meta"])
    assert "`device` was meta" in result.stderr  # all else was understood


def test_flagged_figures_stand_out_and_are_in_no_mean() -> None:
    lines = [
        replace(line, flags=("faster_than_limit",)) if line.variant == "tileflash-triton" else line
        for line in attention_lines()
    ]
    block = render("attention-forward", lines, "en")
    assert "| 128 | causal | 1024 | 137.4 ¹ | 68.7 | unsupported | 2.00x (1.80 – 2.20) ¹ | 687.2 |" in block
    assert "\n\n¹ impossible: faster than the limit (`faster_than_limit`): the GPU cannot be so fast" in block
    assert "Geometric mean" not in block


def test_train_rows() -> None:
    block = render("train", [*train_lines(), *train_lines(seq=64, oom=True)], "en")
    rows = block.splitlines()
    assert rows[0] == (
        "| model | batch × sequence | runs | ms a step, baseline | ms a step, flash | tok/s, baseline | tok/s, flash | "
        "peak MB, baseline | peak MB, flash | speed-up | memory saving |"
    )
    assert rows[2] == (
        "| gpt2 | 4 × 64 | 5 | out of memory | 100.00 | out of memory | 2,560 | out of memory | 10,000 | – | – |"
    )
    assert rows[3] == (
        "| gpt2 | 4 × 4096 | 5 | 300.00 | 100.00 | 54,613 | 163,840 | 40,000 | 10,000 | 3.00x (2.45 – 3.67) | "
        "75.0 % (69.4 – 79.5) |"
    )
    assert "Repeat it: `tileflash compare gpt2 --lengths 64,4096 --batch-size 4 --repeats 5`*" in block


@pytest.mark.parametrize(
    ("captured", "flag", "english", "chinese"),
    [
        (
            True,
            " --cuda-graph",
            "bfloat16; each step one CUDA graph; median",
            "bfloat16；每一步均为一个 CUDA graph；各",
        ),
        (False, " --no-cuda-graph", "bfloat16; no CUDA graphs; median", "bfloat16；未使用 CUDA graph；各"),
        (None, "", "bfloat16; median", "bfloat16；各"),
    ],
)
def test_whether_steps_were_cuda_graphs_is_said_and_repeated(
    captured: bool | None, flag: str, english: str, chinese: str
) -> None:
    lines = [
        line if captured is None else replace(line, case={**line.case, "cuda_graph": captured})
        for line in train_lines()
    ]
    block = render("train", lines, "en")
    assert english in block
    assert f"--repeats 5{flag}`*" in block
    assert chinese in render("train", lines, "zh")


def test_each_row_says_how_many_runs_it_is_of() -> None:
    """A comparison cut short has measured some lengths less often; of a single run no spread is known."""
    single = [replace(line, repeats=1, low=line.median, high=line.median) for line in train_lines(seq=64)]
    uneven = [replace(line, repeats=2 if line.variant == "baseline" else 3) for line in train_lines(seq=1024)]
    rows = render("train", [*single, *uneven, *train_lines()], "en").splitlines()
    assert rows[2].startswith("| gpt2 | 4 × 64 | 1 | 300.00 |")
    assert rows[2].endswith("| 3.00x | 75.0 % |")
    assert rows[3].startswith("| gpt2 | 4 × 1024 | 2 / 3 | 300.00 |")
    assert rows[3].endswith("| 3.00x (2.45 – 3.67) | 75.0 % (69.4 – 79.5) |")
    assert rows[4].startswith("| gpt2 | 4 × 4096 | 5 | 300.00 |")


def test_newest_run_of_each_gpu() -> None:
    older = replace(H200, run="run-0", date="2026-11-30T23:59:59Z")
    a100 = replace(H200, run="run-2", date="2026-11-01T00:00:00Z", gpu="NVIDIA A100-SXM4-80GB")
    lines = [*attention_lines(ours_ms=0.5), *attention_lines(older, ours_ms=0.25), *attention_lines(a100, ours_ms=0.8)]
    block = render("attention-forward", lines, "en")
    assert block.count("| d | mask |") == 2
    assert "2.00x" in block  # the newest of the H200, though an older one was appended later
    assert "4.00x" not in block
    assert "1.25x" in block
    # A newer run without this table's lines does not empty it.
    newer = replace(H200, run="run-9", date="2026-12-31T00:00:00Z")
    assert (
        render("attention-forward", [*lines, *attention_lines(newer, "backward"), *train_lines(newer)], "en") == block
    )


def test_a_line_that_lacks_a_part_of_its_case_is_named() -> None:
    (line, *_) = attention_lines()
    broken = replace(line, case={name: value for name, value in line.case.items() if name != "seq"})
    with pytest.raises(ValueError, match="the case of a line of the suite attention has no seq"):
        render("attention-forward", [broken], "en")


def test_chinese() -> None:
    block = render("train", train_lines(), "zh")
    assert "| 模型 | 批大小 × 序列长度 |" in block
    assert "加速比" in block
    assert "复现：`tileflash compare gpt2" in block
    assert "因果" in render("attention-forward", attention_lines(), "zh")
    with pytest.raises(ValueError, match="`language` was 'fr'"):
        render("train", train_lines(), "fr")


@pytest.mark.parametrize(("name", "language"), [("README.md", "en"), ("README.zh-CN.md", "zh"), ("zh-CN.md", "en")])
def test_language_of_a_file(tmp_path: Any, name: str, language: str) -> None:
    assert language_of(tmp_path / name) == language


TEXT = (
    "# Title\n<!-- tileflash:table train -->\nold\n<!-- tileflash:end -->\nbetween\n"
    "<!-- tileflash:table attention-forward --><!-- tileflash:end -->\nend"
)


def test_fill_replaces_blocks_and_nothing_else() -> None:
    lines = [*attention_lines(), *train_lines()]
    filled, stale = fill(TEXT, lines, "en")
    assert stale == ["train", "attention-forward"]
    assert filled == (
        f"# Title\n<!-- tileflash:table train -->\n{render('train', lines, 'en')}\n<!-- tileflash:end -->\nbetween\n"
        f"<!-- tileflash:table attention-forward -->\n{render('attention-forward', lines, 'en')}\n<!-- tileflash:end -->\nend"
    )
    assert fill(filled, lines, "en") == (filled, [])
    again, stale = fill(filled, [*lines, *train_lines(replace(H200, run="x", date="2027-01-01T00:00:00Z"))], "en")
    assert stale == ["train"]
    assert "2027-01-01" in again


def test_no_measurement_says_how_to_make_one() -> None:
    for name in BLOCKS.keys() - {"features"}:  # of no ledger
        assert "*No measurement yet. Make one: `tileflash " in render(name, [], "en")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a\n<!-- tileflash:table speed -->\n<!-- tileflash:end -->",
            "R, line 2: there is no table 'speed'; the tables are att",
        ),
        ("a\n\n<!-- tileflash:end -->", "R, line 3: an end without a block"),
        (
            "<!-- tileflash:table train -->\n<!-- tileflash:table train -->",
            "R, line 2: the block 'train' before it has no end",
        ),
        ("<!-- tileflash:table train -->\n", "R: the block 'train' has no end"),
        ("nothing", "R: holds no block"),
    ],
)
def test_broken_blocks(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fill(text, train_lines(), "en", "R")
    with pytest.raises(ValueError, match="there is no table"):
        render("speed", [], "en")
