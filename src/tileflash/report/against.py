"""Two ledgers held against each other: what became faster or slower beyond the noise that both state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tileflash.bench.flags import DOUBTFUL
from tileflash.bench.gpu_watch import SUITE as DEVICE
from tileflash.bench.ledger import Line
from tileflash.bench.markdown import table

_FLOOR = 0.02  # smaller changes are never called one: clocks differ by as much from one sitting to the next
_SINGLE = 0.05  # what is assumed where a figure was measured once and no spread is known
_HIGHER_IS_BETTER = ("per_s", "tflops")


class Verdict(str, Enum):
    BETTER = "better"
    WORSE = "worse"
    SAME = "within the noise"


@dataclass(frozen=True)
class Change:
    """One figure in both ledgers. `gain` is new / old turned so that above 1 is better; `noise` the change that it must exceed."""

    old: Line
    new: Line
    gain: float
    noise: float

    @property
    def verdict(self) -> Verdict:
        apart = (self.new.low or 0) > (self.old.high or 0) or (self.new.high or 0) < (self.old.low or 0)
        if not apart or abs(self.gain - 1) <= self.noise:
            return Verdict.SAME
        return Verdict.BETTER if self.gain > 1 else Verdict.WORSE


@dataclass(frozen=True)
class Against:
    """What both ledgers have, and how many figures only one has."""

    changes: tuple[Change, ...]
    only_old: int
    only_new: int

    def of(self, verdict: Verdict) -> list[Change]:
        """The changes with a verdict, the largest first."""
        return sorted((c for c in self.changes if c.verdict is verdict), key=lambda c: -abs(c.gain - 1))

    def summary(self) -> str:
        """One sentence."""
        better, worse, same = (len(self.of(verdict)) for verdict in Verdict)
        share = f" ({same / len(self.changes):.0%})" if self.changes else ""
        return (
            f"Of {len(self.changes)} figures that both ledgers have, {better} became better, {worse} worse, and {same}{share} are "
            f"within the noise; {self.only_old} are in the old one only, {self.only_new} in the new one only."
        )

    def markdown(self) -> str:
        """The summary and a table of what changed beyond the noise, worse first."""
        rows = [
            [_what(change.new), change.verdict.value, _figure(change.old), _figure(change.new), f"{change.gain:.3f}x"]
            for verdict in (Verdict.WORSE, Verdict.BETTER)
            for change in self.of(verdict)
        ]
        changed = table(["figure", "verdict", "old", "new", "new / old, above 1 is better"], rows, left=2)
        return "\n\n".join([self.summary(), changed] if rows else [self.summary()])


def against(old: Sequence[Line], new: Sequence[Line]) -> Against:
    """Match figures by GPU, suite, case, variant and metric; of each the newest counts. Those that a flag makes false do not. Ratios
    are left out: their times are here."""
    before, after = _newest(old), _newest(new)
    changes = []
    for key in (key for key in after if key in before):
        first, second = before[key], after[key]
        assert first.median is not None
        assert second.median is not None
        if first.median <= 0 or second.median <= 0:
            continue
        quotient = second.median / first.median
        gain = quotient if first.metric.endswith(_HIGHER_IS_BETTER) else 1 / quotient
        changes.append(Change(first, second, gain, max(_FLOOR, _spread(first), _spread(second))))
    return Against(tuple(changes), len(before.keys() - after.keys()), len(after.keys() - before.keys()))


def _newest(lines: Sequence[Line]) -> dict[tuple[object, ...], Line]:
    found: dict[tuple[object, ...], Line] = {}
    for line in sorted(lines, key=lambda line: line.date):  # stable: of one date the later line holds
        if (
            line.median is None
            or set(line.flags) - DOUBTFUL
            or line.suite == DEVICE
            or line.metric.startswith("speed_ratio")
        ):
            continue
        found[line.gpu, line.suite, tuple(sorted(line.case.items())), line.variant, line.metric] = line
    return found


def _spread(line: Line) -> float:
    if line.repeats < 2:
        return _SINGLE
    return ((line.high or 0.0) - (line.low or 0.0)) / abs(line.median or 1.0)


def _what(line: Line) -> str:
    case = " ".join(str(value) if isinstance(value, str) else f"{name}={value}" for name, value in line.case.items())
    return f"{line.suite}: {line.variant}, {case}, {line.metric}"


def _figure(line: Line) -> str:
    return f"{line.median:,.5g} ({line.low:,.5g} – {line.high:,.5g})"
