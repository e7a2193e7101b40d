"""Marks beside the figures of a table whose ledger lines are flagged, and the legend that says what they mean."""

from __future__ import annotations

from tileflash.bench.ledger import Line
from tileflash.bench.table_words import Words

_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


class Footnotes:
    """The marks of one table: a number for each flag, in the order in which flags were met."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._numbers: dict[str, int] = {}

    def marked(self, text: str, *lines: Line | None) -> str:
        """A cell's `text` with the marks of the flags of the lines that it was made from."""
        flags = {flag: None for line in lines if line is not None for flag in line.flags}
        numbers = sorted(self._numbers.setdefault(flag, len(self._numbers) + 1) for flag in flags)
        return " ".join([text, *map(_mark, numbers)])

    def legend(self) -> str:
        """One sentence for each mark; empty where there is none."""
        return " ".join(f"{_mark(number)} {self._sentence(flag)}" for flag, number in self._numbers.items())

    def _sentence(self, flag: str) -> str:
        words = self._words.flags.get(flag)
        if words is None:  # of a ledger that another version wrote: shown as it stands there
            return self._words.flag_unknown.format(flag=flag)
        return self._words.flag_note.format(flag=flag, short=words.short, meaning=words.meaning)


def _mark(number: int) -> str:
    return str(number).translate(_SUPERSCRIPTS)


def without_figure(line: Line, words: Words) -> str:
    """The cell of a line that holds no figure: why not."""
    return ", ".join(words.flags[flag].short if flag in words.flags else f"`{flag}`" for flag in line.flags)
