"""One sitting: figures that were measured side by side share its id, machine, versions, commit and date."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone

from tileflash.bench.ledger import CaseValue, Line
from tileflash.bench.statistic import Statistic

_VERSIONS = ("torch", "triton", "cuda", "driver", "python", "numpy", "tileflash")


@dataclass(frozen=True)
class Sitting:
    """Where and when a suite runs; `line` makes the ledger lines of its figures."""

    run: str
    date: str
    commit: str
    gpu: str
    versions: Mapping[str, str]

    @classmethod
    def begin(cls, environment: Mapping[str, str | int | None]) -> Sitting:
        """A new sitting on the machine that `tileflash.environment.environment()` describes. Without a GPU the ledger's
        `gpu` is "CPU" and the processor's name."""
        now = datetime.now(timezone.utc)
        gpu = environment.get("gpu") or f"CPU {environment.get('cpu') or 'unknown'}"
        return cls(
            run=f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}",
            date=f"{now:%Y-%m-%dT%H:%M:%SZ}",
            commit=str(environment.get("commit") or "unknown"),
            gpu=str(gpu),
            versions={name: str(environment[name]) for name in _VERSIONS if environment.get(name) is not None},
        )

    def line(
        self,
        suite: str,
        case: Mapping[str, CaseValue],
        variant: str,
        metric: str,
        figure: Statistic | None,
        *,
        limit: float | None = None,
        flags: tuple[str, ...] = (),
    ) -> Line:
        """A validated ledger line; `figure` None (with the reason in `flags`) where there is none."""
        return Line(
            run=self.run,
            date=self.date,
            commit=self.commit,
            gpu=self.gpu,
            versions=dict(self.versions),
            suite=suite,
            case=dict(case),
            variant=variant,
            metric=metric,
            median=None if figure is None else figure.median,
            low=None if figure is None else figure.low,
            high=None if figure is None else figure.high,
            repeats=0 if figure is None else figure.repeats,
            limit=limit,
            flags=flags,
        )
