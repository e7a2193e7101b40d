"""What a report says of how it was measured: as the runs logged it, in its own language."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from tileflash.compare.console import show_end
from tileflash.compare.plan import BASELINE, FLASH
from tileflash.compare.report import Findings, build_report
from tileflash.compare.report_html import to_html
from tileflash.compare.report_markdown import to_markdown
from tileflash.compare.texts import texts
from tileflash.train import TrainConfig
from tileflash.train.setup import prepare_setup

LANGUAGES = ("en", "zh")
GRAPH_WORDS = {
    "en": ("yes: each step of both schemes is one CUDA graph", "no: the host starts each operation", "the runs differ"),
    "zh": ("是：两种方案的每一步均为一个 CUDA graph", "否：一步中的每个操作由主机逐一启动", "各次运行不一致"),
}


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize(("logged", "told"), [({True}, 0), ({False}, 1), ({True, False}, 2), (set(), None)])
def test_whether_steps_were_cuda_graphs_is_what_the_runs_logged(
    findings: Callable[..., Findings], language: str, logged: set[bool], told: int | None
) -> None:
    found = findings(language)
    for number, (run, result) in enumerate(found.results.items()):
        values = [None] if not logged else sorted(logged)
        found.results[run] = replace(result, cuda_graph=values[number % len(values)])
    words = GRAPH_WORDS[language]
    expected = [] if told is None else [words[told]]
    for form in (to_markdown(build_report(found)), to_html(build_report(found))):
        assert [each for each in words if each in form] == expected
    shown = io.StringIO()
    show_end(Console(file=shown, width=200), found, "", [])
    assert [each for each in words if each in shown.getvalue()] == expected


@pytest.mark.parametrize(("captured", "key", "other"), [(True, "short", "short_host"), (False, "short_host", "short")])
def test_what_sequence_64_cannot_show_depends_on_the_graph(
    findings: Callable[..., Findings], captured: bool, key: str, other: str
) -> None:
    for language in LANGUAGES:
        found = findings(language)
        found.results.update({run: replace(r, cuda_graph=captured) for run, r in found.results.items()})
        markdown = to_markdown(build_report(found))
        assert texts(language)(f"caveat.{key}") in markdown
        assert texts(language)(f"caveat.{other}") not in markdown


@pytest.mark.parametrize("language", LANGUAGES)
def test_what_computes_attention_is_said_in_the_reports_language(
    findings: Callable[..., Findings], language: str
) -> None:
    found = findings(language)
    unfused = prepare_setup(TrainConfig(model="gpt2-tiny", device="cpu")).attention_name
    logged = {BASELINE: unfused, FLASH: "tileflash.attention: triton"}
    found.results.update({run: replace(r, attention=logged[run.scheme]) for run, r in found.results.items()})
    markdown = to_markdown(build_report(found))
    assert (unfused in markdown) == (language == "en")
    assert ("未融合的小算子链" in markdown) == (language == "zh")
    assert "tileflash.attention: triton" in markdown


def test_the_command_that_repeats_the_report_makes_it_in_its_language(findings: Callable[..., Findings]) -> None:
    for language in LANGUAGES:
        line = next(li for li in to_markdown(build_report(findings(language))).splitlines() if li.startswith("tilefl"))
        assert line.endswith(f" --language {language}")
        assert " --cuda-graph " in line
