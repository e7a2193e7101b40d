"""The blocks `attention-forward` and `attention-backward`."""

from __future__ import annotations

from collections.abc import Sequence

from tileflash.bench.attention import SUITE, work_of
from tileflash.bench.audit import RATIO
from tileflash.bench.flags import DOUBTFUL
from tileflash.bench.footnotes import Footnotes, without_figure
from tileflash.bench.ledger import CaseValue, Line
from tileflash.bench.markdown import newest_runs, provenance, spread, table
from tileflash.bench.statistic import geometric_mean
from tileflash.bench.table_words import Words

_Shape = tuple[int, str, int]  # head_dim, mask, seq


def attention_block(lines: Sequence[Line], direction: str, words: Words) -> str:
    """A table for each GPU: TFLOP/s of every variant and its speed relative to the baseline. Empty without lines."""
    chosen = [line for line in lines if line.suite == SUITE and line.case.get("direction") == direction]
    return "\n\n".join(_run(run, words) for run in newest_runs(chosen))


def _run(lines: list[Line], words: Words) -> str:
    variants = list(dict.fromkeys(line.variant for line in lines))
    baseline = next((line.metric.removeprefix(RATIO) for line in lines if line.metric.startswith(RATIO)), None)
    # A variant that never served has no ratio and needs no column for it.
    measured = {line.variant for line in lines if line.metric.startswith(RATIO)}
    compared = [variant for variant in variants if variant in measured]
    shapes = list(dict.fromkeys(_shape(line.case) for line in lines))
    times = {(_shape(line.case), line.variant): line for line in lines if line.metric == "time_ms"}
    ratios = {(_shape(line.case), line.variant): line for line in lines if line.metric.startswith(RATIO)}
    headings = ["d", words.mask, "S"]
    headings += [words.tflops.format(variant=variant) for variant in variants]
    headings += [words.ratio.format(variant=variant, baseline=baseline) for variant in compared]
    headings.append(words.limit)
    rows, footnotes = [], Footnotes(words)
    for shape in shapes:
        row = [str(shape[0]), words.masks.get(shape[1], shape[1]), str(shape[2])]
        row += [_tflops(times.get((shape, variant)), words, footnotes) for variant in variants]
        row += [_ratio(ratios.get((shape, variant)), footnotes) for variant in compared]
        row.append(_limit([times[key] for key in times if key[0] == shape]))
        rows.append(row)
    parts = [table(headings, rows, left=3), *([legend] if (legend := footnotes.legend()) else [])]
    means = [_mean(variant, str(baseline), list(ratios.values()), words) for variant in compared]
    parts.append(" ".join([mean for mean in means if mean] + [_note(lines, words)]))
    parts.append(provenance(lines, _command(lines, variants, baseline), words))
    return "\n\n".join(parts)


def _shape(case: object) -> _Shape:
    assert isinstance(case, dict)
    if missing := sorted({"head_dim", "mask", "seq"} - case.keys()):
        raise ValueError(f"the case of a line of the suite {SUITE} has no {', '.join(missing)}: {case}")
    return int(case["head_dim"]), str(case["mask"]), int(case["seq"])


def _tflops(line: Line | None, words: Words, footnotes: Footnotes) -> str:
    if line is None:
        return "–"
    if line.median is None:
        return without_figure(line, words)
    return footnotes.marked(_number(work_of(line.case).tflops(line.median)), line)


def _limit(lines: list[Line]) -> str:
    known = [line for line in lines if line.limit is not None]
    return _number(work_of(known[0].case).tflops(float(known[0].limit or 0.0))) if known else "–"


def _ratio(line: Line | None, footnotes: Footnotes) -> str:
    if line is None or line.median is None:
        return "–"
    return footnotes.marked(spread(f"{line.median:.2f}x", f"{line.low:.2f}", f"{line.high:.2f}"), line)


def _mean(variant: str, baseline: str, ratios: list[Line], words: Words) -> str:
    values = [
        line.median
        for line in ratios
        if line.variant == variant and line.median is not None and not set(line.flags) - DOUBTFUL
    ]
    if not values:
        return ""
    mean = f"{geometric_mean(values):.2f}x"
    return words.mean.format(variant=variant, baseline=baseline, ratio=mean, points=len(values))


def _note(lines: list[Line], words: Words) -> str:
    case = lines[0].case
    return words.attention_note.format(
        dtype=case["dtype"],
        tokens=int(case["batch"]) * int(case["seq"]),
        width=int(case["heads"]) * int(case["head_dim"]),
        rounds=max(line.repeats for line in lines),
    )


def _number(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def _command(lines: list[Line], variants: list[str], baseline: str | None) -> str:
    case = lines[0].case
    command = [
        "tileflash bench attention",
        f"--head-dims {_values(lines, 'head_dim')}",
        f"--lengths {_values(lines, 'seq')}",
        f"--masks {_values(lines, 'mask')}",
        f"--direction {_values(lines, 'direction')}",
        f"--variants {','.join(variants)}",
        f"--tokens {int(case['batch']) * int(case['seq'])}",
        f"--width {int(case['heads']) * int(case['head_dim'])}",
        f"--rounds {max(line.repeats for line in lines)}",
    ]
    if baseline not in (None, "fa2" if "fa2" in variants else variants[0]):
        command.append(f"--baseline {baseline}")
    if case["dtype"] != "bfloat16":
        command.append(f"--dtype {case['dtype']}")
    if lines[0].gpu.startswith("CPU"):
        command.append("--device cpu")
    return " ".join(command)


def _values(lines: list[Line], name: str) -> str:
    values: dict[CaseValue, None] = dict.fromkeys(line.case[name] for line in lines)
    return ",".join(str(value) for value in values)
