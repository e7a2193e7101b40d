"""Causal masks and windows as one thing: a band of key positions around each query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# Kernels count positions in 32 bits: no sequence is this long, and a bound that wide excludes nothing.
_LONGEST = 2**30

Causal = bool | Literal["top-left", "bottom-right"]


@dataclass(frozen=True)
class Band:
    """Query i sees key j where `low <= j - i <= high`; None means no bound on that side."""

    low: int | None = None
    high: int | None = None

    @staticmethod
    def of(causal: Causal, window: tuple[int | None, int | None], query_length: int, key_length: int) -> Band:
        """The band of `causal` and `window=(left, right)`.

        Key j is visible to query i when `i + shift - left <= j <= i + shift + right`, with shift = Sk - Sq (the last query stands at
        the last key, "bottom-right") or 0 ("top-left"). Causal is right = 0. A bound that excludes no key is dropped, so that
        `window=(Sk, 0)` and `causal=True` are the same band, hence the same bits.
        """
        shift = 0 if causal == "top-left" else key_length - query_length
        left, right = window
        if causal:
            right = 0 if right is None else min(right, 0)
        low = None if left is None else shift - left
        high = None if right is None else shift + right
        if low is not None and low <= 1 - query_length:
            low = None
        if high is not None and high >= key_length - 1:
            high = None
        return Band(low, high)

    @staticmethod
    def packed(causal: Causal, window: tuple[int | None, int | None]) -> Band:
        """The band of each packed sequence, counted from where its query 0 stands (`shift` in `of`), for lengths are not known here."""
        left, right = (None if bound is None or bound >= _LONGEST else bound for bound in window)
        if causal:
            right = 0
        return Band(None if left is None else -left, right)

    @property
    def is_full(self) -> bool:
        """Every query sees every key."""
        return self.low is None and self.high is None

    def is_square_causal(self, query_length: int, key_length: int) -> bool:
        """Whether this is the causal mask of a square problem, which PyTorch's and every other library's kernels agree on."""
        return (
            self.low is None
            and query_length == key_length
            and (self.high == 0 or (self.high is None and query_length == 1))
        )

    def mask(
        self, query_begin: int, query_end: int, key_length: int, device: torch.device | str | None = None
    ) -> Tensor:
        """bool [query_end - query_begin, key_length]: True where the key is visible to the query."""
        difference = (
            torch.arange(key_length, device=device)[None, :]
            - torch.arange(query_begin, query_end, device=device)[:, None]
        )
        visible = torch.ones_like(difference, dtype=torch.bool)
        if self.low is not None:
            visible &= difference >= self.low
        if self.high is not None:
            visible &= difference <= self.high
        return visible

    def visible_pairs(self, query_length: int, key_length: int) -> int:
        """How many (query, key) pairs are visible: what the attention's FLOPs are proportional to."""
        if self.is_full:
            return query_length * key_length
        low = -query_length if self.low is None else self.low
        high = key_length if self.high is None else self.high
        return max(0, _triangle(query_length, key_length, high) - _triangle(query_length, key_length, low - 1))


def _triangle(query_length: int, key_length: int, high: int) -> int:
    """Pairs (i, j) with 0 <= i < query_length, 0 <= j < key_length and j - i <= high."""
    first_full = max(0, key_length - 1 - high)  # from this query on, every key is visible
    first_any = max(0, -high)  # before this query, none is
    if first_any >= query_length:
        return 0
    full = max(0, query_length - first_full)
    end = min(first_full, query_length)
    count = max(0, end - first_any)
    return full * key_length + count * (first_any + high + 1 + end + high) // 2
