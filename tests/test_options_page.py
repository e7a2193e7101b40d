"""docs/options.md prints what it says, shows every option, and its table is what the backends declare."""

from __future__ import annotations

import inspect
from pathlib import Path

import torch

import tileflash
from support.option_table import option_table, with_table
from support.pages import filled

PAGE = Path(__file__).parents[1] / "docs" / "options.md"


def test_the_page_prints_what_it_says() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count("```python\n") >= 15
    with torch.random.fork_rng(devices=[]):
        assert filled(text, str(PAGE)) == text, "run: PYTHONPATH=src python tests/support/pages.py docs/options.md"


def test_the_page_says_every_argument() -> None:
    """In an example or in a table; `generator` and the like are in docs/semantics.md."""
    text = PAGE.read_text(encoding="utf-8") + (PAGE.parent / "semantics.md").read_text(encoding="utf-8")
    for function in (tileflash.attention, tileflash.attention_varlen):
        assert [name for name in inspect.signature(function).parameters if name not in text] == []


def test_the_table_is_what_the_backends_declare() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert option_table() in text, "run: PYTHONPATH=src python tests/support/option_table.py"
    assert with_table(text) == text
    assert with_table(text.replace("| `softcap` | yes |", "| `softcap` | no |")) == text
