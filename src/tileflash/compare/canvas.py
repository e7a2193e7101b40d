"""What the plots of all reports share: drawn by matplotlib without its global state, as SVG text whose colours a page may choose."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A plot is drawn for a light page; `recolour` lets a page with its own colours take over.
INK, GRID = "#1f2430", "#d9dde5"
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tileflash",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "legend.frameon": False,
}


def recolour(svg: str, colours: Mapping[str, str]) -> str:
    """Replace colours (keys such as `INK` and `GRID`) by any CSS colour, for a page that has a dark mode."""
    return re.sub("|".join(map(re.escape, colours)), lambda match: colours[match.group()], svg)


def length_axis(axes: Axes, lengths: list[int]) -> None:
    """A logarithmic axis with a tick at every sequence length."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    # Half an octave of room, so that a single length stands in the middle of an axis.
    axes.set_xlim(min(lengths) / 1.5, max(lengths) * 1.5)
    axes.set_xlabel("sequence length")


def styled() -> Any:
    """A context in which figures are drawn in the reports' style; matplotlib's global state is as before after it."""
    import matplotlib

    return matplotlib.rc_context(_STYLE)


def new_figure(width_inches: float) -> Figure:
    """A figure without axes."""
    from matplotlib.figure import Figure

    # Narrow, so that 10 pt text is still readable when the plot is as wide as a phone.
    return Figure(figsize=(width_inches, 3.5), layout="constrained")


def with_axes() -> tuple[Figure, Axes]:
    """A figure with one pair of axes and a grid."""
    figure = new_figure(4.2)
    axes = figure.subplots()
    axes.grid(True, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def svg_of(figure: Figure, name: str) -> str:
    """The figure as an SVG element: ids begin with `name`, so that several fit into one page; no XML head, no links."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg.replace("xlink:href=", "href=").replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "")
    prefix = re.sub(r"[^A-Za-z0-9_-]", "-", name)
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = svg.replace('href="#', f'href="#{prefix}-').replace("url(#", f"url(#{prefix}-")
    return svg.strip() + "\n"
