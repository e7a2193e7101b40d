"""The ledger: every measured figure as one JSON line in benchmarks/results/*.jsonl.

A line says what was measured (suite, case, variant, metric), how much it was (median, low, high, repeats), what it
could be at best (limit), and where and when (gpu, versions, commit, date). Lines of one `run` were measured together.
Other programs read these files: another meaning or another key needs another SCHEMA.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

SCHEMA = 1
GPU_TESTS = "gpu-tests.jsonl"  # counts of test runs, kept beside the figures; not lines of this schema
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z")
_TEXTS = ("run", "commit", "gpu", "suite", "variant", "metric")

CaseValue = str | int | float | bool


@dataclass(frozen=True)
class Line:
    """One figure. `median`, `low`, `high` and `limit` are in the unit that `metric` names (`time_ms`, `peak_bytes`);
    the three are None when there is no figure, and then `flags` says why (`out_of_memory`, `unsupported`,
    `wrong_result`). `repeats` counts the independent measurements that low and high span. `limit` is the physical limit
    of the case on this GPU, None where it is not known.

    ValueError names the field, what it was and what it must be.
    """

    run: str
    date: str
    commit: str
    gpu: str
    versions: Mapping[str, str]
    suite: str
    case: Mapping[str, CaseValue]
    variant: str
    metric: str
    median: float | None
    low: float | None
    high: float | None
    repeats: int
    limit: float | None = None
    flags: tuple[str, ...] = ()
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise ValueError(f"`schema` was {self.schema!r}; this version of tileflash reads {SCHEMA}")
        for name in _TEXTS:
            value = getattr(self, name)
            _require(isinstance(value, str) and bool(value), name, value, "a text that is not empty")
        _require(
            isinstance(self.date, str) and bool(_DATE.fullmatch(self.date)), "date", self.date, "YYYY-MM-DDThh:mm:ssZ"
        )
        _require(_is_mapping(self.versions, (str,)), "versions", self.versions, "names and texts")
        _require(_is_mapping(self.case, (str, int, float)), "case", self.case, "names and plain values")
        flags = self.flags
        _require(isinstance(flags, tuple) and all(isinstance(f, str) and f for f in flags), "flags", flags, "texts")
        _require(_is_integer(self.repeats) and self.repeats >= 0, "repeats", self.repeats, "an integer >= 0")
        _require(self.limit is None or _is_number(self.limit), "limit", self.limit, "a finite number or null")
        self._check_figures()

    def _check_figures(self) -> None:
        figures = (self.low, self.median, self.high)
        if figures == (None, None, None):
            _require(bool(self.flags), "flags", self.flags, "the reason why there is no figure")
            return
        for name in ("median", "low", "high"):
            _require(_is_number(getattr(self, name)), name, getattr(self, name), "a finite number")
        low, median, high = (float(figure) for figure in figures if figure is not None)
        _require(low <= median <= high, "median", median, f"between low {low} and high {high}")
        _require(self.repeats >= 1, "repeats", self.repeats, "at least 1 for a figure")


def _require(condition: bool, name: str, was: object, must_be: str) -> None:
    if not condition:
        raise ValueError(f"`{name}` was {was!r}; it must be {must_be}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_mapping(value: object, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, Mapping) and all(isinstance(k, str) and isinstance(v, kinds) for k, v in value.items())


def to_json(line: Line) -> str:
    """The line as it stands in the file, without its end."""
    record = asdict(line)
    record["schema"] = record.pop("schema")  # kept last, so that the file reads as DESIGN shows it
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def from_json(text: str) -> Line:
    """The line of one JSON object; ValueError for what is no JSON, for unknown, missing or wrong fields."""
    record = json.loads(text)
    if not isinstance(record, dict):
        raise ValueError(f"a ledger line must be a JSON object, not {type(record).__name__}")
    known = {field.name for field in fields(Line)}
    if unknown := sorted(set(record) - known):
        raise ValueError(f"unknown field {', '.join(unknown)}; a ledger line has {', '.join(sorted(known))}")
    if missing := sorted(known - set(record) - {"limit", "flags", "schema"}):
        raise ValueError(f"missing field {', '.join(missing)}")
    if isinstance(record.get("flags"), list):
        record["flags"] = tuple(record["flags"])
    return Line(**record)


def require_ledger(path: str | os.PathLike[str]) -> None:
    """ValueError where `path` holds something that is no ledger, OSError where nothing can be written to it.

    Asked before the measurement, not after it. Nothing is made.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise ValueError("it is a directory")
        if path.is_file():
            _read_file(path)
    except ValueError as error:  # a text that is not UTF-8 is one as well
        raise ValueError(f"{path} is no ledger that lines could be appended to: {error}") from None
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if there != path and not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    if not os.access(there, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(there))


def append(path: str | os.PathLike[str], lines: Iterable[Line]) -> int:
    """Append lines with a single write, so that processes which share a ledger never mix theirs; returns how many."""
    path = Path(path)
    texts = [to_json(line) + "\n" for line in lines]
    if not texts:
        return 0
    path.parent.mkdir(parents=True, exist_ok=True)
    # A writer that was killed may have left half a line: ours must not grow onto it.
    start = "" if _ends_with_newline(path) else "\n"
    payload = (start + "".join(texts)).encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        written = os.write(descriptor, payload)
    finally:
        os.close(descriptor)
    if written != len(payload):
        raise OSError(f"{path}: only {written} of {len(payload)} bytes were written; is the disk full?")
    return len(texts)


def _ends_with_newline(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return True
    with path.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) == b"\n"


def read(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    suite: str | None = None,
    gpu: str | None = None,
    run: str | None = None,
    variant: str | None = None,
    metric: str | None = None,
    case: Mapping[str, CaseValue] | None = None,
) -> list[Line]:
    """The lines of files or directories (their *.jsonl, by name) that match every filter given, in the files' order;
    `case` matches lines whose case has these values. ValueError names the file and the line that is wrong."""
    sources = [source] if isinstance(source, str | os.PathLike) else list(source)
    wanted = {"suite": suite, "gpu": gpu, "run": run, "variant": variant, "metric": metric}
    wanted = {name: value for name, value in wanted.items() if value is not None}
    found = []
    for path in map(Path, sources):
        for file in sorted(set(path.glob("*.jsonl")) - {path / GPU_TESTS}) if path.is_dir() else [path]:
            for line in _read_file(file):
                matches = all(getattr(line, name) == value for name, value in wanted.items())
                if matches and all(line.case.get(name) == value for name, value in (case or {}).items()):
                    found.append(line)
    return found


def _read_file(path: Path) -> list[Line]:
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not text.strip():
            continue
        try:
            lines.append(from_json(text))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    return lines
