"""Tables in Markdown files that are generated from the ledger, never typed.

A block stands between `<!-- tileflash:table NAME -->` and `<!-- tileflash:end -->`; all between is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from tileflash.bench.audit import LARGEST_SPREAD, audit
from tileflash.bench.ledger import Line
from tileflash.bench.table_attention import attention_block
from tileflash.bench.table_attention_summary import attention_summary_block
from tileflash.bench.table_parallel import parallel_block
from tileflash.bench.table_train import train_block
from tileflash.bench.table_words import Words, words_for
from tileflash.bench.tables_attention import (
    host_block,
    host_steps_block,
    lengths_block,
    memory_block,
    scaling_block,
    versions_block,
)
from tileflash.bench.tables_models import generation_block, model_memory_block, models_block, training_block
from tileflash.bench.version_features import features_block

_MARK = re.compile(r"<!-- tileflash:(?:(end)|table ([^\s>]+)) -->")
_CHINESE_SUFFIX = ".zh-CN.md"

# A block's name -> the table from the ledger's lines, and the command that measures it for the first time.
BLOCKS: dict[str, tuple[Callable[[Sequence[Line], Words], str], str]] = {
    "attention-summary": (
        attention_summary_block,
        "tileflash bench attention --output benchmarks/results/attention.jsonl",
    ),
    "attention-forward": (
        lambda lines, words: attention_block(lines, "forward", words),
        "tileflash bench attention --output benchmarks/results/attention.jsonl",
    ),
    "attention-backward": (
        lambda lines, words: attention_block(lines, "backward", words),
        "tileflash bench attention --output benchmarks/results/attention.jsonl",
    ),
    "train": (train_block, "tileflash compare gpt2 llama3-1b --ledger benchmarks/results/train.jsonl"),
    "lengths": (lengths_block, "tileflash bench lengths --output benchmarks/results/lengths.jsonl"),
    "memory": (memory_block, "tileflash bench memory --output benchmarks/results/memory.jsonl"),
    "model-memory": (model_memory_block, "tileflash bench model-memory --output benchmarks/results/model-memory.jsonl"),
    "scaling": (scaling_block, "tileflash bench scaling --output benchmarks/results/scaling.jsonl"),
    "training": (training_block, "tileflash bench training --output benchmarks/results/training.jsonl"),
    "generation": (generation_block, "tileflash bench generation --output benchmarks/results/generation.jsonl"),
    "versions": (versions_block, "tileflash bench versions --output benchmarks/results/versions.jsonl"),
    "features": (features_block, "tileflash report"),
    "models": (models_block, "tileflash bench models --output benchmarks/results/models.jsonl"),
    "parallel": (
        parallel_block,
        "tileflash bench parallel --budget-seconds 540 --output benchmarks/results/parallel.jsonl",
    ),
    "host": (host_block, "tileflash bench host --output benchmarks/results/host.jsonl"),
    "host-steps": (host_steps_block, "tileflash bench host --steps --output benchmarks/results/host.jsonl"),
}


def language_of(path: Path) -> str:
    """`zh` for files named *.zh-CN.md, `en` for all others."""
    return "zh" if path.name.endswith(_CHINESE_SUFFIX) else "en"


def render(name: str, lines: Sequence[Line], language: str, largest_spread: float = LARGEST_SPREAD) -> str:
    """The Markdown of one block, newest run of each GPU, audited; a sentence that says how to measure where there is none."""
    if name not in BLOCKS:
        raise ValueError(f"there is no table {name!r}; the tables are {', '.join(BLOCKS)}")
    words = words_for(language)
    make, command = BLOCKS[name]
    return make(audit(lines, largest_spread).lines, words) or words.nothing.format(command=command)


def fill(text: str, lines: Sequence[Line], language: str, name: str = "the text") -> tuple[str, list[str]]:
    """Replace every block of a Markdown text; returns the new text and the names of the blocks that were stale.

    `name` stands for the text in messages. ValueError, with the line: an unknown table, a block without an end, an end
    without a block; or a text with no block at all.
    """
    parts: list[str] = []
    stale: list[str] = []
    position, open_block, blocks = 0, "", 0
    for mark in _MARK.finditer(text):
        where = f"{name}, line {text.count(chr(10), 0, mark.start()) + 1}"
        is_end, block = mark.group(1) is not None, mark.group(2)
        if is_end != bool(open_block):
            problem = "an end without a block" if is_end else f"the block {open_block!r} before it has no end"
            raise ValueError(f"{where}: {problem}; a block ends with <!-- tileflash:end -->")
        if not is_end:
            if block not in BLOCKS:
                raise ValueError(f"{where}: there is no table {block!r}; the tables are {', '.join(BLOCKS)}")
            parts.append(text[position : mark.end()])
            position, open_block, blocks = mark.end(), block, blocks + 1
            continue
        content = f"\n{render(open_block, lines, language)}\n"
        if text[position : mark.start()] != content:
            stale.append(open_block)
        parts.append(content)
        position, open_block = mark.start(), ""
    if open_block:
        raise ValueError(f"{name}: the block {open_block!r} has no end; it must end with <!-- tileflash:end -->")
    if blocks == 0:
        raise ValueError(f"{name}: holds no block <!-- tileflash:table NAME --> ... <!-- tileflash:end -->")
    return "".join(parts) + text[position:], stale
