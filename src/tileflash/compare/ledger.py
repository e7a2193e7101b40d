"""The comparison's figures as lines of the ledger (suite `train`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tileflash.compare.figures import Comparison, Measured
from tileflash.compare.plan import SCHEMES, model_name
from tileflash.compare.report import Findings
from tileflash.compare.results import Outcome

_METRICS = {"step_ms": "latency_ms", "tokens_per_s": "tokens_per_s", "peak_bytes": "peak_used_bytes"}


def ledger_lines(comparison: Comparison) -> list[dict[str, Any]]:
    """The fields of each line that this comparison decides: case, variant, metric, figures, flags.

    Out of memory is a line with a null median and the flag `out_of_memory`; what was not measured is no line.
    """
    setting = comparison.setting
    case = {
        "model": model_name(setting.model),
        "batch": setting.batch_size,
        "seq": setting.sequence_length,
        "dtype": setting.dtype,
    }
    lines = []
    for scheme in SCHEMES:
        figures = comparison.scheme(scheme)
        out_of_memory = figures.outcome is Outcome.OUT_OF_MEMORY
        for metric, attribute in _METRICS.items():
            measured: Measured | None = getattr(figures, attribute)
            if measured is None and not out_of_memory:
                continue
            lines.append(
                {
                    "case": case,
                    "variant": scheme,
                    "metric": metric,
                    "median": measured.median if measured else None,
                    "low": measured.low if measured else None,
                    "high": measured.high if measured else None,
                    "repeats": measured.repeats if measured else 1,
                    "limit": None,
                    "flags": ["out_of_memory"] if out_of_memory else [],
                }
            )
    return lines


def append_to_ledger(path: Path, findings: Findings) -> int:
    """Append the lines of every comparison to `path`; return how many."""
    raise NotImplementedError
