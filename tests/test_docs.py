"""The documentation says what is so: links lead somewhere, commands parse, tables are the ledger's."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from tileflash.bench.ledger import read
from tileflash.bench.tables import BLOCKS, fill, language_of
from tileflash.cli import app

ROOT = Path(__file__).parents[1]
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]
PAGES = [*READMES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
# typer brings click's classes along or takes click's own, by its version; either way this is click's UsageError.
USAGE_ERROR = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")

_FENCE = re.compile(r"^(```+)[^\n]*\n(.*?)^\1\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+\s+(.*)$", re.MULTILINE)
_ABSOLUTE = re.compile(r"[a-z]+:")


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = _HEADING.findall(_FENCE.sub("", text))
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path, text: str) -> list[str]:
    """The relative links of a page that lead nowhere: no such file, or no such heading in it."""
    broken = []
    for link in _LINK.findall(re.sub(r"`[^`\n]*`", "", _FENCE.sub("", text))):
        if _ABSOLUTE.match(link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name) if name else page
        if not target.exists():
            broken.append(f"{link}: there is no {target}")
        elif anchor and anchor not in anchors(text if target == page else target.read_text(encoding="utf-8")):
            broken.append(f"{link}: {target} has no such heading")
    return broken


def commands(text: str) -> Iterator[list[str]]:
    """The `tileflash` and `make` commands of the fenced blocks, as words."""
    for _, block in _FENCE.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            line = line.strip().removeprefix("$ ")
            if re.match(r"(\.venv/bin/)?(tileflash|make)( |$)|python3? -m tileflash ", line):
                line = re.sub(r"^(\.venv/bin/|python3? -m )", "", line)
                yield shlex.split(line, comments=True)


def complaint(words: list[str]) -> str:
    """What is wrong with a command, in words; empty when it could be run. Nothing is run."""
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        wrong = [word for word in words[1:] if "=" not in word and word not in targets]
        return f"there is no target {wrong[0]}" if wrong else ""
    command, arguments = typer.main.get_command(app), words[1:]
    while hasattr(command, "commands"):
        name = arguments.pop(0) if arguments else ""
        if name not in command.commands:
            return f"there is no command {name!r}"
        command = command.commands[name]
    try:
        command.make_context(words[0], arguments)
    except USAGE_ERROR as error:
        return str(error)
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page, page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist_with_their_flags(page: Path) -> None:
    wrong = {" ".join(words): complaint(words) for words in commands(page.read_text(encoding="utf-8"))}
    assert {command: said for command, said in wrong.items() if said} == {}


@pytest.mark.parametrize("page", READMES, ids=lambda page: page.name)
def test_the_readmes_show_commands_and_the_tables_of_the_ledger(page: Path) -> None:
    """The other tests would pass on a page without any."""
    text = page.read_text(encoding="utf-8")
    assert {words[1] for words in commands(text) if words[0] == "make"} >= {"demo", "test", "gpu-test"}
    shown = {words[1] for words in commands(text) if words[0] == "tileflash"}
    assert shown >= {"train", "compare", "data", "bench", "report", "weights"}
    _, stale = fill(text, read(ROOT / "benchmarks" / "results"), language_of(page), page.name)
    assert stale == [], f"run: tileflash report --write {page.name}"


def test_the_page_of_figures_has_every_table_of_the_ledger() -> None:
    page = ROOT / "docs" / "performance.md"
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"tileflash:table (\S+)", text)) == set(BLOCKS)
    assert fill(text, read(ROOT / "benchmarks" / "results"), "en", page.name)[1] == [], (
        f"run: tileflash report --write {page}"
    )


def test_checks_look_for_stale_tables() -> None:
    (check,) = re.findall(r"tileflash report (.*--check)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    for page in PAGES:
        if "<!-- tileflash:table " in page.read_text(encoding="utf-8") and page.name != "benchmarks.md":
            assert f"--write {page.relative_to(ROOT)}" in check


def test_both_readmes_show_the_same_commands() -> None:
    english, chinese = ([*commands(page.read_text(encoding="utf-8"))] for page in READMES)
    assert english == chinese


def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# One heading, `two`\n")
    text = (
        "# Here\n[a](other.md) [b](other.md#one-heading-two) [c](#here) [d](https://example.org/x)\n"
        "[e](gone.md) [f](other.md#gone) [g](#gone) `[h](code.md)`\n```\n[i](fenced.md)\n```\n"
    )
    page.write_text(text)
    assert [link.split(":")[0] for link in broken_links(page, text)] == ["gone.md", "other.md#gone", "#gone"]
    block = "```sh\n$ tileflash train gpt2 \\\n    --flsh   # comment\ntileflash trian\nmake demo\nmake dmeo\nls\n```\n"
    found = list(commands(block))
    assert found == [
        ["tileflash", "train", "gpt2", "--flsh"],
        ["tileflash", "trian"],
        ["make", "demo"],
        ["make", "dmeo"],
    ]
    assert [bool(complaint(words)) for words in found] == [True, True, False, True]
    assert complaint(["tileflash", "data", "prepare", "a.txt"])  # --output is required
    assert complaint(["tileflash", "train", "gpt2", "--batch-size", "four"])
    assert complaint(["tileflash", "data"])
    assert not complaint(["tileflash", "train", "gpt2", "--flash", "--batch-size", "4"])
