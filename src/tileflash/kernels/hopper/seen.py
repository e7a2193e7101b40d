"""The part of a problem where queries see keys."""

from __future__ import annotations

from dataclasses import dataclass

from tileflash.kernels.hopper.launch import Band


@dataclass(frozen=True)
class Seen:
    """The part of a problem where queries see keys: queries [query_begin, query_end), keys [key_begin, key_end), and the band inside it.

    Rows i see [i + low, i + high], so those that see something are a range, and the keys that somebody sees are one. The kernels get
    this part only: they never read a key that nobody sees (it may hold NaN) and meet no row without a key.
    """

    query_begin: int
    query_end: int
    key_begin: int
    key_end: int
    low: int | None
    high: int | None

    @staticmethod
    def of(query_length: int, key_length: int, low: int | None, high: int | None) -> Seen:
        query_begin = 0 if high is None else max(0, -high)
        query_end = query_length if low is None else min(query_length, key_length - low)
        key_begin = 0 if low is None else max(0, low + query_begin)
        key_end = key_length if high is None else min(key_length, query_end + high)
        queries, keys = query_end - query_begin, key_end - key_begin
        if low is not None:
            low += query_begin - key_begin
            low = None if low <= 1 - queries else low
        if high is not None:
            high += query_begin - key_begin
            high = None if high >= keys - 1 else high
        if queries <= 0 or keys <= 0 or (low is not None and high is not None and low > high):
            return Seen(0, 0, 0, 0, None, None)
        return Seen(query_begin, query_end, key_begin, key_end, low, high)

    @property
    def queries(self) -> int:
        return self.query_end - self.query_begin

    @property
    def keys(self) -> int:
        return self.key_end - self.key_begin

    def band(self, key_rows: int) -> Band:
        """Which kernel serves: one without masks only where nothing is cut, the last tile of keys included."""
        if self.low is not None:
            return "window"
        return "full" if self.high is None and self.keys % key_rows == 0 else "high"

    def bounds(self) -> tuple[int, int]:
        """low and high as the kernels take them; a bound that is None excludes nothing."""
        return (-self.queries if self.low is None else self.low), (self.keys if self.high is None else self.high)
