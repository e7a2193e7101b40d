"""`tileflash report`: the ledger's figures as tables, printed or written into Markdown files, or as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tileflash.cli.errors import friendly_errors

if TYPE_CHECKING:
    from tileflash.bench.ledger import Line


@friendly_errors
def report(
    write: Annotated[
        list[Path] | None, typer.Option(help="Markdown file whose blocks to fill; may be given several times.")
    ] = None,
    results: Annotated[Path, typer.Option(help="The ledger: a file or a directory of *.jsonl.")] = Path(
        "benchmarks/results"
    ),
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 when a file is stale.")] = False,
    audited: Annotated[
        bool, typer.Option("--audit", help="Say what is wrong with the ledger's figures; exit 1 when anything is.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(help="Write one HTML page that needs nothing else: plots, sortable tables, the audit."),
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="An older ledger: what became faster or slower beyond the noise.")
    ] = None,
    language: Annotated[str | None, typer.Option(help="en or zh.", show_default="zh for *.zh-CN.md, else en")] = None,
) -> None:
    """Tables from the ledger, newest run of each GPU. Without --write they are printed.

    Example: tileflash report --write README.md --write README.zh-CN.md
    A page to look at: tileflash report --html report.html --against old-results/
    In a Markdown file a table stands between <!-- tileflash:table NAME --> and <!-- tileflash:end -->.
    """
    from tileflash.bench.audit import audit
    from tileflash.bench.ledger import read
    from tileflash.bench.tables import BLOCKS, fill, language_of, render
    from tileflash.files import written_aside

    lines = read(results)
    if audited:
        complaints = audit(lines).complaints()
        typer.echo("\n".join(complaints) or "nothing is wrong", err=bool(complaints))
        raise typer.Exit(int(bool(complaints)))
    if html is not None or against is not None:
        _page(lines, html, against)
        return
    if not write:
        for name in BLOCKS:
            typer.echo(f"## {name}\n\n{render(name, lines, language or 'en')}\n")
        return
    any_stale = False
    for path in write:
        text = path.read_bytes().decode("utf-8")
        filled, stale = fill(text, lines, language or language_of(path), str(path))
        if check:
            any_stale |= bool(stale)
            state = f"stale: {', '.join(stale)}; run `tileflash report --write {path}`" if stale else "up to date"
            typer.echo(f"{path}: {state}", err=bool(stale))
        elif stale:
            with written_aside(path) as (aside,):
                aside.write_bytes(filled.encode("utf-8"))
            typer.echo(f"{path}: filled {', '.join(stale)}")
        else:
            typer.echo(f"{path}: up to date")
    if any_stale:
        raise typer.Exit(1)


def _page(lines: Sequence[Line], html: Path | None, older: Path | None) -> None:
    from tileflash.bench.audit import audit
    from tileflash.bench.ledger import read
    from tileflash.files import written_aside
    from tileflash.report.against import against
    from tileflash.report.page import build_page

    changes = None if older is None else against(audit(read(older)).lines, audit(lines).lines)
    if changes is not None:
        typer.echo(changes.markdown())
    if html is not None:
        text = build_page(lines, changes)
        html.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(html) as (aside,):
            aside.write_text(text, encoding="utf-8")
        typer.echo(f"wrote {html}")
