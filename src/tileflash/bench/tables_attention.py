"""The blocks of the suites `lengths`, `scaling`, `versions`, `memory` `host` and `host-steps`, and the features of the versions."""

from __future__ import annotations

from collections.abc import Sequence

from tileflash.bench import host, host_steps, memory
from tileflash.bench.attention import work_of
from tileflash.bench.audit import RATIO
from tileflash.bench.ledger import Line
from tileflash.bench.markdown import newest_runs, provenance, table
from tileflash.bench.memory import CountedBytes, MemorySuite, count_bytes
from tileflash.bench.table_grid import MIB, NONE, Column, Grid, Key, Quotient, case_values, command, number
from tileflash.bench.table_words import Words

_LENGTH = Key("S", lambda line: f"{int(line.case['seq']):,}")
_PEAK = Column("peak MiB, {variant}", "peak_bytes", lambda line: number((line.median or 0.0) / MIB))


def lengths_block(lines: Sequence[Line], words: Words) -> str:
    """Forward time by length at a fixed batch, and the best speed-up over the first variant. Empty without lines."""
    return "\n\n".join(_lengths(run, words) for run in newest_runs(_of(lines, "lengths")))


def _lengths(run: list[Line], words: Words) -> str:
    grid = Grid(run, [Key("", lambda line: str(line.case["direction"])), _LENGTH], words)
    column = Column("{variant}, ms", "time_ms", lambda line: number(line.median or 0.0))
    headings = ["", "S", *(column.heading.format(variant=variant) for variant in grid.variants), "best speed-up"]
    rows = []
    for row in grid.rows:
        best = [
            (line.median, v)
            for v in grid.variants[1:]
            if (line := grid.find(row, v, f"{RATIO}{grid.variants[0]}")) and line.median
        ]
        told = "{:.2f}x ({})".format(*max(best)) if best else NONE
        rows.append([*row, *(grid.cell(row, variant, column) for variant in grid.variants), told])
    note = f"{_shape(run)}; median; speed-up over {grid.variants[0]}."
    return _joined(grid.finish(table(headings, rows, left=2)), note, provenance(run, _command("lengths", run), words))


def scaling_block(lines: Sequence[Line], words: Words) -> str:
    """Time and memory a token by length. Empty without lines."""
    return "\n\n".join(_scaling(run, words) for run in newest_runs(_of(lines, "scaling")))


def _scaling(run: list[Line], words: Words) -> str:
    grid = Grid(run, [_LENGTH], words)

    def tokens(line: Line) -> int:
        return int(line.case["batch"]) * int(line.case["seq"])

    columns: list[Column | Quotient] = [
        Column("us a token, {variant}", "time_ms", lambda line: number((line.median or 0.0) * 1e3 / tokens(line))),
        Column("KiB a token, {variant}", "peak_bytes", lambda line: number((line.median or 0.0) / 1024 / tokens(line))),
        Quotient("speed-up, {variant}", "time_ms"),
    ]
    note = f"{_shape(run)}; forward; memory is the peak above q, k and v; speed-up over {grid.variants[0]}."
    return _joined(grid.render(columns), note, provenance(run, _command("scaling", run), words))


def versions_block(lines: Sequence[Line], words: Words) -> str:
    """Every implementation at one length: times, TFLOP/s, memory, share of the limit. Empty without lines."""
    return "\n\n".join(_versions(run, words) for run in newest_runs(_of(lines, "versions")))


def _versions(run: list[Line], words: Words) -> str:
    grid = Grid(run, [Key("direction", lambda line: str(line.case["direction"])), _LENGTH], words)
    headings = [
        "version",
        "pass",
        "S",
        "ms",
        "TFLOP/s",
        "share of the limit",
        "peak MiB",
        f"speed-up over {grid.variants[0]}",
    ]
    columns = [
        Column("", "time_ms", lambda line: number(line.median or 0.0)),
        Column("", "time_ms", lambda line: number(work_of(line.case).tflops(line.median or 1.0))),
        Column("", "time_ms", lambda line: f"{line.limit / line.median:.0%}" if line.limit and line.median else NONE),
        Column("", "peak_bytes", lambda line: number((line.median or 0.0) / MIB)),
    ]
    rows = [
        [
            variant,
            *row,
            *(grid.cell(row, variant, column) for column in columns),
            grid.quotient(row, variant, "time_ms"),
        ]
        for variant in grid.variants
        for row in grid.rows
    ]
    note = (
        f"{_shape(run)}; the peak is above q, k and v: of the forward pass, and of forward and backward together. The limit is the "
        "roofline: FLOPs and bytes counted by hand at the GPU's published peaks."
    )
    return _joined(grid.finish(table(headings, rows, left=2)), note, provenance(run, _command("versions", run), words))


