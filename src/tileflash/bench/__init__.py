"""Measuring: fair timing, work counted by hand, the ledger of figures and the tables made from it."""

from tileflash.bench.ledger import Line, append, read
from tileflash.bench.sitting import Sitting
from tileflash.bench.statistic import Statistic, geometric_mean, summarize

__all__ = ["Line", "Sitting", "Statistic", "append", "geometric_mean", "read", "summarize"]
