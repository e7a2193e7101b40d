"""The table of options and backends in docs/options.md, made from what the backends declare.

`PYTHONPATH=src python tests/support/option_table.py` writes it into the page.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tileflash.attention.backends.base import Backend
from tileflash.attention.dispatch import BACKENDS
from tileflash.attention.problem import FEATURES

PAGE = Path(__file__).parents[2] / "docs" / "options.md"
BEGIN, END = "<!-- options and backends -->\n", "<!-- end -->\n"

# What users write, by the name of the feature.
ARGUMENTS = {
    "ALiBi": "`alibi_slopes`",
    "bias": "`bias`, float",
    "bias gradient": "gradient of `bias`",
    "document ids": "`document_ids`",
    "dropout": "`dropout_p`",
    "mask": "`bias`, bool",
    "packed sequences": "`attention_varlen`",
    "prefix lengths": "`prefix_lengths`",
    "sinks": "`sinks`",
    "soft cap": "`softcap`",
}

# The other facts, each as what a cell of a backend says.
_FACTS: dict[str, Callable[[Backend], str]] = {
    "`causal`, Sq = Sk": lambda backend: "yes",
    "`window`; `causal`, Sq ≠ Sk": lambda backend: _yes(backend.bands == "any"),
    "`scale` ≤ 0": lambda backend: _yes(not backend.positive_scale),
    "grouped heads": lambda backend: _yes(backend.grouped_heads),
    "D ≠ Dv": lambda backend: _yes(not backend.equal_head_dims),
    "head dimension": lambda backend: _head_dim(backend),
    "`return_lse`": lambda backend: _yes(backend.lse != "none"),
    "gradient of lse": lambda backend: _yes(backend.lse == "differentiable"),
    "`deterministic`": lambda backend: _yes(backend.deterministic),
    "`second_derivative`": lambda backend: _yes(backend.second_derivative),
    "O(S) memory": lambda backend: _yes(backend.linear_memory),
}


def option_table() -> str:
    """A row for each option or fact, a column for each backend."""
    assert set(ARGUMENTS) == set(FEATURES)
    rows = [
        ["", *(f"`{name}`" for name in BACKENDS)],
        ["---", *(":---:" for _ in BACKENDS)],
        *([said, *(_yes(name in backend.features) for backend in BACKENDS.values())]
          for name, said in ARGUMENTS.items()),
        *([said, *(cell(backend) for backend in BACKENDS.values())] for said, cell in _FACTS.items()),
    ]  # fmt: skip
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def with_table(text: str) -> str:
    """The page with the table between its marks."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}{option_table()}{END}{tail}"


def _yes(fact: bool) -> str:
    return "yes" if fact else "–"


def _head_dim(backend: Backend) -> str:
    limit = "any" if backend.max_head_dim is None else f"≤ {backend.max_head_dim}"
    return limit if backend.head_dim_multiple == 1 else f"{limit}, multiple of {backend.head_dim_multiple}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
