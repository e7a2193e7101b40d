"""What a report consists of: plain blocks that the Markdown and the HTML writer each put into their own form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Heading:
    level: int
    text: str


@dataclass(frozen=True)
class Paragraph:
    """`kind`: "" (plain), "lead" (the conclusion), "note" (small print) or "warning"."""

    text: str
    kind: str = ""


@dataclass(frozen=True)
class Bullets:
    items: tuple[str, ...]


@dataclass(frozen=True)
class Code:
    text: str


@dataclass(frozen=True)
class Cell:
    """`spread` stands beside the figure in small print. `mark`: "" or "good", "bad", "oom", "missing"."""

    text: str
    spread: str = ""
    mark: str = ""


@dataclass(frozen=True)
class Table:
    """`numeric` columns are aligned right. `group_starts`: indices of the rows that begin a group (a model)."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    numeric: frozenset[int] = frozenset()
    group_starts: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Facts:
    """Names and values, as a two-column list."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Plot:
    """`name` is a file name without suffix; `caption` says what is drawn; `svg` is one SVG element."""

    name: str
    caption: str
    svg: str


@dataclass(frozen=True)
class Plots:
    plots: tuple[Plot, ...]


Block: TypeAlias = Heading | Paragraph | Bullets | Code | Table | Facts | Plots


@dataclass(frozen=True)
class Document:
    title: str
    subtitle: str
    language: str
    blocks: tuple[Block, ...]

    def plots(self) -> list[Plot]:
        return [plot for block in self.blocks if isinstance(block, Plots) for plot in block.plots]
