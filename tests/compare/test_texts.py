from __future__ import annotations

import re
import string
from pathlib import Path

import pytest

import tileflash.compare
from tileflash.compare.prose import PROSE
from tileflash.compare.texts import TEXTS, texts

ALL = {**TEXTS, **PROSE}
CHINESE = re.compile("[\u4e00-\u9fff]")


def _placeholders(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}


def test_no_key_is_given_twice() -> None:
    assert not TEXTS.keys() & PROSE.keys()


def test_both_languages_have_the_same_keys() -> None:
    assert texts("en").entries.keys() == texts("zh").entries.keys() == ALL.keys()


@pytest.mark.parametrize("key", ALL)
def test_both_languages_have_the_same_placeholders(key: str) -> None:
    english, chinese = ALL[key]
    assert english.strip()
    assert chinese.strip()
    assert _placeholders(english) == _placeholders(chinese)
    assert not CHINESE.search(english)


def test_chinese_is_chinese() -> None:
    """Short names (CUDA, OOM, tok/s) are the same in both; everything that is a sentence is not."""
    assert [key for key, (_, chinese) in ALL.items() if len(chinese) > 14 and not CHINESE.search(chinese)] == []


def test_every_text_is_used() -> None:
    """A key nobody asks for is a sentence that was meant to be said."""
    sources = [
        p.read_text() for p in Path(tileflash.compare.__file__).parent.glob("*.py") if p.stem not in ("texts", "prose")
    ]
    code = "\n".join(sources)
    parts = {"column", "row", "define", "plot", "reason", "oom", "cell"}  # asked for as f"{part}.{name}"
    unused = [
        key
        for key in ALL
        if f'"{key}"' not in code and not (key.split(".")[0] in parts and f'"{key.split(".")[-1]}"' in code)
    ]
    assert [
        key for key in unused if key not in ("oom.baseline", "oom.flash", "cell.baseline_oom", "cell.flash_oom")
    ] == []


def test_an_unknown_language_is_told() -> None:
    with pytest.raises(ValueError, match="language is 'de'; must be one of en, zh"):
        texts("de")
