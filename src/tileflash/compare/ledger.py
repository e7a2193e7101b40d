"""The comparison's figures as lines of the ledger: suite `train`, variants `baseline` and `flash`."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from tileflash.bench.flags import LOSSES_DIFFER, OUT_OF_MEMORY
from tileflash.bench.ledger import CaseValue, Line, append, read
from tileflash.compare.figures import Comparison, Measured
from tileflash.compare.plan import FLASH, SCHEMES, model_name
from tileflash.compare.report import Findings
from tileflash.compare.results import Outcome

_METRICS = {"step_ms": "latency_ms", "tokens_per_s": "tokens_per_s", "peak_bytes": "peak_used_bytes"}
_VERSIONS = ("torch", "triton", "cuda", "driver", "python", "numpy", "tileflash")
_MUST_BE_ONE = ("gpu", "cpu", "commit", *_VERSIONS)


def ledger_lines(findings: Findings) -> list[Line]:
    """A line for each setting, scheme and metric that was measured.

    Out of memory is a line without a figure and with the flag `out_of_memory`; what was not measured is no line. The
    flag `losses_differ` marks flash's figures where its losses are not the baseline's. The id of the sitting (`run`)
    is made from the date of its first run, so that a comparison taken up again adds to the same one: of lines with the
    same id, case, variant and metric the last, with the most repeats, holds. The case says whether steps were CUDA
    graphs (`cuda_graph`), as the runs logged it.

    Raises:
        ValueError: when the runs were made in different environments: they are not one sitting then.
    """
    environments = findings.environments()
    if not environments:
        return []
    differing = [name for name in _MUST_BE_ONE if len({str(e.get(name)) for e in environments}) > 1]
    cuda_graphs = findings.cuda_graphs()
    if len(cuda_graphs) > 1:
        differing.append("cuda_graph")
    if differing:
        raise ValueError(f"the runs differ in {', '.join(differing)}; the ledger takes those of one sitting only")
    # By date, not by order: the first one in the plan may have been made again after a failure.
    first = min(environments, key=lambda environment: str(environment.get("date")))
    date = str(first.get("date"))
    models = ",".join(findings.config.models)
    digest = hashlib.sha256(f"{date} {first.get('cpu')} {models}".encode()).hexdigest()[:6]
    sitting = {
        "run": f"{date[:10].replace('-', '')}-{date[11:19].replace(':', '')}-{digest}",
        "date": date,
        "commit": str(first.get("commit") or "unknown"),
        "gpu": str(first.get("gpu") or f"CPU {first.get('cpu') or 'unknown'}"),
        "versions": {name: str(first[name]) for name in _VERSIONS if first.get(name) is not None},
        "suite": "train",
    }
    graph: dict[str, CaseValue] = {"cuda_graph": any(cuda_graphs)} if cuda_graphs else {}
    return [line for comparison in findings.comparisons for line in _lines(comparison, sitting, graph)]


def _lines(comparison: Comparison, sitting: dict[str, Any], graph: dict[str, CaseValue]) -> list[Line]:
    setting = comparison.setting
    case: dict[str, CaseValue] = {
        "model": model_name(setting.model),
        "batch": setting.batch_size,
        "seq": setting.sequence_length,
        "dtype": setting.dtype,
        **graph,
    }
    lines = []
    for scheme in SCHEMES:
        figures = comparison.scheme(scheme)
        out_of_memory = figures.outcome is Outcome.OUT_OF_MEMORY
        gap = comparison.loss_gap
        differs = scheme == FLASH and gap is not None and not gap.agrees
        flags = (OUT_OF_MEMORY,) if out_of_memory else (LOSSES_DIFFER,) if differs else ()
        for metric, attribute in _METRICS.items():
            measured: Measured | None = getattr(figures, attribute)
            if measured is None and not out_of_memory:
                continue
            lines.append(
                Line(
                    **sitting,
                    case=case,
                    variant=scheme,
                    metric=metric,
                    median=measured.median if measured else None,
                    low=measured.low if measured else None,
                    high=measured.high if measured else None,
                    repeats=measured.repeats if measured else 0,
                    flags=flags,
                )
            )
    return lines


def append_to_ledger(path: Path, findings: Findings) -> int:
    """Append the lines that `path` does not hold yet; return how many.

    Raises:
        ValueError: as `ledger_lines`, and when `path` holds something that is no ledger.
        OSError: when it cannot be written.
    """
    there = read(path) if path.is_file() else []
    return append(path, [line for line in ledger_lines(findings) if line not in there])
