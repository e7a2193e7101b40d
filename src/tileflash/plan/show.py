"""Plans as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tileflash.bench.markdown import table
from tileflash.models import parameter_count
from tileflash.plan.layouts import Plan
from tileflash.plan.machine import Machine, assumptions

_GB = 1e9
_STATES = ("parameters", "gradients", "optimizer", "weights in 16 bits", "messages")


def one_layout(model: str, found: Plan, on: Machine) -> str:
    """A layout with its memory by what it is for, and its time."""
    shape, peak = found.shape, found.count.peak
    paragraphs = [
        f"{model}: {parameter_count(shape.model):,} parameters; a step of {found.step_tokens:,} tokens, {found.layout.label}: "
        f"{shape.micro_batches} x {shape.batch} x {shape.length} a data rank"
    ]
    rows = [[part, f"{nbytes / _GB:.2f}"] for part, nbytes in peak.parts.items() if nbytes]
    rows.append([f"peak{' of the fullest rank' if found.layout.ranks > 1 else ''}", f"{peak.nbytes / _GB:.2f}"])
    paragraphs.append(table(["at the highest moment", "GB"], rows, left=1))
    if peak.operators:
        most = ", ".join(f"{name} {nbytes / _GB:.2f}" for name, nbytes in list(peak.operators.items())[:6])
        paragraphs.append(f"activations by operator, GB: {most}")
    paragraphs.append(_fits(found, on))
    if found.time is None:
        paragraphs.append("no time is predicted: the shares of the peak are known for bfloat16")
    else:
        parts = [f"computing {found.time.compute_ms:.1f}"]
        parts += [f"waiting for {axis} messages {ms:.1f}" for axis, ms in found.time.waiting_ms.items() if ms >= 0.05]
        parts += [f"idle in the pipeline {found.time.idle_ms:.1f}"] if found.time.idle_ms else []
        told = f"predicted: {found.time.total_ms:.1f} ms a step ({', '.join(parts)}), {found.tokens_per_s:,.0f} tok/s"
        paragraphs.append(told)
    return "\n\n".join([*paragraphs, _assumptions(found.layout.ranks, on)])


def many_layouts(model: str, worlds: Sequence[Sequence[Plan]], on: Machine, most: int | None, *, unfit: bool) -> str:
    """The fastest layouts of each number of ranks, at most `most`; with `unfit` also those that do not fit."""
    several = len(worlds) > 1
    headings = ["layout", "passes", "peak GB", "states", "the rest", "ms a step", "waiting, idle", "tok/s a GPU"]
    if several:
        headings = ["GPUs", "tokens a step", *headings, "of the fewest GPUs'"]
    rows: list[list[str]] = []
    first_rate: float | None = None
    for plans in worlds:
        shown = [found for found in plans if found.fits or unfit][:most]
        for found in shown:
            rate = None if found.tokens_per_s is None else found.tokens_per_s / found.layout.ranks
            first_rate = first_rate or rate
            row = _cells(found)
            if several:
                share = "–" if rate is None or first_rate is None else f"{rate / first_rate:.0%}"
                row = [f"{found.layout.ranks:,}", f"{found.step_tokens:,}", *row, share]
            rows.append([*row, "" if found.fits else "does not fit"] if unfit else row)
    if unfit:
        headings.append("")
    counted = [
        f"{len(plans)} of {plans[0].layout.ranks:,} GPUs, {sum(found.fits for found in plans)} fit" for plans in worlds
    ]
    ranks = worlds[-1][0].layout.ranks
    told = f"{model} on {on.gpu.name}, the fastest layouts first. Looked at: {'; '.join(counted)}."
    if not rows:
        return f"{told}\n\nNone fits into {on.usable_bytes / _GB:.0f} GB; --all shows them."
    return "\n\n".join([told, table(headings, rows, left=1), _assumptions(ranks, on)])


def _cells(found: Plan) -> list[str]:
    peak, time = found.count.peak, found.time
    states = sum(peak.parts[name] for name in _STATES)
    cells = [found.layout.label, str(found.shape.micro_batches)]
    cells += [f"{nbytes / _GB:.1f}" for nbytes in (peak.nbytes, states, peak.nbytes - states)]
    if time is None or found.tokens_per_s is None:
        return [*cells, "–", "–", "–"]
    share = 1 - time.compute_ms / time.total_ms
    return [*cells, f"{time.total_ms:,.0f}", f"{share:.0%}", f"{found.tokens_per_s / found.layout.ranks:,.0f}"]


def _fits(found: Plan, on: Machine) -> str:
    usable, needed = on.usable_bytes, found.count.peak_bytes
    if found.fits:
        return f"fits {on.gpu.name}: {(usable - needed) / _GB:.1f} of {usable / _GB:.1f} GB stay free"
    return f"does not fit {on.gpu.name}: {(needed - usable) / _GB:.1f} GB more than its {usable / _GB:.1f}"


def _assumptions(ranks: int, on: Machine) -> str:
    return "\n".join(f"- {sentence}" for sentence in assumptions(on, ranks=ranks))


def record(plans: Sequence[Plan], on: Machine) -> dict[str, Any]:
    """All of it, for JSON."""
    return {
        "gpu": on.gpu.name,
        "usable_bytes": on.usable_bytes,
        "assumptions": assumptions(on, ranks=max(found.layout.ranks for found in plans)),
        "plans": [_record(found) for found in plans],
    }


def _record(found: Plan) -> dict[str, Any]:
    count, time = found.count, found.time
    return {
        "layout": found.layout.label,
        "ranks": found.layout.ranks,
        "micro_batches": found.shape.micro_batches,
        "step_tokens": found.step_tokens,
        "fits": found.fits,
        "peak_bytes": count.peak_bytes,
        "parts_bytes": count.peak.parts,
        "activations_bytes_by_operator": count.peak.operators,
        "product_flops": count.work.product_flops,
        "attention_flops": count.work.attention_flops,
        "moved_bytes": count.work.moved_bytes,
        "operators": count.work.operators,
        "sent_bytes": {axis: messages.nbytes for axis, messages in count.messages.items()},
        "step_ms": None if time is None else time.total_ms,
        "compute_ms": None if time is None else time.compute_ms,
        "waiting_ms": None if time is None else time.waiting_ms,
        "idle_ms": None if time is None else time.idle_ms,
        "tokens_per_s": found.tokens_per_s,
    }


_BEGIN, _END = "<!-- tileflash:plan -->", "<!-- tileflash:end -->"


def filled(text: str, content: str, name: str) -> str:
    """A Markdown text with `content` in its block `<!-- tileflash:plan -->`; ValueError where there is none. `name` stands for the text."""
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{name} holds no block {_BEGIN} ... {_END}")
    return f"{before}{begin}\n{content}\n{end}{after}"
