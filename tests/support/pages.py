"""Pages whose Python blocks are run: what they print must stand below them, in a `text` block.

`PYTHONPATH=src python tests/support/pages.py docs/tutorial.md` runs a page and writes what its blocks print.
A block with a file's name behind `python` is an excerpt of that file and is not run.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

_BLOCK = re.compile(r"^```python(?P<file>[^\n]*)\n(?P<code>.*?)^```\n(?P<output>\n```text\n(.*?)^```\n)?", re.M | re.S)


def filled(text: str, page: str = "page") -> str:
    """The page with what its blocks print, run in one namespace from top to bottom."""
    namespace: dict[str, Any] = {}

    def run(block: re.Match[str]) -> str:
        if block["file"]:
            return block[0]
        line = text.count("\n", 0, block.start()) + 1
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            # Empty lines in front, so that an error names the page's own line.
            exec(compile("\n" * line + block["code"], page, "exec"), namespace)
        output = f"\n```text\n{printed.getvalue()}```\n" if printed.getvalue() else ""
        # A block that prints nothing may stand before a drawing, which is a `text` block of its own.
        drawing = block["output"] or "" if not output else ""
        return f"```python\n{block['code']}```\n{output}{drawing}"

    return _BLOCK.sub(run, text)


def foreign_excerpts(text: str, directory: Path) -> list[str]:
    """The excerpts that do not stand in the file they name; an excerpt may be indented less than the file."""
    wrong = []
    for block in _BLOCK.finditer(text):
        if block["file"]:
            source = (directory / block["file"].strip()).read_text(encoding="utf-8")
            lines = [line.strip() for line in textwrap.dedent(block["code"]).strip().splitlines()]
            if "\n".join(lines) not in "\n".join(line.strip() for line in source.splitlines()):
                wrong.append(f"{block['file'].strip()}: {lines[0]}")
    return wrong


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        path = Path(argument)
        path.write_text(filled(path.read_text(encoding="utf-8"), argument), encoding="utf-8")
