"""What the ledger's page adds to the look of compare's report: colours of variants, sortable tables, flagged cells."""

from __future__ import annotations

from tileflash.compare.canvas import GRID, INK

# (in a plot and on a light page, on a dark page). Neighbours stand apart for every kind of colour vision; markers differ too.
SERIES: tuple[tuple[str, str], ...] = (
    ("#1d5fd1", "#78aaff"),
    ("#0b7a75", "#4fd0c7"),
    ("#c2570c", "#f0955a"),
    ("#7b3fa0", "#c99af0"),
    ("#8a6d00", "#e0c04a"),
    ("#b0255c", "#ff8bb5"),
    ("#4b5768", "#aab6c8"),
    ("#2f7d1f", "#86d672"),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
COLOURS = {INK: "var(--ink)", GRID: "var(--rule)"} | {
    light: f"var(--series-{index})" for index, (light, _) in enumerate(SERIES)
}

_LIGHT = " ".join(f"--series-{index}: {light};" for index, (light, _) in enumerate(SERIES))
_DARK = " ".join(f"--series-{index}: {dark};" for index, (_, dark) in enumerate(SERIES))
STYLE = f"""\
:root {{ {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
@media print {{ :root {{ {_LIGHT} }} }}
th[aria-sort] {{ cursor: pointer; }}
th[aria-sort]:hover, th[aria-sort]:focus-visible {{ color: var(--ink); }}
th[aria-sort="ascending"]::after {{ content: " \\2191"; }}
th[aria-sort="descending"]::after {{ content: " \\2193"; }}
@media print {{ th[aria-sort]::after {{ content: "" !important; }} }}
"""

# A page without scripts shows the same tables, in the ledger's order.
SCRIPT = """\
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const key = (row, column) => {
    const text = row.cells[column].firstChild ? row.cells[column].firstChild.textContent.trim() : "";
    const number = parseFloat(text.replace(/,/g, ""));
    return Number.isNaN(number) ? text : number;
  };
  heads.forEach((head, column) => {
    head.setAttribute("aria-sort", "none");
    head.tabIndex = 0;
    const sort = () => {
      const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      const rows = [...body.rows].map((row) => [key(row, column), row]);
      rows.sort(([a], [b]) => {
        if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;  // words (out of memory) behind figures
        return sign * (typeof a === "number" ? a - b : a.localeCompare(b));
      });
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
      body.append(...rows.map(([, row]) => row));
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(); }
    });
  });
}
"""
