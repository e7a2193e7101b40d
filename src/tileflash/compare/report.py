"""Builds a comparison's report from what was measured: which blocks, in which order, with which words."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tileflash.compare import numbers, plots, tables
from tileflash.compare.conclusions import SINGLE_REPEAT_SPREAD, SPREAD_FLOOR, conclusion
from tileflash.compare.document import Block, Bullets, Code, Document, Facts, Heading, Paragraph, Plot, Plots
from tileflash.compare.figures import Comparison, compare_setting
from tileflash.compare.plan import SCHEMES, CompareConfig, Run, compare_command, model_name
from tileflash.compare.results import Outcome, RunResult
from tileflash.compare.texts import TEXTS, Texts, texts

_ENVIRONMENT = ("driver", "cuda", "torch", "triton", "python", "commit")


@dataclass(frozen=True)
class Findings:
    """What a comparison has measured. `stopped`: None when all is done, else "interrupted" or "budget"."""

    config: CompareConfig
    results: dict[Run, RunResult]
    planned: int
    stopped: str | None = None

    @cached_property
    def first(self) -> list[Comparison]:
        """One comparison a model in the setting reported first: the public report's, else the shortest length."""
        settings = self.config.public_settings() or [self.config.length_settings(m)[0] for m in self.config.models]
        return [compare_setting(setting, self.results) for setting in settings]

    @cached_property
    def by_length(self) -> dict[str, list[Comparison]]:
        """model -> its comparisons, shortest sequence first."""
        return {
            model: [compare_setting(setting, self.results) for setting in self.config.length_settings(model)]
            for model in self.config.models
        }

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """Every comparison once, model by model, the setting reported first before the lengths."""
        found = []
        for model, first in zip(self.config.models, self.first, strict=True):
            found += [first, *(c for c in self.by_length[model] if c.setting != first.setting)]
        return found

    def environments(self) -> list[dict[str, Any]]:
        return [result.environment for result in self.results.values() if result.environment]

    def cuda_graphs(self) -> set[bool]:
        """Whether steps were one CUDA graph, as the runs logged it: one value, both where runs differ, or nothing."""
        return {result.cuda_graph for result in self.results.values() if result.cuda_graph is not None}

    @property
    def on_gpu(self) -> bool:
        return any(environment.get("gpu") for environment in self.environments())

    def failures(self) -> list[RunResult]:
        return [r for r in self.results.values() if r.outcome in (Outcome.FAILED, Outcome.TIMED_OUT)]


def build_report(findings: Findings) -> Document:
    """The report in the language of its configuration."""
    say = texts(findings.config.language)
    environment = next(iter(findings.environments()), {})
    device = environment.get("gpu") or environment.get("cpu") or say("cell.none")
    blocks: list[Block] = [Paragraph(conclusion(findings.first, findings.by_length, say), "lead")]
    if findings.stopped is not None:
        blocks.append(_incomplete(findings, say))
    blocks += _environment(findings, environment, say)
    blocks += _configuration(findings, say)
    blocks += [Heading(2, say("heading.definitions")), _definitions(findings, say)]
    blocks += _first_table(findings, say)
    for model in findings.config.models:
        blocks += _by_length(findings, model, say)
    blocks += _losses(findings, say)
    blocks += _reading(findings, say)
    blocks += _failures(findings, say)
    return Document(
        title=say("title", models=say.listed([model_name(m) for m in findings.config.models])),
        subtitle=say("subtitle", device=device, date=_date(environment)),
        language=findings.config.language,
        blocks=tuple(blocks),
    )


def _date(environment: dict[str, Any]) -> str:
    return str(environment.get("date") or "–").replace("T", " ").replace("Z", " UTC")


def _incomplete(findings: Findings, say: Texts) -> Block:
    seconds = findings.config.budget_seconds or 0
    reason = say(f"reason.{findings.stopped}", seconds=f"{seconds:g}")
    return Paragraph(
        say("note.incomplete", done=len(findings.results), planned=findings.planned, reason=reason), "warning"
    )


def _environment(findings: Findings, environment: dict[str, Any], say: Texts) -> list[Block]:
    gpu = environment.get("gpu")
    memory = environment.get("gpu_memory_bytes")
    if gpu and memory:
        gpu = f"{gpu}, {memory / 2**30:.0f} GiB"
    pairs = [(say("row.device"), gpu or say("row.no_gpu")), (say("row.cpu"), environment.get("cpu"))]
    pairs += [(say(f"row.{name}"), environment.get(name)) for name in _ENVIRONMENT]
    pairs.append((say("row.date"), _date(environment)))
    blocks: list[Block] = [Heading(2, say("heading.environment"))]
    blocks.append(Facts(tuple((name, str(value)) for name, value in pairs if value)))
    differing = [
        name for name in ("gpu", "cpu", *_ENVIRONMENT) if len({str(e.get(name)) for e in findings.environments()}) > 1
    ]
    if differing:
        blocks.append(Paragraph(say("note.mixed", what=say.listed(differing)), "warning"))
    return blocks


