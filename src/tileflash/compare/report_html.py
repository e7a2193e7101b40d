"""A document as one HTML file that needs nothing else: style and plots inline, for phone, desk and print."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from types import MappingProxyType

from tileflash.compare.document import (
    Block,
    Bullets,
    Cell,
    Code,
    Document,
    Facts,
    Heading,
    Paragraph,
    Plot,
    Plots,
    Table,
)
from tileflash.compare.plan import BASELINE, FLASH
from tileflash.compare.plots import COLOURS, GRID, INK, recolour
from tileflash.compare.style import STYLE

_LANGUAGE_TAGS = {"en": "en", "zh": "zh-CN"}
_PAGE_COLOURS = {
    INK: "var(--ink)",
    GRID: "var(--rule)",
    COLOURS[BASELINE]: "var(--baseline)",
    COLOURS[FLASH]: "var(--flash)",
}


def to_html(
    document: Document, colours: Mapping[str, str] = MappingProxyType(_PAGE_COLOURS), style: str = "", script: str = ""
) -> str:
    """The whole report as an HTML page. `colours`: what the plots' colours become; `style` and `script` are added to the page."""
    body = "\n".join(_block(block, colours) for block in document.blocks)
    code = f"<script>\n{script}</script>\n" if script else ""
    return f"""<!doctype html>
<html lang="{_LANGUAGE_TAGS[document.language]}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(document.title)}</title>
<style>
{STYLE}{style}</style>
</head>
<body>
<main>
<header>
<h1>{escape(document.title)}</h1>
<p class="subtitle">{escape(document.subtitle)}</p>
</header>
{body}
</main>
{code}</body>
</html>
"""


def _block(block: Block, colours: Mapping[str, str]) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{escape(block.text)}</h{block.level}>"
    if isinstance(block, Paragraph):
        return f"<p{_class(block.kind)}>{_prose(block.text)}</p>"
    if isinstance(block, Bullets):
        return f"<ul>{''.join(f'<li>{_prose(item)}</li>' for item in block.items)}</ul>"
    if isinstance(block, Code):
        return f'<pre tabindex="0"><code>{escape(block.text)}</code></pre>'
    if isinstance(block, Facts):
        pairs = "".join(f"<div><dt>{escape(n)}</dt><dd>{escape(v)}</dd></div>" for n, v in block.pairs)
        return f"<dl>{pairs}</dl>"
    if isinstance(block, Plots):
        # Three in a row where that leaves no hole, else two.
        columns = "three" if len(block.plots) % 3 == 0 else "two"
        return f'<div class="plots {columns}">{"".join(_plot(plot, colours) for plot in block.plots)}</div>'
    return _table(block)


def _prose(text: str) -> str:
    """Escaped, with flags (`--flash`) kept in one piece: a browser may break a line after a hyphen."""
    return re.sub(r"--[a-z][a-z-]*", lambda match: f'<span class="flag">{match.group()}</span>', escape(text))


def _plot(plot: Plot, colours: Mapping[str, str]) -> str:
    svg = recolour(plot.svg, colours)
    # In a page an inline SVG needs no namespace, and without it the page holds no address at all.
    svg = svg.replace(' xmlns="http://www.w3.org/2000/svg"', "", 1)
    label = escape(plot.caption, quote=True)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    return f"<figure>{svg}<figcaption>{escape(plot.caption)}</figcaption></figure>"


def _table(table: Table) -> str:
    classes = ["number" if index in table.numeric else "" for index in range(len(table.columns))]
    head = "".join(f'<th scope="col"{_class(c)}>{escape(n)}</th>' for n, c in zip(table.columns, classes, strict=True))
    rows = []
    for index, row in enumerate(table.rows):
        cells = "".join(_cell(cell, kind) for cell, kind in zip(row, classes, strict=True))
        rows.append(f"<tr{_class('group' if index in table.group_starts else '')}>{cells}</tr>")
    # tabindex: a region that scrolls must be reachable by the keyboard.
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _cell(cell: Cell, kind: str) -> str:
    spread = f"<small>{escape(cell.spread)}</small>" if cell.spread else ""
    return f"<td{_class(f'{kind} {cell.mark}'.strip())}>{escape(cell.text)}{spread}</td>"


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""
