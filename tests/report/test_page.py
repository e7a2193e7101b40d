"""The ledger's page: well formed, self-contained, with all the parts; in a real browser where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.html import Checker
from support.lines import H200, attention_lines, train_lines
from tileflash.bench import Line, Statistic, append
from tileflash.cli import app
from tileflash.compare.canvas import GRID, INK
from tileflash.report.against import against
from tileflash.report.look import SERIES
from tileflash.report.page import build_page


def _lines() -> list[Line]:
    lines = [*attention_lines(), *train_lines(seq=64), *train_lines(seq=128, oom=True)]
    for seq in (16, 32):
        case = {
            "pass": "forward",
            "batch": 1,
            "seq": seq,
            "heads": 1,
            "head_dim": 8,
            "mask": "full",
            "dtype": "bfloat16",
        }
        for variant, scale in (("math", seq), ("tileflash-auto", 1)):
            peak = 1e6 * seq * scale
            lines.append(H200.line("memory", case, variant, "peak_bytes", Statistic(peak, peak, peak, 1)))
    case = {"suite": "attention", "reasons": "software power cap in 3 of 9 looks"}
    lines.append(H200.line("device", case, "gpu", "sm_clock_mhz", Statistic(1700, 1500, 1980, 9)))
    for metric, value in (("matmul_tflops", 790), ("copy_gb_per_s", 4300)):
        lines.append(H200.line("device", {"suite": "attention"}, "gpu", metric, Statistic(value, value, value, 3)))
    spoiled = replace(lines[1], median=4.0, low=3.9, high=4.1)  # a speed-up that the two times do not allow
    return [lines[0], spoiled, *lines[2:]]


@pytest.fixture(scope="module")
def page() -> str:
    lines = _lines()
    older = [
        replace(line, median=line.median * 2, low=line.low * 2, high=line.high * 2)
        if line.metric == "step_ms" and line.median
        else line
        for line in lines
    ]  # type: ignore[operator]
    return build_page(lines, against(older, lines))


def test_well_formed_and_needs_nothing_else(page: str) -> None:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    assert len(checker.ids) == len(set(checker.ids))
    assert checker.references <= set(checker.ids)
    assert checker.addresses == []
    assert not re.search(r"https?:|//\w|@import|@font-face|<script src|<link", page.replace("</script>", ""))
    # speed-up, roofline, TFLOP/s; memory; step time and peak memory of the one model
    assert checker.tags.count("svg") == 6
    assert checker.tags.count("script") == 1


def test_all_the_parts(page: str) -> None:
    for needed in (
        "NVIDIA H200, attention, speed relative to fa2 (geometric means). Forward: tileflash-triton 2.00x.",
        "contradiction: attention, tileflash-triton, forward", "software power cap in 3 of 9 looks", "1,700 (1,500 – 1,980)",
        "abc1234", "product and copy, measured", "<code>tileflash bench attention --head-dims 128", 
        "<code>tileflash compare gpt2 --lengths 64,128",
        "out of memory", "Of 17 figures that both ledgers have", "3 became better", 'class="number bad"',
        "prefers-color-scheme: dark", "@media print", "width=device-width", "aria-sort",
    ):  # fmt: skip
        assert needed in page, needed


def test_no_fixed_colour_in_a_plot(page: str) -> None:
    drawn = page[page.index("<svg") : page.rindex("</svg>")]
    for colour in (INK, GRID, *(light for light, _ in SERIES)):
        assert colour not in drawn
    assert "var(--series-0)" in drawn


def test_a_figure_that_cannot_be_true_is_not_drawn() -> None:
    from tileflash.report.drawings import plots_of

    lines = [replace(line, flags=("faster_than_limit",)) for line in attention_lines()]
    assert plots_of(lines) == []


def test_plots_of_the_suites_at_one_batch_and_of_generation() -> None:
    from tileflash.report.drawings import plots_of

    lines = []
    for seq in (512, 1024):
        case = {"direction": "forward", "batch": 1, "seq": seq}
        lines += [
            H200.line("scaling", case, "math", "time_ms", Statistic(seq, seq, seq, 3)),
            H200.line("scaling", case, "math", "peak_bytes", Statistic(seq, seq, seq, 1)),
            H200.line("scaling", case, "fa3", "time_ms", None, flags=("unsupported",)),
            H200.line(
                "generation", {"model": "m", "batch": 1, "seq": seq}, "flash", "tokens_per_s", Statistic(9, 9, 9, 3)
            ),
        ]
    names = [plot.name for plot in plots_of(lines)]
    assert names == ["scaling-time_ms-forward", "scaling-peak_bytes-forward", "generation"]


def test_the_command(tmp_path: Path) -> None:
    append(tmp_path / "new.jsonl", [line for line in train_lines() if line.metric == "step_ms"])
    old = [replace(line, median=1e3, low=1e3, high=1e3) for line in train_lines() if line.metric == "step_ms"]
    append(tmp_path / "old.jsonl", old)
    arguments = ["report", "--results", str(tmp_path / "new.jsonl"), "--against", str(tmp_path / "old.jsonl")]
    result = CliRunner().invoke(app, [*arguments, "--html", str(tmp_path / "out" / "page.html")])
    assert result.exit_code == 0, result.output
    assert (
        "| train: flash, gpt2 batch=4 seq=4096 bfloat16, step_ms | better | 1,000 (1,000 – 1,000) | 100 (90 – 110) | 10.000x |"
        in result.stdout
    )
    assert (tmp_path / "out" / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    (tmp_path / "empty.jsonl").touch()
    result = CliRunner().invoke(
        app, ["report", "--results", str(tmp_path / "empty.jsonl"), "--html", str(tmp_path / "x.html")]
    )
    assert (result.exit_code, "holds no lines" in result.stderr) == (2, True)


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
# Sorts the first table by its third column as a user would, and leaves what was seen in the page's title and body.
PROBE = """<script>
const table = document.querySelector("table"), head = table.tHead.rows[0].cells[2];
const column = () => [...table.tBodies[0].rows].map((row) => row.cells[2].textContent);
head.click(); const up = column(); head.click(); const down = column();
document.body.dataset.probe = JSON.stringify({ up, down, sort: head.getAttribute("aria-sort"),
  wide: document.documentElement.scrollWidth > window.innerWidth });
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_in_a_browser(page: str, tmp_path: Path) -> None:
    path, shot = tmp_path / "page.html", tmp_path / "phone.png"
    path.write_text(page.replace("</body>", PROBE), encoding="utf-8")
    common = [
        str(CHROMIUM),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=600,900",
    ]
    dom = subprocess.run(
        [*common, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    probe = re.search(r'data-probe="([^"]*)"', dom)
    assert probe is not None
    seen = probe.group(1).replace("&quot;", '"')
    assert '"sort":"descending"' in seen
    assert '"wide":false' in seen, "the page itself must not scroll sideways"
    up, down = (re.search(rf'"{name}":\[(.*?)\]', seen).group(1).split('","') for name in ("up", "down"))  # type: ignore[union-attr]
    assert [text.strip('"') for text in up] == [text.strip('"') for text in reversed(down)]
    subprocess.run([*common, f"--screenshot={shot}", path.as_uri()], capture_output=True, timeout=120, check=True)
    from matplotlib.image import imread

    pixels = imread(shot)
    assert pixels.shape[:2] == (900, 600)
    assert pixels.std() > 0.05, "a blank page"
