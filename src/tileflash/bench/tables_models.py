"""The blocks of the suites about whole models: `model-memory`, `training`, `models`, `generation`."""

from __future__ import annotations

from collections.abc import Sequence

from tileflash.bench import generation, model_memory
from tileflash.bench.ledger import Line
from tileflash.bench.markdown import newest_runs, provenance, table
from tileflash.bench.model_memory import FLASH, INFERENCE, STANDARD, TRAINING
from tileflash.bench.table_grid import GIB, MIB, Column, Grid, Key, Quotient, case_values, command, number
from tileflash.bench.table_words import Words

_CARD_GIB = 24
_MODEL = Key("model", lambda line: str(line.case["model"]))
_BATCH = Key("batch × S", lambda line: f"{line.case['batch']} × {int(line.case['seq']):,}")
_PEAK = Column("peak MB, {variant}", "peak_bytes", lambda line: number((line.median or 0.0) / MIB))


def model_memory_block(lines: Sequence[Line], words: Words) -> str:
    """Counted memory of a model by context, inference and training. Empty without lines."""
    return "\n\n".join(_model_memory(run, words) for run in newest_runs(_of(lines, model_memory.SUITE)))


def _model_memory(run: list[Line], words: Words) -> str:
    parts = []
    for use, last in ((INFERENCE, f"fits {_CARD_GIB} GiB, standard / flash"), (TRAINING, "reduction")):
        own = [line for line in run if line.case["use"] == use]
        rows = []
        for seq in dict.fromkeys(line.case["seq"] for line in own):
            totals = {
                line.variant: line.median or 0.0
                for line in own
                if line.case["seq"] == seq and line.metric == "counted_bytes"
            }
            standard, flash = totals[STANDARD], totals[FLASH]
            fits = " / ".join("yes" if total <= _CARD_GIB * GIB else "no" for total in (standard, flash))
            told = fits if use == INFERENCE else f"{1 - flash / standard:.0%}"
            rows.append([f"{int(seq):,}", f"{standard / GIB:.1f}", f"{flash / GIB:.1f}", told])
        case = own[0].case
        headings = [f"{case['model']}, {use}, batch {case['batch']}: context", "standard, GiB", "flash, GiB", last]
        parts.append(table(headings, rows, left=1))
    note = (
        "Counted from the shape, not measured: the least that must be there. Inference: weights, K/V cache and the widest moment of a "
        "layer, 16 bits. Training: fp32 weights, gradients and AdamW's moments (16 bytes a parameter), what the layers keep, the logits."
    )
    by_use = {use: [line for line in run if line.case["use"] == use] for use in (INFERENCE, TRAINING)}
    options = {"model": str(run[0].case["model"])}
    for use, own in by_use.items():
        options |= {f"{use}-lengths": case_values(own, "seq"), f"{use}-batch": str(own[0].case["batch"])}
    return "\n\n".join([*parts, note, provenance(run, command("model-memory", [], options), words)])


def training_block(lines: Sequence[Line], words: Words) -> str:
    """Samples a second by batch and length. Empty without lines."""
    return "\n\n".join(_steps("training", run, words) for run in newest_runs(_of(lines, "training")))


def models_block(lines: Sequence[Line], words: Words) -> str:
    """Whole models at one batch. Empty without lines."""
    return "\n\n".join(_steps("models", run, words) for run in newest_runs(_of(lines, "models")))


def _steps(name: str, run: list[Line], words: Words) -> str:
    rate = (
        Column("samples/s, {variant}", "samples_per_s", lambda line: number(line.median or 0.0))
        if name == "training"
        else Column("tok/s, {variant}", "tokens_per_s", lambda line: number(line.median or 0.0))
    )
    milliseconds = Column("ms a step, {variant}", "step_ms", lambda line: number(line.median or 0.0))
    columns: list[Column | Quotient] = [rate, milliseconds, _PEAK]
    if any(line.metric == "millijoule_per_token" for line in run):
        columns.append(Column("mJ a token, {variant}", "millijoule_per_token", lambda line: number(line.median or 0.0)))
    columns.append(Quotient("speed-up, {variant}", "step_ms"))
    text = Grid(run, [_MODEL, _BATCH], words).render(columns)
    case = run[0].case
    note = (
        f"Forward and backward, {case['dtype']} weights and gradients, no optimizer, random tokens; each in a process of its own; "
        "speed-up = baseline / flash in ms a step, as far apart as both figures' spreads allow."
    )
    cases = dict.fromkeys(f"{line.case['model']}:{line.case['batch']}x{line.case['seq']}" for line in run)
    options = {"cases": ",".join(cases), "dtype": str(case["dtype"])}
    return "\n\n".join([text, note, provenance(run, command(name, run, options), words)])


def generation_block(lines: Sequence[Line], words: Words) -> str:
    """Tokens a second by context. Empty without lines."""
    return "\n\n".join(_generation(run, words) for run in newest_runs(_of(lines, generation.SUITE)))


def _generation(run: list[Line], words: Words) -> str:
    columns: list[Column | Quotient] = [
        Column("tok/s, {variant}", "tokens_per_s", lambda line: number(line.median or 0.0)),
        Column("ms a token, {variant}", "token_ms", lambda line: number(line.median or 0.0)),
        _PEAK,
        Quotient("speed-up, {variant}", "token_ms"),
    ]
    text = Grid(run, [Key("context", lambda line: f"{int(line.case['seq']):,}")], words).render(columns)
    case, rounds = run[0].case, max(line.repeats for line in run)
    note = (
        f"{case['model']}, {case['dtype']}, batch 1. There is no K/V cache yet: each token computes its whole context again; the peak is "
        "of one pass over the context, with the weights."
    )
    options = {
        "model": str(case["model"]), "contexts": case_values(run, "seq"), "new-tokens": str(case["new_tokens"]),
        "dtype": str(case["dtype"]), "rounds": str(rounds),
    }  # fmt: skip
    return "\n\n".join([text, note, provenance(run, command("generation", run, options), words)])


def _of(lines: Sequence[Line], suite: str) -> list[Line]:
    return [line for line in lines if line.suite == suite]
