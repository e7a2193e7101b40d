"""What each version of FlashAttention and its neighbours can do, by their own documents and source (as of 2026-11, on Hopper)."""

from __future__ import annotations

from collections.abc import Sequence

from tileflash.bench.ledger import Line
from tileflash.bench.markdown import table
from tileflash.bench.table_words import Words

VERSIONS = ("standard (math)", "FA1", "FA2 (2.8)", "FA3", "FA4 (4.0 beta)", "cuDNN 9", "tileflash")
# feature -> its value in each version. tileflash's column is held against the library by a test.
FEATURES: dict[str, tuple[str, ...]] = {
    "causal mask": ("yes", "yes", "yes", "yes", "yes", "yes", "yes"),
    "MQA / GQA": ("yes", "no", "yes", "yes", "yes", "yes", "yes"),
    "sliding window": ("by a mask", "no", "yes", "yes", "yes", "yes", "yes"),
    "paged K/V": ("no", "no", "pages of 256", "any page", "yes", "yes", "no"),
    "FP8 forward": ("no", "no", "no", "e4m3", "on Blackwell", "yes", "no"),
    "dropout": ("yes", "yes", "yes", "no", "no", "yes", "yes"),
    "additive bias with gradient": ("yes", "no", "no", "no", "by score_mod", "yes", "yes"),
    "attention sinks": ("no", "no", "no", "no", "yes", "yes", "yes"),
    "soft cap": ("no", "no", "yes", "yes", "yes", "by a graph", "yes"),
    "work partitioning": (
        "whole matrices",
        "over K/V blocks, then queries",
        "over query blocks, split over warps",
        "producer and consumer warpgroups, ping-pong",
        "the same, in CuTe DSL",
        "producer and consumer warpgroups",
        "Triton: query blocks; Hopper (Gluon): producer and consumer warpgroups",
    ),
    "installation": (
        "in PyTorch", "compiled", "compiled, or a wheel that fits", "compiled, or PyTorch's index", "compiled at the first call",
        "binary", "pure Python",
    ),
}  # fmt: skip


def features_block(lines: Sequence[Line], words: Words) -> str:
    """The table of features; of no ledger, so that it is never empty."""
    rows = [[feature, *values] for feature, values in FEATURES.items()]
    note = "From each project's documentation and source, not measured."
    return "\n\n".join([table(["feature", *VERSIONS], rows, left=len(VERSIONS) + 1), note])