def memory_block(lines: Sequence[Line], words: Words) -> str:
    """Attention's memory by length, counted and measured, a table for each pass. Empty without lines."""
    return "\n\n".join(_memory(run, words) for run in newest_runs(_of(lines, memory.SUITE)))


def _memory(run: list[Line], words: Words) -> str:
    parts = []
    for which in dict.fromkeys(str(line.case["pass"]) for line in run):
        own = [line for line in run if line.case["pass"] == which]
        keys = [
            Key(which, lambda line: f"S = {int(line.case['seq']):,}"),
            Key("matrix, MiB (counted)", lambda line: number(_counted(line).matrix / MIB)),
            Key("K/V cache, MiB (counted)", lambda line: number(_counted(line).key_value_cache / MIB)),
        ]
        parts.append(Grid(own, keys, words).render([_PEAK, Quotient("reduction, {variant}", "peak_bytes")]))
    first = run[0].case
    options = {
        "lengths": case_values(run, "seq"), "variants": ",".join(dict.fromkeys(line.variant for line in run)),
        "batch": str(first["batch"]), "heads": str(first["heads"]), "head-dim": str(first["head_dim"]), "mask": str(first["mask"]),
        "dtype": str(first["dtype"]),
    }  # fmt: skip
    note = f"{_shape(run)}; the peak is above q, k, v and d_out."
    return _joined(*parts, note, provenance(run, command("memory", run, options), words))


def _counted(line: Line) -> CountedBytes:
    case = line.case
    suite = MemorySuite(
        (int(case["seq"]),),
        ("math",),
        int(case["batch"]),
        int(case["heads"]),
        int(case["head_dim"]),
        dtype=str(case["dtype"]),
    )
    return count_bytes(suite, int(case["seq"]))


def host_block(lines: Sequence[Line], words: Words) -> str:
    """Microseconds that a call keeps the host. Empty without lines."""
    return "\n\n".join(_host(run, words) for run in newest_runs(_of(lines, host.SUITE)))


def _host(run: list[Line], words: Words) -> str:
    modes = list(dict.fromkeys(str(line.case["mode"]) for line in run))
    grid = Grid(run, [Key("mode", lambda line: str(line.case["mode"]))], words)
    column = Column("", "host_us", lambda line: f"{line.median:.1f} ({line.low:.1f} – {line.high:.1f})")
    rows = [[variant, *(grid.cell((mode,), variant, column) for mode in modes)] for variant in grid.variants]
    case = run[0].case
    note = f"us a call; B={case['batch']} S={case['seq']} H={case['heads']} D={case['head_dim']} {case['mask']} {case['dtype']}."
    options = {
        "variants": ",".join(grid.variants), "batch": str(case["batch"]), "seq": str(case["seq"]), "heads": str(case["heads"]),
        "head-dim": str(case["head_dim"]), "mask": str(case["mask"]), "dtype": str(case["dtype"]), "calls": str(case["calls"]),
    }  # fmt: skip
    text = grid.finish(table(["variant", *modes], rows, left=1))
    return _joined(text, note, provenance(run, command("host", run, options), words))


def host_steps_block(lines: Sequence[Line], words: Words) -> str:
    """Where the host's time of a call goes. Empty without lines."""
    return "\n\n".join(_host_steps(run, words) for run in newest_runs(_of(lines, host_steps.SUITE)))


def _host_steps(run: list[Line], words: Words) -> str:
    medians = {str(line.case["part"]): line.median for line in run if line.median is not None}
    rows = [[step, f"{time_us:.1f}"] for step, time_us in host_steps.steps_of(medians).items()]
    options = {"calls": str(run[0].case["calls"])}
    return _joined(table(["step", "us"], rows, left=1), provenance(run, command("host --steps", run, options), words))


def _of(lines: Sequence[Line], suite: str) -> list[Line]:
    return [line for line in lines if line.suite == suite]


def _joined(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)


def _shape(run: Sequence[Line]) -> str:
    case = run[0].case
    return f"Batch {case['batch']}, {case['heads']} heads of {case['head_dim']}, {case['mask']} mask, {case['dtype']}"


def _command(name: str, run: Sequence[Line]) -> str:
    case, rounds = run[0].case, max(line.repeats for line in run)
    options = {
        "lengths": case_values(run, "seq"), "variants": ",".join(dict.fromkeys(line.variant for line in run)),
        "batch": str(case["batch"]), "heads": str(case["heads"]), "head-dim": str(case["head_dim"]), "mask": str(case["mask"]),
        "direction": case_values(run, "direction"), "dtype": str(case["dtype"]), "rounds": str(rounds),
    }  # fmt: skip
    return command(name, run, options)
