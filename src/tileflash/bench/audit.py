"""The audit: figures that cannot be true, cannot all be true, or say too little. Made of lines, so that old ledgers are judged too.

A rule looks at the lines of one run and yields findings. What it finds becomes a flag of the lines concerned wherever they are shown,
and the exit status of the command that measured them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tileflash.bench import gpu_watch
from tileflash.bench.flags import (
    CONTRADICTION,
    FAILED,
    FASTER_THAN_LIMIT,
    LESS_THAN_NEEDED,
    RESULTS,
    THROTTLED,
    WIDE_SPREAD,
)
from tileflash.bench.ledger import CaseValue, Line

LARGEST_SPREAD = 0.2  # highest - lowest, as a share of the median
RATIO = "speed_ratio_to_"
_TOO_FAST = 0.7  # more work may not take less than this share of the time: less is another problem, not noise
_TOO_SMALL = 0.95  # nor may it need less than this share of the memory; allocators round
# The host does other things as well, which shows in the rounds of what is its own time.
_NOISIER = {"host_us": 2.5}
_ROUNDING = 0.01  # of figures that were computed from one another

# (a rate, the time that it is made of, what is done in that time)
_RATES: tuple[tuple[str, str, Callable[[Line], float]], ...] = (
    ("tokens_per_s", "step_ms", lambda line: float(line.case["batch"]) * float(line.case["seq"])),
    ("samples_per_s", "step_ms", lambda line: float(line.case["batch"])),
    (
        "tokens_per_s_per_rank",
        "step_ms",
        lambda line: _tokens(line) * float(line.case["micro_batches"]) / _sharers(line),
    ),
    ("tokens_per_s", "token_ms", lambda line: float(line.case["batch"])),
)


@dataclass(frozen=True)
class Finding:
    """What is wrong in one sentence, and the places of the lines concerned in the sequence that was audited."""

    flag: str
    message: str
    places: tuple[int, ...]


@dataclass(frozen=True)
class Audit:
    """The lines with what was found added to their flags, and the findings one by one."""

    lines: tuple[Line, ...]
    findings: tuple[Finding, ...]

    def complaints(self) -> list[str]:
        """A sentence for each finding and for each line that bears a flag of its own that is no result; [] when all is well."""
        own = {
            f"{_where(line)}: {', '.join(flags)}": None
            for line in self.lines
            if (flags := sorted(set(line.flags) - _allowed(line) - {finding.flag for finding in self.findings}))
        }
        return [*(f"{finding.flag}: {finding.message}" for finding in self.findings), *own]


def audit(lines: Sequence[Line], largest_spread: float = LARGEST_SPREAD) -> Audit:
    """Judge `lines`, each run by itself. ValueError for a `largest_spread` that is not above 0."""
    if not largest_spread > 0:
        raise ValueError(f"`largest_spread` was {largest_spread}; it must be above 0")
    runs: dict[tuple[str, str], list[int]] = {}
    for place, line in enumerate(lines):
        runs.setdefault((line.run, line.gpu), []).append(place)
    findings: list[Finding] = []
    for places in runs.values():
        run = _Run(lines, places)
        for rule in (_beyond_limit, _ratios, _rates, _efficiencies, _falling, _throttled):
            findings += rule(run)
        findings += _spread(run, largest_spread)
    added: dict[int, dict[str, None]] = {}
    for finding in findings:
        for place in finding.places:
            added.setdefault(place, {})[finding.flag] = None
    flagged = tuple(
        replace(line, flags=tuple(dict.fromkeys([*line.flags, *added[place]]))) if place in added else line
        for place, line in enumerate(lines)
    )
    return Audit(flagged, tuple(findings))


class _Run:
    """The lines of one run that hold a figure, by their places, and by what they are of. A comparison that is taken up again appends a
    figure anew, of more repeats: of lines of the same thing the last holds."""

    def __init__(self, lines: Sequence[Line], places: Sequence[int]) -> None:
        last = {(line.suite, _key(line.case), line.variant, line.metric): p for p in places for line in [lines[p]]}
        self.all = [(place, lines[place]) for place in places]
        self.figures = [(place, lines[place]) for place in last.values() if lines[place].median is not None]
        self._by_name = {
            (line.suite, _key(line.case), line.variant, line.metric): (place, line) for place, line in self.figures
        }

    def find(self, like: Line, metric: str, variant: str | None = None) -> tuple[int, Line] | None:
        """The figure `metric` of the same case, of the same variant unless another is named."""
        return self._by_name.get((like.suite, _key(like.case), variant or like.variant, metric))


def _allowed(line: Line) -> frozenset[str]:
    """A peer that raises an error is its own affair, and a line of the table; one of ours is ours."""
    return RESULTS if "flash" in line.variant.split("-")[0] else RESULTS | {FAILED}


def _key(case: object) -> tuple[tuple[str, CaseValue], ...]:
    assert isinstance(case, dict)
    return tuple(sorted(case.items()))


def _where(line: Line) -> str:
    case = " ".join(str(value) if isinstance(value, str) else f"{name}={value}" for name, value in line.case.items())
    return f"{line.suite}, {line.variant}, {case}, {line.metric}"


def _bounds(line: Line) -> tuple[float, float, float]:
    assert line.low is not None
    assert line.median is not None
    assert line.high is not None
    return line.low, line.median, line.high


def _beyond_limit(run: _Run) -> Iterator[Finding]:
    """Times and bytes cannot be below their limit, rates not above it."""
    for place, line in run.figures:
        if line.limit is None:
            continue
        low, _, high = _bounds(line)
        if line.metric.endswith("_bytes") and low < line.limit:
            yield Finding(LESS_THAN_NEEDED, f"{_where(line)}: {low:,.0f} bytes, less than {line.limit:,.0f}", (place,))
        elif line.metric.endswith("_ms") and low < line.limit:
            message = f"{_where(line)}: {low:.4g} ms, faster than the limit of {line.limit:.4g} ms"
            yield Finding(FASTER_THAN_LIMIT, message, (place,))
        elif line.metric.endswith("_per_s") and high > line.limit:
            message = f"{_where(line)}: {high:.6g} a second, more than the limit of {line.limit:.6g}"
            yield Finding(FASTER_THAN_LIMIT, message, (place,))


def _spread(run: _Run, largest: float) -> Iterator[Finding]:
    for place, line in run.figures:
        low, median, high = _bounds(line)
        allowed = largest * _NOISIER.get(line.metric, 1.0) + 1e-9
        if line.suite != gpu_watch.SUITE and high - low > allowed * abs(median):
            share = f"{(high - low) / abs(median):.0%}" if median else "more"
            yield Finding(
                WIDE_SPREAD, f"{_where(line)}: {low:.4g} to {high:.4g}, {share} of the median apart", (place,)
            )


def _ratios(run: _Run) -> Iterator[Finding]:
    """A speed-up formed within rounds lies between the quotients of the two times' extremes."""
    for place, line in run.figures:
        if not line.metric.startswith(RATIO):
            continue
        own = run.find(line, "time_ms")
        base = run.find(line, "time_ms", line.metric.removeprefix(RATIO))
        if own is None or base is None:
            continue
        least, most = base[1].low / own[1].high, base[1].high / own[1].low  # type: ignore[operator]
        low, _, high = _bounds(line)
        if low < least * (1 - _ROUNDING) or high > most * (1 + _ROUNDING):
            message = f"{_where(line)}: {low:.3g} to {high:.3g}, but the two times allow {least:.3g} to {most:.3g}"
            yield Finding(CONTRADICTION, message, (place, own[0], base[0]))


