"""The report in both forms and both languages, from results with every kind of end."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

import pytest

from support.html import Checker
from tileflash.compare import plots
from tileflash.compare.figures import Comparison
from tileflash.compare.plan import BASELINE, FLASH, Run, Setting
from tileflash.compare.report import Findings, build_report
from tileflash.compare.report_html import to_html
from tileflash.compare.report_markdown import to_markdown

LANGUAGES = ("en", "zh")


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
