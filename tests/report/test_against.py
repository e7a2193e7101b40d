"""Two ledgers: a change counts when it is beyond what both figures' spreads explain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.lines import H200, train_lines
from tileflash.bench import Line, Statistic
from tileflash.report.against import Verdict, against


def _line(metric: str, median: float, spread: float = 0.01, repeats: int = 3) -> Line:
    figure = Statistic(median, median * (1 - spread / 2), median * (1 + spread / 2), repeats)
    return H200.line("train", {"model": "gpt2", "batch": 4, "seq": 64}, "flash", metric, figure)


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        (_line("step_ms", 100), _line("step_ms", 90), Verdict.BETTER),
        (_line("step_ms", 100), _line("step_ms", 110), Verdict.WORSE),
        (_line("tokens_per_s", 100), _line("tokens_per_s", 110), Verdict.BETTER),
        (_line("peak_bytes", 100), _line("peak_bytes", 110), Verdict.WORSE),
        (_line("step_ms", 100), _line("step_ms", 98.5), Verdict.SAME),  # apart, but clocks differ by as much
        (_line("step_ms", 100, 0.3), _line("step_ms", 90), Verdict.SAME),  # the old one's spread covers it
        (_line("step_ms", 100, 0, 1), _line("step_ms", 96, 0, 1), Verdict.SAME),  # measured once: nobody knows
        (_line("step_ms", 100, 0, 1), _line("step_ms", 90, 0, 1), Verdict.BETTER),
    ],
)  # fmt: skip
def test_verdicts(old: Line, new: Line, verdict: Verdict) -> None:
    (change,) = against([old], [new]).changes
    assert change.verdict is verdict


def test_what_is_matched() -> None:
    old = [*train_lines(), *train_lines(seq=64)]
    new = [*train_lines(replace(H200, run="run-2", date="2026-12-02T00:00:00Z")), *train_lines(seq=256)]
    result = against(old, new)
    assert (len(result.changes), result.only_old, result.only_new) == (6, 6, 6)
    assert result.summary().startswith(
        "Of 6 figures that both ledgers have, 0 became better, 0 worse, and 6 (100%) are within"
    )
    assert result.markdown() == result.summary()
    # The newest of both counts, whatever its place; flagged figures and other GPUs do not.
    older = [replace(line, date="2026-01-01T00:00:00Z", median=1.0, low=1.0, high=1.0) for line in train_lines()]
    assert against([*old, *older], new).of(Verdict.BETTER) == []
    assert against([replace(line, flags=("faster_than_limit",)) for line in old], new).changes == ()
    assert against([replace(line, gpu="NVIDIA A100") for line in old], new).changes == ()


def test_the_largest_change_comes_first() -> None:
    old = [_line("step_ms", 100), _line("peak_bytes", 100), _line("tokens_per_s", 100)]
    new = [_line("step_ms", 80), _line("peak_bytes", 50), _line("tokens_per_s", 50)]
    rows = against(old, new).markdown().splitlines()[4:]
    assert [row.split(" | ")[1] for row in rows] == ["worse", "better", "better"]
    assert rows[1].endswith("| 100 (99.5 – 100.5) | 50 (49.75 – 50.25) | 2.000x |")
