"""Draws the figures of docs/tutorial.md: `PYTHONPATH=src python docs/figures/draw_tutorial.py` writes the SVG files beside this one.

The order of the blocks is not typed in: the algorithms are run, and a mask writes down which block they ask for.
A test holds the files against this script.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tileflash.attention.tutorial import flash_attention_1, flash_attention_2
from tileflash.attention.tutorial.blocks import blocks, causal, visible_block

INK, PAPER, EMPTY = "#1f2430", "#ffffff", "#f1f2f4"
STAYS, LOADED, ADDED, TILE, DONE = "#ffc46b", "#a8d1ff", "#f2a0b5", "#3b5b92", "#c9d3e6"
FULL, PARTIAL, SKIPPED = "#bfe3c0", "#ffdf9e", "#e4e6ea"
BLOCKS = 4  # of queries and of keys in the drawings of loops
SHOWN = 7  # the step that is shown
CELL, SIDE, GAP = 46, 40, 6

Fill = Callable[[int], str]


@dataclass
class Drawing:
    """SVG elements on a white page, so that they can be read on a dark one."""

    width: float
    height: float
    title: str
    elements: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, fill: str, text: str = "", ink: str = INK) -> None:
        """A rectangle with a text in its middle; none where there is no `fill`."""
        if not fill:
            return
        self.elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" stroke="{INK}"'
            ' stroke-width="0.8"/>'
        )
        if text:
            self.text(x + width / 2, y + height / 2 + 4.5, text, "middle", ink)

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", ink: str = INK, size: int = 13, weight: int = 400
    ) -> None:
        self.elements.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{ink}" font-size="{size}" font-weight="{weight}">{text}</text>'
        )

    def dot(self, x: float, y: float, radius: float) -> None:
        self.elements.append(f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" fill="{INK}"/>')

    def legend(self, x: float, y: float, entries: list[tuple[str, str]], step: float = 24) -> None:
        for line, (fill, text) in enumerate(entries):
            self.box(x, y + line * step, 16, 16, fill)
            self.text(x + 24, y + line * step + 12.5, text)

    def svg(self) -> str:
        body = "\n".join(self.elements)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}"'
            f' height="{self.height:g}" font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif" role="img">\n'
            f"<title>{self.title}</title>\n"
            f'<rect width="{self.width:g}" height="{self.height:g}" rx="8" fill="{PAPER}"/>\n{body}\n</svg>\n'
        )


def name(symbol: str, number: int) -> str:
    """K and 2 make K with a small 2, "m ℓ" the two names together; blocks are counted from 1, as in the papers."""
    return "".join(part + "₀₁₂₃₄₅₆₇₈₉"[number + 1] for part in symbol.split())


def visits(run: Callable[[Any], Any]) -> list[tuple[int, int]]:
    """The blocks (i, j) in the order in which `run` asks for them; blocks are of size 1."""
    order: list[tuple[int, int]] = []

    def mask(i: Tensor, j: Tensor) -> Tensor:
        order.append((int(i[0, 0]), int(j[0, 0])))
        return j >= 0 * i

    run(mask)
    return order


def orders() -> dict[str, list[tuple[int, int]]]:
    """What the four algorithms do, by running them."""
    x = torch.ones(BLOCKS, 1)
    size: dict[str, Any] = {"B_r": 1, "B_c": 1}
    return {
        "forward 1": visits(lambda mask: flash_attention_1.forward(x, x, x, mask=mask, **size)),
        "forward 2": visits(lambda mask: flash_attention_2.forward(x, x, x, mask=mask, **size)),
        "backward 1": visits(lambda mask: flash_attention_1.backward(x, x, x, x, x, x, x, mask=mask, **size)),
        "backward 2": visits(lambda mask: flash_attention_2.backward(x, x, x, x, x, x, mask=mask, **size)),
    }


def loops(
    drawing: Drawing, x: float, y: float, title: str, subtitle: str, order: list[tuple[int, int]],
    left: list[tuple[str, Fill]], right: list[tuple[str, Fill]], top: list[tuple[str, Fill]],
) -> None:  # fmt: skip
    """One panel: the blocks of S with the step at which each is visited, and around them the blocks of the other matrices."""
    drawing.text(x, y, title, size=15, weight=600)
    drawing.text(x, y + 19, subtitle, ink="#4a5263")
    grid_x = x + len(left) * (SIDE + GAP)
    grid_y = y + 34 + len(top) * (SIDE - 6 + GAP)
    for row, (symbol, fill) in enumerate(top):
        for j in range(BLOCKS):
            at = y + 34 + row * (SIDE - 6 + GAP)
            drawing.box(grid_x + j * (CELL + 2), at, CELL, SIDE - 6, fill(j), name(symbol, j))
    for column, (symbol, fill) in enumerate(left):
        for i in range(BLOCKS):
            drawing.box(x + column * (SIDE + GAP), grid_y + i * (CELL + 2), SIDE, CELL, fill(i), name(symbol, i))
    for step, (i, j) in enumerate(order, 1):
        fill, ink = (TILE, "#ffffff") if step == SHOWN else (DONE if step < SHOWN else EMPTY, INK)
        drawing.box(grid_x + j * (CELL + 2), grid_y + i * (CELL + 2), CELL, CELL, fill, str(step), ink)
    grid_end = grid_x + BLOCKS * (CELL + 2) + GAP - 2
    for column, (symbol, fill) in enumerate(right):
        for i in range(BLOCKS):
            at = grid_end + column * (SIDE + GAP)
            drawing.box(at, grid_y + i * (CELL + 2), SIDE, CELL, fill(i), name(symbol, i))


def only(number: int, fill: str, before: str = PAPER) -> Fill:
    """One block of a matrix is on the chip; those before it may have a colour too."""
    return lambda block: fill if block == number else before if block < number else PAPER


def forward_loops() -> str:
    drawing = Drawing(900, 432, "Order of the blocks in the forward passes of FlashAttention 1 and 2")
    order = orders()["forward 1"]
    i, j = order[SHOWN - 1]
    loops(
        drawing, 20, 30, "FlashAttention 1", "for each block of K, V: all blocks of Q", order,
        [("Q", only(i, LOADED))],
        [("O", only(i, ADDED)), ("m", only(i, ADDED)), ("ℓ", only(i, ADDED))],
        [("K", only(j, STAYS)), ("V", only(j, STAYS))],
    )  # fmt: skip
    order = orders()["forward 2"]
    i, j = order[SHOWN - 1]
    loops(
        drawing, 480, 30, "FlashAttention 2", "for each block of Q: all blocks of K, V", order,
        [("Q", only(i, STAYS))],
        [("O", only(i, STAYS, DONE)), ("m ℓ", lambda block: STAYS if block == i else ""), ("L", only(i, PAPER, DONE))],
        [("K", only(j, LOADED)), ("V", only(j, LOADED))],
    )  # fmt: skip
    drawing.legend(
        20,
        352,
        [(STAYS, "stays on chip"), (LOADED, "loaded for this step"), (ADDED, "loaded, changed, stored: at each step")],
    )
    drawing.legend(
        480,
        352,
        [(TILE, "block of S and P: made on chip, never stored"), (DONE, "visited; final"), (EMPTY, "still to come")],
    )
    return drawing.svg()


def backward_loops() -> str:
    drawing = Drawing(900, 850, "Order of the blocks in the backward pass: the papers', and tileflash's two kernels")
    order = orders()["backward 2"]
    assert order == orders()["backward 1"]
    i, j = order[SHOWN - 1]
    of_keys = [(symbol, only(j, STAYS)) for symbol in ("K", "V")]
    of_key_gradients = [(symbol, only(j, STAYS, DONE)) for symbol in ("dK", "dV")]
    of_queries = [(symbol, only(i, LOADED)) for symbol in ("Q", "dO", "L D")]
    loops(
        drawing, 20, 30, "The papers", "for each block of K, V: all blocks of Q", order,
        of_queries, [("dQ", only(i, ADDED))], of_keys + of_key_gradients,
    )  # fmt: skip
    loops(
        drawing, 480, 450, "tileflash, kernel 2: dK and dV", "a worker for each block of K, V (here one after the other)",
        order, of_queries, [], of_keys + of_key_gradients,
    )  # fmt: skip
    by_rows = sorted(order)
    i, j = by_rows[SHOWN - 1]
    loops(
        drawing, 20, 450, "tileflash, kernel 1: dQ", "a worker for each block of Q (here one after the other)", by_rows,
        [(symbol, only(i, STAYS)) for symbol in ("Q", "dO", "L D")], [("dQ", only(i, STAYS, DONE))],
        [("K", only(j, LOADED)), ("V", only(j, LOADED))],
    )  # fmt: skip
    drawing.legend(
        480, 150,
        [
            (STAYS, "stays on chip"),
            (LOADED, "loaded for this step"),
            (ADDED, "loaded, added to, stored: at each step"),
            (TILE, "block of P and dS: made again, never stored"),
            (DONE, "visited; final"),
            (EMPTY, "still to come"),
        ],
    )  # fmt: skip
    return drawing.svg()


def causal_blocks() -> str:
    drawing = Drawing(760, 340, "Blocks under a causal mask: full, partial, skipped")
    element = 22
    for x, N, N_k, B_r, B_c in ((20, 12, 12, 4, 3), (400, 8, 12, 4, 3)):
        mask = causal(N, N_k)
        skipped = visited = 0
        for rows in blocks(N, B_r):
            for columns in blocks(N_k, B_c):
                visible = visible_block(mask, rows, columns, torch.device("cpu"))
                fill = FULL if visible.all() else PARTIAL if visible.any() else SKIPPED
                left, top = x + columns.start * element, 58 + rows.start * element
                drawing.box(left, top, B_c * element - 3, B_r * element - 3, fill)
                skipped += not visible.any()
                visited += bool(visible.any())
                for i, j in visible.nonzero().tolist():
                    drawing.dot(left + (j + 0.43) * element, top + (i + 0.43) * element, 3)
        drawing.text(x, 30, f"{N} queries, {N_k} keys, blocks of {B_r} x {B_c}", size=15, weight=600)
        drawing.text(x, 49, f"{visited} blocks visited, {skipped} skipped", ink="#4a5263")
    drawing.legend(
        400,
        258,
        [(FULL, "full: no mask needed"), (PARTIAL, "partial: masked"), (SKIPPED, "empty: skipped, not even loaded")],
    )
    return drawing.svg()


FIGURES: dict[str, Callable[[], str]] = {
    "tutorial-forward.svg": forward_loops,
    "tutorial-causal.svg": causal_blocks,
    "tutorial-backward.svg": backward_loops,
}

if __name__ == "__main__":
    for file_name, draw in FIGURES.items():
        Path(__file__).with_name(file_name).write_text(draw(), encoding="utf-8")
