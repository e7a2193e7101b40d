"""A flagged line's figure is never shown as if it were sound: marks, legends and words, in both kinds of tables."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from support.lines import attention_lines, train_lines
from tileflash.bench import Line, flags
from tileflash.bench.flags import FLAG_WORDS
from tileflash.bench.table_words import LANGUAGES, words_for
from tileflash.bench.tables import render

# As the producers of lines know them: the constants of the module.
FLAGS = [value for name, value in vars(flags).items() if name.isupper() and isinstance(value, str)]


def _flagged(lines: list[Line], variant: str, *flags: str) -> list[Line]:
    return [replace(line, flags=flags) if line.variant == variant else line for line in lines]


def test_a_training_figure_that_is_flagged_says_so_and_so_do_its_ratios() -> None:
    lines = [
        *train_lines(seq=64),
        *_flagged(train_lines(seq=256), "flash", "losses_differ"),
        *train_lines(seq=1024, oom=True),
    ]
    block = render("train", lines, "en")
    rows = block.splitlines()
    assert "¹" not in rows[2]
    assert rows[3] == (
        "| gpt2 | 4 × 256 | 5 | 300.00 | 100.00 ¹ | 3,413 | 10,240 ¹ | 40,000 | 10,000 ¹ | 3.00x (2.45 – 3.67) ¹ | "
        "75.0 % (69.4 – 79.5) ¹ |"
    )
    assert "¹" not in rows[4]
    assert "out of memory | 100.00 |" in rows[4]
    assert rows[6].startswith("¹ losses differ (`losses_differ`): at some step the losses of both schemes")
    chinese = render("train", lines, "zh").splitlines()
    assert chinese[3].count("¹") == 5
    assert chinese[6].startswith("¹ 损失不一致（`losses_differ`）：")
    assert "显存不足 | 100.00 |" in chinese[4]


def test_a_table_without_flags_has_no_legend() -> None:
    for language in LANGUAGES:
        for name, lines in {"train": train_lines(oom=True, seq=64), "attention-forward": attention_lines()}.items():
            block = render(name, lines, language)
            assert "¹" not in block
            assert block.count("\n\n") == 2  # table, note, provenance


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_has_a_mark_and_a_legend_beside_a_figure_and_words_in_its_place(flag: str, language: str) -> None:
    """In both kinds of tables, whichever flag a line bears."""
    words = words_for(language).flags[flag]
    for name, lines, variant in (
        ("train", train_lines(), "flash"),
        ("attention-forward", attention_lines(), "tileflash-triton"),
    ):
        block = render(name, _flagged(lines, variant, flag), language)
        assert " ¹ |" in block
        assert f"\n\n¹ {words.short}" in block
        assert words.meaning in block
        assert f"`{flag}`" in block
        gone = [
            replace(line, median=None, low=None, high=None, repeats=0, flags=(flag,))
            if line.variant == variant
            else line
            for line in lines
        ]
        block = render(name, gone, language)
        assert f"| {words.short} |" in block
        assert "¹" not in block


def test_several_flags_have_a_mark_each_and_one_legend() -> None:
    lines = [
        *_flagged(train_lines(), "flash", "losses_differ", "failed"),
        *_flagged(train_lines(seq=64), "baseline", "failed"),
    ]
    rows = render("train", lines, "en").splitlines()
    # Numbered as they are met, from the upper left: the shorter sequence comes first.
    assert rows[2].startswith("| gpt2 | 4 × 64 | 5 | 300.00 ¹ | 100.00 |")
    assert rows[3].startswith("| gpt2 | 4 × 4096 | 5 | 300.00 | 100.00 ¹ ² |")
    assert rows[5].startswith("¹ failed (`failed`): ")
    assert " ² losses differ (`losses_differ`): " in rows[5]


def test_a_flag_of_another_version_is_shown_as_it_stands() -> None:
    block = render("train", _flagged(train_lines(), "flash", "too_hot"), "en")
    assert "100.00 ¹" in block
    assert "¹ `too_hot`: a flag of the ledger that this version has no words for." in block


def test_every_flag_has_words_in_every_language() -> None:
    assert FLAGS
    assert FLAG_WORDS.keys() == LANGUAGES.keys()
    for by_flag in FLAG_WORDS.values():
        assert by_flag.keys() == set(FLAGS)
        assert all(words.short and words.meaning for words in by_flag.values())


def test_flags_are_named_in_one_place() -> None:
    """Whoever writes or judges lines takes the constants: a flag that is typed anew could be one without words."""
    here = Path(flags.__file__)
    others = [path for path in (*here.parent.glob("*.py"), here.parents[1] / "compare" / "ledger.py") if path != here]
    assert len(others) > 10
    for path in others:
        assert set(re.findall(r'"([a-z_]+)"', path.read_text(encoding="utf-8"))) & set(FLAGS) == set(), path
