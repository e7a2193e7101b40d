"""The report in both forms and both languages, from results with every kind of end."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console

from tileflash.compare import plots
from tileflash.compare.console import show_end
from tileflash.compare.figures import Comparison
from tileflash.compare.plan import BASELINE, FLASH, CompareConfig, Run, Setting
from tileflash.compare.report import Findings, build_report
from tileflash.compare.report_html import to_html
from tileflash.compare.report_markdown import to_markdown
from tileflash.compare.results import Outcome, RunResult
from tileflash.compare.texts import texts
from tileflash.train import TrainConfig
from tileflash.train.setup import prepare_setup

VOID = {"meta", "br", "hr", "img", "link", "input"}
LANGUAGES = ("en", "zh")


class Checker(HTMLParser):
    """Every tag closed in order, every id once, every reference to an id that is there; collects what a test asks."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: set[str] = set()
        self.text: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self._look(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._look(attrs)

    def _look(self, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            value = value or ""
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "srcset", "action", "data", "poster"):
                (self.references.add(value[1:]) if value.startswith("#") else self.addresses.append(value))
            self.references.update(re.findall(r"url\(#([^)]+)\)", value))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)


@pytest.fixture
def findings(make_result: Callable[..., RunResult]) -> Callable[..., Findings]:
    """gpt2 at 64 (faster), 256 (flash failed once), 1024 (baseline out of memory), 4096 (both), 8192 (not run)."""

    def make(language: str = "en", **changes: object) -> Findings:
        settings: dict[str, object] = {
            "lengths": (64, 256, 1024, 4096, 8192), "repeats": 2, "num_iteration": 4, "cuda_graph": True,
        }  # fmt: skip
        config = CompareConfig(models=("gpt2",), language=language, **{**settings, **changes})  # type: ignore[arg-type]
        by_length = {s.sequence_length: s for s in config.length_settings("gpt2")}
        public = config.public_settings()
        results = []
        for setting in {*public, by_length[64]}:
            for repeat in (1, 2):
                results.append(
                    make_result(setting, BASELINE, repeat, (99.0, *[20.0 + repeat] * (setting.num_iteration - 1)))
                )
                results.append(
                    make_result(setting, FLASH, repeat, (99.0, *[10.0 + repeat] * (setting.num_iteration - 1)))
                )
        results += [make_result(by_length[256], BASELINE), make_result(by_length[256], FLASH)]
        results.append(make_result(by_length[256], FLASH, 2, outcome=Outcome.FAILED, exit_status=1))
        results.append(make_result(by_length[1024], BASELINE, outcome=Outcome.OUT_OF_MEMORY, exit_status=3))
        results.append(make_result(by_length[1024], FLASH))
        results += [make_result(by_length[4096], s, outcome=Outcome.OUT_OF_MEMORY) for s in (BASELINE, FLASH)]
        return Findings(config, {result.run: result for result in results}, 24)

    return make


@pytest.mark.parametrize("language", LANGUAGES)
def test_html_is_well_formed_and_needs_nothing_else(findings: Callable[..., Findings], language: str) -> None:
    html = to_html(build_report(findings(language)))
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    assert len(checker.ids) == len(set(checker.ids)), "the plots' ids must not collide"
    assert checker.references <= set(checker.ids)
    assert checker.references, "matplotlib's markers are referred to by id"
    assert checker.addresses == [], "no address of anything outside"
    assert not re.search(r"https?:|//\w|@import|@font-face|<script|<link", html)
    assert re.findall(r"url\((?!#)", html) == []
    assert checker.tags.count("svg") == 5  # time, memory, speed-up, and the losses of two settings
    assert f'<html lang="{"zh-CN" if language == "zh" else "en"}">' in html


def test_the_html_page_has_both_colour_schemes_print_and_a_phone_width(findings: Callable[..., Findings]) -> None:
    html = to_html(build_report(findings()))
    for needed in ("prefers-color-scheme: dark", "@media print", "width=device-width", "max-width: 40rem"):
        assert needed in html
    svg = html[html.index("<svg") : html.index("</main>")]
    for colour in (plots.INK, plots.GRID, *plots.COLOURS.values()):
        assert colour not in svg, "a fixed colour cannot be read on both a light and a dark page"
    assert "var(--baseline)" in svg
    assert "var(--flash)" in svg


def test_what_comes_from_outside_is_escaped(findings: Callable[..., Findings]) -> None:
    found = findings()
    for result in found.results.values():
        assert result.environment is not None
        result.environment["gpu"] = "<script>alert('&')</script>"
    html = to_html(build_report(found))
    assert "<script" not in html
    assert "&lt;script&gt;" in html


@pytest.mark.parametrize("language", LANGUAGES)
def test_both_forms_hold_all_the_parts(findings: Callable[..., Findings], language: str) -> None:
    document = build_report(findings(language))
    markdown, html = to_markdown(document), to_html(document)
    # Environment, command, public figures, out of memory, the failed run's last words.
    shared = ("Some GPU", "tileflash compare gpt2 --batch-size 4", "119.71", "26552", "-59.67 %", "OOM", "last words")
    for form in (markdown, html):
        for needed in (*shared, "baseline OOM", "1.8"):
            assert needed in form
    assert "{" not in markdown, "a placeholder was left unfilled"
    for plot in document.plots():
        assert f"](plots/{plot.name}.svg)" in markdown


