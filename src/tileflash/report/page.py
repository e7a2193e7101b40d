"""The ledger as one HTML page that needs nothing else: conclusions, plots, sortable tables, and how to repeat each figure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tileflash.bench.audit import RATIO, Audit, audit
from tileflash.bench.flags import DOUBTFUL
from tileflash.bench.ledger import Line
from tileflash.bench.markdown import newest_runs
from tileflash.bench.statistic import geometric_mean
from tileflash.bench.table_words import words_for
from tileflash.bench.tables import BLOCKS
from tileflash.compare.document import Block, Bullets, Cell, Code, Document, Facts, Heading, Paragraph, Plots, Table
from tileflash.compare.report_html import to_html
from tileflash.report.against import Against
from tileflash.report.drawings import plots_of
from tileflash.report.look import COLOURS, SCRIPT, STYLE

_SPREAD = re.compile(r"^(.*?) (\([^()]*–[^()]*\))(.*)$")
_MARKS = "¹²³⁴⁵⁶⁷⁸⁹"
_TITLES = {
    "attention-summary": "Attention in short",
    "attention-forward": "Attention, forward",
    "attention-backward": "Attention, backward",
    "train": "Training steps, with and without --flash",
    "lengths": "Attention by length at one batch",
    "memory": "Memory of attention",
    "model-memory": "Memory of a whole model (counted)",
    "scaling": "Time and memory a token",
    "training": "Throughput of forward and backward by batch and length",
    "generation": "Generation by context",
    "versions": "Versions of FlashAttention",
    "features": "Features by version",
    "models": "Whole models",
    "host": "Host time of a call",
    "host-steps": "Where the host's time of a call goes",
}


def build_page(lines: Sequence[Line], changes: Against | None = None) -> str:
    """The page of these lines, each block with the newest run of each GPU. ValueError where there are none."""
    if not lines:
        raise ValueError("the ledger holds no lines; `tileflash bench` makes some")
    judged = audit(lines)
    gpus = list(dict.fromkeys(line.gpu for line in judged.lines))
    blocks: list[Block] = [*_conclusion(judged), *_machine(judged.lines)]
    if changes is not None:
        blocks += [Heading(2, "Against the older ledger"), *_blocks(changes.markdown())]
    for gpu in gpus:
        if plots := plots_of([line for line in judged.lines if line.gpu == gpu]):
            blocks += [Heading(2, "Plots" if len(gpus) == 1 else f"Plots: {gpu}"), Plots(tuple(plots))]
    words = words_for("en")
    for name, (make, _) in BLOCKS.items():
        if markdown := make(judged.lines, words):
            blocks += [Heading(2, _TITLES.get(name) or name.replace("-", " ").capitalize()), *_blocks(markdown)]
    newest = max(line.date for line in lines)
    document = Document(
        title="Measured with tileflash",
        subtitle=f"{', '.join(gpus)} · {newest[:10]}",
        language="en",
        blocks=tuple(blocks),
    )
    return to_html(document, COLOURS, STYLE, SCRIPT)


def _conclusion(judged: Audit) -> Iterator[Block]:
    if sentences := [
        _speeds(run) for run in newest_runs([line for line in judged.lines if line.metric.startswith(RATIO)])
    ]:
        yield Paragraph(" ".join(sentences), "lead")
    complaints = judged.complaints()
    if complaints:
        count = f"{len(complaints)} finding{'s' if len(complaints) > 1 else ''}"
        yield Paragraph(f"The audit has {count}; the figures concerned are marked in the tables.", "warning")
        yield Bullets(tuple(complaints[:20] + ([f"and {len(complaints) - 20} more"] if len(complaints) > 20 else [])))
    else:
        yield Paragraph(
            "The audit found nothing: no figure beyond its limit, no contradiction, no wide spread.", "note"
        )


def _speeds(ratios: Sequence[Line]) -> str:
    """What one GPU's newest run says in a sentence for each direction: geometric means over all its points."""
    sentences = [
        f"{ratios[0].gpu}, attention, speed relative to {ratios[0].metric.removeprefix(RATIO)} (geometric means)."
    ]
    sound = [line for line in ratios if line.median and not set(line.flags) - DOUBTFUL]
    for direction in dict.fromkeys(str(line.case.get("direction", "forward")) for line in sound):
        medians: dict[str, list[float]] = {}
        for line in sound:
            if line.case.get("direction", "forward") == direction:
                medians.setdefault(line.variant, []).append(line.median or 0.0)
        means = ", ".join(f"{variant} {geometric_mean(values):.2f}x" for variant, values in medians.items())
        sentences.append(f"{direction.capitalize()}: {means}.")
    return " ".join(sentences)


def _machine(lines: Sequence[Line]) -> Iterator[Block]:
    """Every GPU's newest run: versions, commit, and what its sensors saw."""
    for run in newest_runs(lines):
        newest = max(run, key=lambda line: line.date)
        pairs = {"GPU": newest.gpu, **newest.versions, "commit": newest.commit, "date": newest.date, "run": newest.run}
        for line in run:
            if line.suite == "device":
                pairs[line.metric] = f"{line.median:,.6g} ({line.low:,.6g} – {line.high:,.6g})"
                if "reasons" in line.case:
                    pairs["slower clocks"] = str(line.case["reasons"])
        yield Heading(2, "Environment")
        yield Facts(tuple(pairs.items()))


def _blocks(markdown: str) -> Iterator[Block]:
    """Blocks of the Markdown that the tables are made as, so that both forms say the same."""
    for part in markdown.split("\n\n"):
        if part.startswith("|"):
            yield _table(part.splitlines())
        elif command := re.fullmatch(r"\*(.*) Repeat it: `([^`]+)`\*", part, re.DOTALL):
            yield Paragraph(command.group(1), "note")
            yield Code(command.group(2))
        elif part.strip():
            yield Paragraph(re.sub(r"\*\*|`", "", part), "note")


def _table(rows: list[str]) -> Table:
    head, rule, *body = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return Table(
        columns=tuple(head),
        rows=tuple(tuple(_cell(text, index > 0) for index, text in enumerate(row)) for row in body),
        numeric=frozenset(index for index, cell in enumerate(rule) if cell.endswith(":")),
        group_starts=frozenset(range(len(body))),
    )


def _cell(text: str, may_be_marked: bool) -> Cell:
    text = re.sub(r"\*\*|`", "", text)
    spread = ""
    if found := _SPREAD.match(text):
        text, spread = f"{found.group(1)}{found.group(3)}", found.group(2)
    flagged = may_be_marked and any(mark in text for mark in _MARKS)
    return Cell(text, spread, "bad" if flagged else "missing" if text == "–" else "")