def _configuration(findings: Findings, say: Texts) -> list[Block]:
    config = findings.config
    pairs = [
        (say("row.models"), say.listed([_with_parameters(findings, model) for model in config.models])),
        (say("row.lengths"), say.listed([str(length) for length in sorted(config.lengths)])),
        (say("row.batch"), str(config.batch_size)),
        (say("row.iterations"), str(config.num_iteration)),
        (say("row.dtype"), config.dtype),
        (say("row.repeats"), str(config.repeats)),
    ]
    for scheme in SCHEMES:
        used = sorted(
            {
                _attention_words(r.attention, say)
                for run, r in findings.results.items()
                if run.scheme == scheme and r.attention
            }
        )
        if used:
            pairs.append((say("row.attention", scheme=scheme), "; ".join(used)))
    if words := graph_words(findings, say):
        pairs.append((say("row.cuda_graph"), words))
    if config.public_setting:
        pairs.append((say("row.public"), say("value.public")))
    command = Code(shlex.join(compare_command(config)))
    return [
        Heading(2, say("heading.configuration")),
        Facts(tuple(pairs)),
        Paragraph(say("value.order", seed=config.seed), "note"),
        Heading(3, say("heading.command")),
        command,
    ]


def graph_words(findings: Findings, say: Texts) -> str:
    """Whether the steps were CUDA graphs; empty where no run has said."""
    keys = {True: "value.cuda_graph", False: "value.no_cuda_graph"}
    found = findings.cuda_graphs()
    return say("value.cuda_graph_mixed") if len(found) > 1 else "".join(say(keys[value]) for value in found)


def _attention_words(attention: str, say: Texts) -> str:
    """What the trainer logged, in the report's language where it is a sentence; names of backends are the same in all."""
    key = "attention.unfused"
    return say(key) if attention == TEXTS[key][0] else attention


def _with_parameters(findings: Findings, model: str) -> str:
    # The fewest: a learned position table grows with the sequence length.
    counts = [r.parameters for run, r in findings.results.items() if run.setting.model == model and r.parameters]
    count = numbers.parameters(min(counts)) if counts else ""
    return f"{model_name(model)} ({count})" if count else model_name(model)


def _definitions(findings: Findings, say: Texts) -> Block:
    peak = "define.peak_gpu" if findings.on_gpu else "define.peak_cpu"
    floor, single = numbers.percent(SPREAD_FLOOR), numbers.percent(SINGLE_REPEAT_SPREAD)
    return Bullets(
        (
            say("define.latency", steps=findings.config.num_iteration),
            say("define.throughput"),
            say(peak),
            say("define.speedup"),
            say("define.gain"),
            say("define.saving"),
            say("define.spread", floor=floor, single=single),
            say("define.oom"),
        )
    )


def _first_table(findings: Findings, say: Texts) -> list[Block]:
    if not findings.config.public_setting:
        length = findings.first[0].setting.sequence_length
        heading = say("heading.first", length=length)
        return [Heading(2, heading), tables.models_table(findings.first, say, findings.on_gpu)]
    return [
        Heading(2, say("heading.public")),
        Paragraph(say("value.public"), "note"),
        tables.models_table(findings.first, say, findings.on_gpu),
        Paragraph(say("public.caption"), "note"),
        tables.public_table(say),
    ]


def _by_length(findings: Findings, model: str, say: Texts) -> list[Block]:
    comparisons = findings.by_length[model]
    name = model_name(model)
    blocks: list[Block] = [Heading(2, say("heading.lengths", model=name))]
    blocks.append(tables.lengths_table(comparisons, say, findings.on_gpu))
    if any(c.scheme(s).outcome is not None for c in comparisons for s in SCHEMES):
        drawn = {"time": plots.step_time, "memory": plots.peak_memory, "speedup": plots.speedup}
        captions = {kind: say(f"plot.{kind}", model=name) for kind in drawn}
        blocks.append(
            Plots(tuple(Plot(f"{kind}-{name}", captions[kind], draw(comparisons)) for kind, draw in drawn.items()))
        )
    return blocks


def _losses(findings: Findings, say: Texts) -> list[Block]:
    """The table of all settings; curves of the first and of the longest that both schemes finished."""
    drawn = []
    for model in findings.config.models:
        both = [c for c in findings.comparisons if c.setting.model == model and c.loss_gap is not None]
        drawn += both[:1] + both[1:][-1:]
    curves = [
        Plot(
            f"loss-{comparison.setting.name}",
            say(
                "plot.loss",
                model=model_name(comparison.setting.model),
                length=comparison.setting.sequence_length,
            ),
            plots.losses(comparison),
        )
        for comparison in drawn
    ]
    blocks: list[Block] = [Heading(2, say("heading.losses")), tables.losses_table(findings.comparisons, say)]
    return [*blocks, Plots(tuple(curves))] if curves else blocks


def _reading(findings: Findings, say: Texts) -> list[Block]:
    reading = Bullets((say("read.schemes"), say("read.losses"), say("read.slopes")))
    lengths = {c.setting.sequence_length for c in findings.comparisons}
    captured = findings.cuda_graphs() == {True}
    caveats = [say("caveat.short" if captured else "caveat.short_host")] if min(lengths) <= 64 else []
    caveats += [say("caveat.steps", steps=findings.config.num_iteration), say("caveat.baseline")]
    caveats.append(say("caveat.machine") if findings.on_gpu else say("caveat.cpu"))
    return [
        Heading(2, say("heading.reading")),
        reading,
        Heading(2, say("heading.caveats")),
        Bullets(tuple(caveats)),
    ]


def _failures(findings: Findings, say: Texts) -> list[Block]:
    failures = findings.failures()
    blocks: list[Block] = [Heading(2, say("heading.failures"))] if failures else []
    for result in failures:
        blocks += [Heading(3, result.run.name), Paragraph(result.message)]
        if result.record.tail:
            blocks.append(Code(result.record.tail))
    return blocks
