"""`tileflash report`: the ledger's figures as tables, printed or written into Markdown files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tileflash.cli.errors import friendly_errors


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
    language: Annotated[str | None, typer.Option(help="en or zh.", show_default="zh for *.zh-CN.md, else en")] = None,
) -> None:
    """Tables from the ledger, newest run of each GPU. Without --write they are printed.

    Example: tileflash report --write README.md --write README.zh-CN.md
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
