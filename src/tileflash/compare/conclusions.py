"""The conclusion of a comparison, worded from its figures: every sentence is chosen by a verdict, none is fixed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum

from tileflash.compare import numbers
from tileflash.compare.figures import Comparison, Measured
from tileflash.compare.losses import LossGap
from tileflash.compare.plan import BASELINE, FLASH, model_name
from tileflash.compare.results import Outcome
from tileflash.compare.texts import Texts

# A difference up to the spread of the repeats cannot be told from chance. A spread is never taken to be below the
# floor, which is what a clock and an allocator may do; with a single repeat there is none, so it is assumed.
SPREAD_FLOOR = 0.005
SINGLE_REPEAT_SPREAD = 0.05


class Verdict(Enum):
    BETTER = "better"
    WORSE = "worse"
    SAME = "same"


def speed_verdict(speedup: Measured) -> Verdict:
    """Whether flash is faster, slower, or not measurably different."""
    return _verdict(speedup.median - 1.0, speedup)


def memory_verdict(saving: Measured) -> Verdict:
    """Whether flash needs less, more, or about the same peak memory."""
    return _verdict(saving.median, saving)


def _verdict(gain: float, measured: Measured) -> Verdict:
    spread = measured.high - measured.low if measured.repeats > 1 else SINGLE_REPEAT_SPREAD
    if abs(gain) <= max(spread, SPREAD_FLOOR):
        return Verdict.SAME
    return Verdict.BETTER if gain > 0 else Verdict.WORSE


def conclusion(first: Sequence[Comparison], by_length: dict[str, list[Comparison]], say: Texts) -> str:
    """One paragraph.

    Args:
        first: one comparison a model, in the setting that is reported first.
        by_length: model -> its comparisons, shortest sequence first.
    """
    sentences = []
    for comparison in first:
        sentences.append(_about_one(comparison, say))
        sentences += _across_lengths(by_length.get(comparison.setting.model, []), say)
    everything = [*first, *(c for comparisons in by_length.values() for c in comparisons)]
    if all(comparison.speedup is None and not _is_oom(comparison) for comparison in everything):
        return say("nothing")
    sentences += _about_losses(everything, say)
    return say.sentence_space().join(sentences)


def _about_one(comparison: Comparison, say: Texts) -> str:
    setting = comparison.setting
    where = {
        "model": model_name(setting.model),
        "batch": setting.batch_size,
        "length": setting.sequence_length,
    }
    if comparison.speedup is None:
        return say("about.oom", what=_without_ratio(comparison, say), **where)
    return say(
        "about.one",
        time=_time_phrase(comparison.speedup, say),
        memory=_memory_phrase(comparison.memory_saving, say),
        **where,
    )


def _time_phrase(speedup: Measured, say: Texts) -> str:
    key = {Verdict.BETTER: "time.faster", Verdict.WORSE: "time.slower", Verdict.SAME: "time.same"}
    if speedup.repeats > 1:
        low, high = numbers.ratio(speedup.low), numbers.ratio(speedup.high)
        spread = say("spread.repeats", low=low, high=high, count=speedup.repeats)
    else:
        spread = say("spread.single")
    return say(key[speed_verdict(speedup)], ratio=numbers.ratio(speedup.median), spread=spread)


def _memory_phrase(saving: Measured | None, say: Texts) -> str:
    if saving is None:
        return say("memory.unknown")
    key = {Verdict.BETTER: "memory.less", Verdict.WORSE: "memory.more", Verdict.SAME: "memory.same"}
    return say(key[memory_verdict(saving)], percent=numbers.percent(abs(saving.median)))


def _is_oom(comparison: Comparison) -> bool:
    return Outcome.OUT_OF_MEMORY in (comparison.baseline.outcome, comparison.flash.outcome)


def _without_ratio(comparison: Comparison, say: Texts) -> str:
    oom = {s: comparison.scheme(s).outcome is Outcome.OUT_OF_MEMORY for s in (BASELINE, FLASH)}
    latency = {s: comparison.scheme(s).latency_ms for s in (BASELINE, FLASH)}
    if oom[BASELINE] and oom[FLASH]:
        return say("oom.both")
    for scheme, other in ((BASELINE, FLASH), (FLASH, BASELINE)):
        if oom[scheme]:
            measured = latency[other]
            if measured is None:
                return say("oom.other_missing", scheme=scheme)
            return say(f"oom.{scheme}", latency=numbers.milliseconds(measured.median))
    return say("unmeasured")


def _across_lengths(comparisons: list[Comparison], say: Texts) -> list[str]:
    """How the ratios move with the sequence length, where flash loses, and who runs out of memory where."""
    both = [(c.setting.sequence_length, c.speedup, c.memory_saving) for c in comparisons if c.speedup is not None]
    sentences = []
    if len(both) > 1:
        (short, first, saving_first), (long, last, saving_last) = both[0], both[-1]
        values = {
            "short": short,
            "long": long,
            "first": _ratio_or_noise(first, say),
            "last": _ratio_or_noise(last, say),
        }
        if saving_first is not None and saving_last is not None:
            savings = {
                "saving_first": numbers.percent(saving_first.median),
                "saving_last": numbers.percent(saving_last.median),
            }
            sentences.append(say("across.range_saving", **values, **savings))
        else:
            sentences.append(say("across.range", **values))
        best_length, best, _ = max(both, key=lambda entry: entry[1].median)
        if best_length not in (short, long) and speed_verdict(best) is Verdict.BETTER:
            sentences.append(say("across.best", best=numbers.ratio(best.median), length=best_length))
        slower = [str(length) for length, speedup, _ in both if speed_verdict(speedup) is Verdict.WORSE]
        more = [str(length) for length, _, saving in both if saving and memory_verdict(saving) is Verdict.WORSE]
        if slower:
            sentences.append(say("across.slower", lengths=say.listed(slower)))
        if more:
            sentences.append(say("across.more_memory", lengths=say.listed(more)))
    return sentences + _oom_by_length(comparisons, say)


def _ratio_or_noise(speedup: Measured, say: Texts) -> str:
    """The ratio; with a word where it is no more than the spread of the repeats."""
    ratio = numbers.ratio(speedup.median)
    return say("across.noise", ratio=ratio) if speed_verdict(speedup) is Verdict.SAME else ratio


def _oom_by_length(comparisons: list[Comparison], say: Texts) -> list[str]:
    lengths: dict[str, list[str]] = {"across.oom.baseline": [], "across.oom.flash": [], "oom.both": []}
    for comparison in comparisons:
        baseline_oom = comparison.baseline.outcome is Outcome.OUT_OF_MEMORY
        flash_oom = comparison.flash.outcome is Outcome.OUT_OF_MEMORY
        if baseline_oom and flash_oom:
            lengths["oom.both"].append(str(comparison.setting.sequence_length))
        elif baseline_oom and comparison.flash.outcome is Outcome.FINISHED:
            lengths["across.oom.baseline"].append(str(comparison.setting.sequence_length))
        elif flash_oom and comparison.baseline.outcome is Outcome.FINISHED:
            lengths["across.oom.flash"].append(str(comparison.setting.sequence_length))
    return [say("across.oom", lengths=say.listed(where), what=say(key)) for key, where in lengths.items() if where]


def _about_losses(comparisons: Sequence[Comparison], say: Texts) -> list[str]:
    """One sentence a compute dtype, about the setting where the losses are furthest apart, in tolerances."""
    worst: dict[str, tuple[Comparison, LossGap]] = {}
    for comparison in comparisons:
        gap, dtype = comparison.loss_gap, comparison.setting.dtype
        if gap is not None and (dtype not in worst or gap.worst.in_tolerances > worst[dtype][1].worst.in_tolerances):
            worst[dtype] = (comparison, gap)
    return [_about_gap(comparison, gap, say) for comparison, gap in worst.values()]


def _about_gap(comparison: Comparison, gap: LossGap, say: Texts) -> str:
    setting, worst = comparison.setting, gap.worst
    where = say("loss.where", model=model_name(setting.model), length=setting.sequence_length, step=worst.step)
    if math.isnan(worst.size):
        return say("loss.not_finite", where=where)
    key = "loss.agree" if gap.agrees else "loss.noise" if gap.is_noise else "loss.differ"
    tolerance = numbers.gap(worst.tolerance)
    return say(key, gap=numbers.gap(worst.size), where=where, tolerance=tolerance, dtype=setting.dtype)
