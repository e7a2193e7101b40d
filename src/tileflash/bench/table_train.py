"""The block `train`: whole training steps, baseline against flash."""

from __future__ import annotations

from collections.abc import Sequence

from tileflash.bench.footnotes import Footnotes, without_figure
from tileflash.bench.ledger import Line
from tileflash.bench.markdown import newest_runs, provenance, spread, table
from tileflash.bench.table_words import Words

SUITE = "train"
_VARIANTS = ("baseline", "flash")
_BYTES_PER_MB = 2**20  # as PyTorch's and nvidia-smi's figures are read
_NONE = "–"
_Case = tuple[str, int, int]  # model, batch, seq


def train_block(lines: Sequence[Line], words: Words) -> str:
    """A table for each GPU: a row for each model and sequence. Empty without lines."""
    chosen = [line for line in lines if line.suite == SUITE and line.variant in _VARIANTS]
    return "\n\n".join(_run(run, words) for run in newest_runs(chosen))


def _run(lines: list[Line], words: Words) -> str:
    cases = sorted(dict.fromkeys(map(_case, lines)), key=lambda case: (case[0], case[2], case[1]))
    found = {(_case(line), line.variant, line.metric): line for line in lines}
    names = [words.variants[variant] for variant in _VARIANTS]
    headings = [words.model, words.batch_by_sequence, words.runs]
    for heading in (words.step_ms, words.tokens_per_s, words.peak_mb):
        headings += [heading.format(variant=name) for name in names]
    headings += [words.speed_up, words.memory_saving]
    rows, footnotes = [], Footnotes(words)
    for case in cases:
        row = [
            case[0],
            f"{case[1]} × {case[2]}",
            _runs([found.get((case, variant, "step_ms")) for variant in _VARIANTS]),
        ]
        for metric in ("step_ms", "tokens_per_s", "peak_bytes"):
            row += [_cell(found.get((case, variant, metric)), metric, words, footnotes) for variant in _VARIANTS]
        step, peak = (
            [found.get((case, variant, metric)) for variant in _VARIANTS] for metric in ("step_ms", "peak_bytes")
        )
        row += [_ratio(_speed_up(*step), step, footnotes), _ratio(_saving(*peak), peak, footnotes)]
        rows.append(row)
    dtypes = ", ".join(dict.fromkeys(str(line.case["dtype"]) for line in lines))
    graph = _cuda_graph(lines)
    note = words.train_note.format(dtype=dtypes, graph="" if graph is None else words.cuda_graph[graph])
    parts = [table(headings, rows, left=2), footnotes.legend(), note, provenance(lines, _command(lines), words)]
    return "\n\n".join(part for part in parts if part)


def _case(line: Line) -> _Case:
    return str(line.case["model"]), int(line.case["batch"]), int(line.case["seq"])


def _cell(line: Line | None, metric: str, words: Words, footnotes: Footnotes) -> str:
    if line is None:
        return _NONE
    if line.median is None:
        return without_figure(line, words)
    if metric == "step_ms":
        return footnotes.marked(f"{line.median:,.2f}", line)
    value = line.median if metric == "tokens_per_s" else line.median / _BYTES_PER_MB
    return footnotes.marked(f"{value:,.0f}", line)


def _ratio(text: str, lines: Sequence[Line | None], footnotes: Footnotes) -> str:
    """A ratio is as good as the figures that it is of."""
    return text if text == _NONE else footnotes.marked(text, *lines)


def _runs(lines: list[Line | None]) -> str:
    """How many runs a row's figures are the median of: a number, or one for each scheme where they differ."""
    counts = [str(line.repeats) for line in lines if line is not None and line.median is not None]
    return " / ".join(counts if len(set(counts)) > 1 else counts[:1]) or _NONE


def _speed_up(baseline: Line | None, flash: Line | None) -> str:
    quotients = _quotients(baseline, flash)
    if quotients is None:
        return _NONE
    median, low, high = quotients
    if _is_single(baseline, flash):
        return f"{median:.2f}x"
    return spread(f"{median:.2f}x", f"{low:.2f}", f"{high:.2f}")


def _saving(baseline: Line | None, flash: Line | None) -> str:
    quotients = _quotients(flash, baseline)
    if quotients is None:
        return _NONE
    median, low, high = quotients
    if _is_single(baseline, flash):
        return f"{100 * (1 - median):.1f} %"
    return spread(f"{100 * (1 - median):.1f} %", f"{100 * (1 - high):.1f}", f"{100 * (1 - low):.1f}")


def _is_single(*lines: Line | None) -> bool:
    """Whether no spread is known: lowest and highest of one run are the run itself."""
    return all(line is not None and line.repeats == 1 for line in lines)


def _quotients(above: Line | None, below: Line | None) -> tuple[float, float, float] | None:
    """(median, lowest, highest) of a quotient of two figures, as far apart as their own spreads allow."""
    if above is None or below is None:
        return None
    if above.median is None or above.low is None or above.high is None:
        return None
    if below.median is None or below.low is None or below.high is None or below.low <= 0:
        return None
    return above.median / below.median, above.low / below.high, above.high / below.low


def _cuda_graph(lines: list[Line]) -> bool | None:
    """Whether the steps were CUDA graphs; None where the lines (of before it was recorded) do not say, or not as one."""
    found = {line.case.get("cuda_graph") for line in lines}
    return bool(found.pop()) if found in ({True}, {False}) else None


def _command(lines: list[Line]) -> str:
    models = " ".join(dict.fromkeys(str(line.case["model"]) for line in lines))
    lengths = ",".join(map(str, sorted({int(line.case["seq"]) for line in lines})))
    batches = {int(line.case["batch"]) for line in lines}
    batch = f" --batch-size {batches.pop()}" if len(batches) == 1 else ""
    device = " --device cpu" if lines[0].gpu.startswith("CPU") else ""
    graph = {True: " --cuda-graph", False: " --no-cuda-graph", None: ""}[_cuda_graph(lines)]
    repeats = max(line.repeats for line in lines)
    return f"tileflash compare {models} --lengths {lengths}{batch} --repeats {repeats}{device}{graph}"
