"""A document as Markdown; plots are linked as SVG files that lie in `plots/` beside it."""

from __future__ import annotations

from tileflash.compare.document import Block, Bullets, Cell, Code, Document, Facts, Heading, Paragraph, Plots, Table


def to_markdown(document: Document) -> str:
    """The whole report as GitHub-flavoured Markdown."""
    parts = [f"# {document.title}", document.subtitle, *(_block(block) for block in document.blocks)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _block(block: Block) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {block.text}"
    if isinstance(block, Paragraph):
        return f"> {block.text}" if block.kind in ("lead", "warning") else block.text
    if isinstance(block, Bullets):
        return "\n".join(f"- {item}" for item in block.items)
    if isinstance(block, Code):
        return f"```\n{block.text}\n```"
    if isinstance(block, Facts):
        return "\n".join(f"- {name}: {value}" for name, value in block.pairs)
    if isinstance(block, Plots):
        return "\n\n".join(f"![{plot.caption}](plots/{plot.name}.svg)" for plot in block.plots)
    return _table(block)


def _table(table: Table) -> str:
    rule = ["---:" if index in table.numeric else "---" for index in range(len(table.columns))]
    lines = [_row(list(table.columns)), _row(rule)]
    lines += [_row([_cell(cell) for cell in row]) for row in table.rows]
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell) -> str:
    text = f"{cell.text} ({cell.spread})" if cell.spread else cell.text
    return text.replace("|", "\\|")