def test_markdown_tables_have_as_many_cells_in_each_row(findings: Callable[..., Findings]) -> None:
    markdown = to_markdown(build_report(findings()))
    tables = re.findall(r"(?:^\|.*\|\n?)+", markdown, flags=re.MULTILINE)
    assert len(tables) == 4  # the public setting, the public report's figures, by length, losses
    for table in tables:
        assert len({line.count("|") for line in table.strip().splitlines()}) == 1


def test_the_figures_in_the_table(findings: Callable[..., Findings]) -> None:
    """Steps of 21 and 22 ms against 11 and 12 ms: ratios 21/11 = 1.91 and 22/12 = 1.83, their median 1.87."""
    lines = to_markdown(build_report(findings())).splitlines()
    rows = [line for line in lines if line.startswith("| gpt2 | ") and line.count("|") == 10]
    assert rows == [
        "| gpt2 | baseline | 21.50 (21.00 – 22.00) | 21.50 (21.00 – 22.00) | 11,913 (11,636 – 12,190) | 100.0 |  |  |  |",
        "| gpt2 | flash | 11.50 (11.00 – 12.00) | 11.50 (11.00 – 12.00) | 22,303 (21,333 – 23,273) | 100.0 "
        "| 1.87x (1.83x – 1.91x) | +87.1 % (+83.3 % – +90.9 %) | 0.0 % |",
    ]


@pytest.mark.parametrize(("stopped", "told"), [("interrupted", "it was interrupted"), ("budget", "budget of 90 s")])
def test_an_incomplete_comparison_says_so(findings: Callable[..., Findings], stopped: str, told: str) -> None:
    found = findings(budget_seconds=90.0)
    markdown = to_markdown(build_report(Findings(found.config, found.results, 24, stopped)))
    assert f"of 24 planned runs are in this report: {told}" in re.sub(r"its time ", "", markdown)


def test_a_report_of_nothing(findings: Callable[..., Findings]) -> None:
    found = findings()
    document = build_report(Findings(found.config, {}, 24, "interrupted"))
    assert "Nothing could be compared" in to_markdown(document)
    checker = Checker()
    checker.feed(to_html(document))
    assert checker.open == []
    assert document.plots() == []


def test_environments_that_differ_are_told(findings: Callable[..., Findings]) -> None:
    found = findings()
    first = next(iter(found.results.values()))
    assert first.environment is not None
    first.environment["torch"] = "2.13"
    assert "(torch differ)" in to_markdown(build_report(found))


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


def test_a_cpu_is_not_called_a_gpu(findings: Callable[..., Findings]) -> None:
    found = findings(public_setting=False)
    for result in found.results.values():
        assert result.environment is not None
        result.environment.update(gpu=None, cpu="Some CPU")
    markdown = to_markdown(build_report(found))
    assert "none: measured on the CPU" in markdown
    assert "largest resident memory of the whole process" in markdown
    assert "Measured on a CPU" in markdown
    assert "A100" not in markdown, "the public figures are context for its own setting only"


def test_settings_that_differ_in_more_than_length_are_told_apart(findings: Callable[..., Findings]) -> None:
    markdown = to_markdown(build_report(findings(dtype="float32")))
    assert "64 (batch 4, bfloat16, 10 steps)" in markdown
    assert "64 (batch 4, float32, 4 steps)" in markdown


@pytest.fixture
def by_length(make_comparison: Callable[..., Comparison]) -> list[Comparison]:
    return [
        make_comparison([10.0, 12.0], [9.0, 9.5], length=64),
        make_comparison("oom", [20.0], length=256),
        make_comparison([50.0], "oom", length=512),
        make_comparison("oom", "oom", length=1024),
        make_comparison([], [], length=2048),
    ]


@pytest.mark.parametrize("draw", [plots.step_time, plots.peak_memory, plots.speedup])
def test_plots_are_xml_without_addresses_and_mark_out_of_memory(
    by_length: list[Comparison], draw: Callable[[list[Comparison]], str]
) -> None:
    svg = draw(by_length)
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert re.findall(r"https?://[^\"]*", svg) == ["http://www.w3.org/2000/svg"], "the name space, nothing else"
    words = " ".join(ElementTree.fromstring(svg).itertext())
    # Lines mark each scheme by itself; a pair of bars has one place for both.
    assert words.count("OOM") == (3 if draw is plots.speedup else 4)
    assert draw(by_length) == svg, "the same figures make the same file"


def test_the_loss_plot_names_the_largest_difference(make_comparison: Callable[..., Comparison]) -> None:
    svg = plots.losses(make_comparison([1.0], [1.0], losses=((5.0, 4.0, 3.0, 2.0), (5.0, 4.25, 3.0, 2.0))))
    assert "largest for its loss: 2.5e-01 at step 2 (expected: 5.0e-02)" in " ".join(
        ElementTree.fromstring(svg).itertext()
    )


@pytest.mark.parametrize("value", [float("nan"), 0.0])
def test_plots_bear_losses_that_are_not_finite(make_comparison: Callable[..., Comparison], value: float) -> None:
    svg = plots.losses(make_comparison([1.0], [1.0], losses=((value,) * 4, (value,) * 4)))
    assert ElementTree.fromstring(svg).tag.endswith("svg")


def test_a_run_is_named_by_all_that_tells_it_apart() -> None:
    settings = [Setting("gpt2", 4, 64, 10, "bfloat16"), Setting("gpt2", 4, 64, 10, "float32")]
    names = {
        Run(setting, scheme, repeat).name for setting in settings for scheme in (BASELINE, FLASH) for repeat in (1, 2)
    }
    assert len(names) == 8
