"""docs/tutorial.md prints what it says, quotes what is so, and its drawings are what its script draws."""

from __future__ import annotations

import re
import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from support.pages import filled, foreign_excerpts

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tutorial.md"
FIGURES = ROOT / "docs" / "figures"
TUTORIAL = ROOT / "src" / "tileflash" / "attention" / "tutorial"


def test_the_page_prints_what_it_says() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count("```python\n") >= 15
    with torch.random.fork_rng(devices=[]):
        assert filled(text, str(PAGE)) == text, "run: PYTHONPATH=src python tests/support/pages.py docs/tutorial.md"


def test_the_excerpts_are_the_source() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(re.findall(r"^```python \w", text, re.MULTILINE)) >= 3
    assert foreign_excerpts(text, TUTORIAL) == []


def test_the_drawings_are_what_the_script_draws() -> None:
    figures = runpy.run_path(str(FIGURES / "draw_tutorial.py"))["FIGURES"]
    assert sorted(figures) == sorted(path.name for path in FIGURES.glob("*.svg"))
    for file_name, draw in figures.items():
        committed = (FIGURES / file_name).read_text(encoding="utf-8")
        assert committed == draw(), "run: PYTHONPATH=src python docs/figures/draw_tutorial.py"
        ElementTree.fromstring(committed)
        assert f"(figures/{file_name})" in PAGE.read_text(encoding="utf-8")


def test_stale_output_and_foreign_excerpts_are_found(tmp_path: Path) -> None:
    page = "```python\nx = 1\n```\n\n```python\nprint(x + 1)\n```\n\n```text\n3\n```\n\n```python\nprint(x)\n```\nend\n"
    right = page.replace("3", "2").replace("print(x)\n```\n", "print(x)\n```\n\n```text\n1\n```\n")
    assert filled(page) == right
    assert filled(right) == right
    drawing = "```python\nx = 1\n```\n\n```text\na -> b\n```\n"
    assert filled(drawing) == drawing
    with pytest.raises(ZeroDivisionError):
        filled("```python\n1 / 0\n```\n")
    (tmp_path / "source.py").write_text("def f():\n    a = 1\n    b = 2\n")
    assert foreign_excerpts("```python source.py\na = 1\nb = 2\n```\n", tmp_path) == []
    assert foreign_excerpts("```python source.py\na = 1\nb = 3\n```\n", tmp_path) == ["source.py: a = 1"]