def _rates(run: _Run) -> Iterator[Finding]:
    """What is done in a second, times the time that it takes, is what is done."""
    for rate, time, amount in _RATES:
        for place, line in run.figures:
            other = run.find(line, time) if line.metric == rate else None
            if other is None:
                continue
            done = amount(line)
            low, _, high = _bounds(other[1])
            least, most = done / high * 1e3 * (1 - _ROUNDING), done / low * 1e3 * (1 + _ROUNDING)
            if not least <= _bounds(line)[1] <= most:
                message = f"{_where(line)}: {line.median:,.7g}, but {time} allows {least:,.7g} to {most:,.7g}"
                yield Finding(CONTRADICTION, message, (place, other[0]))


def _falling(run: _Run) -> Iterator[Finding]:
    """A longer sequence of no fewer tokens is more work: it takes no less time, and no less memory."""
    series: dict[tuple[object, ...], list[tuple[int, Line]]] = {}
    for place, line in run.figures:
        if "seq" in line.case and line.metric.endswith(("_ms", "_bytes")):
            rest = {name: value for name, value in line.case.items() if name not in ("seq", "batch")}
            series.setdefault((line.suite, line.variant, line.metric, _key(rest)), []).append((place, line))
    for found in series.values():
        found.sort(key=lambda pair: (int(pair[1].case["seq"]), _tokens(pair[1])))
        for (first, shorter), (second, longer) in pairwise(found):
            share = _TOO_SMALL if longer.metric.endswith("_bytes") else _TOO_FAST
            high, low = _bounds(longer)[2], _bounds(shorter)[0]
            if _tokens(longer) >= _tokens(shorter) and high < share * low:
                message = f"{_where(longer)}: {high:,.7g}, less than {low:,.7g} of S={shorter.case['seq']}, which is less work"
                yield Finding(CONTRADICTION, message, (second, first))


def _tokens(line: Line) -> int:
    return int(line.case["seq"]) * int(line.case.get("batch", 1))


def _sharers(line: Line) -> float:
    """How many ranks share the work of one."""
    return float(line.case["ranks"]) if line.case["scaling"] == "strong" and line.variant.endswith("-ranks") else 1.0


def _efficiencies(run: _Run) -> Iterator[Finding]:
    """How well ranks scale lies between what the quotients of the steps' extremes allow."""
    for place, line in run.figures:
        if line.metric != "efficiency":
            continue
        one, several = run.find(line, "step_ms", "flash-one-rank"), run.find(line, "step_ms")
        if one is None or several is None:
            continue
        share = _sharers(line)
        least, most = (one[1].low / several[1].high / share, one[1].high / several[1].low / share)  # type: ignore[operator]
        _, median, _ = _bounds(line)
        if not least * (1 - _ROUNDING) <= median <= most * (1 + _ROUNDING):
            message = f"{_where(line)}: {median:.3g}, but the two times allow {least:.3g} to {most:.3g}"
            yield Finding(CONTRADICTION, message, (place, one[0], several[0]))


def _throttled(run: _Run) -> Iterator[Finding]:
    """What the GPU's own sensors said during the sitting holds for everything that was measured in it."""
    for place, line in run.all:
        if line.suite == gpu_watch.SUITE and THROTTLED in line.flags:
            others = tuple(p for p, other in run.all if other.suite != gpu_watch.SUITE)
            yield Finding(
                THROTTLED, f"the GPU lowered its clocks: {line.case.get('reasons', 'unknown')}", (place, *others)
            )
