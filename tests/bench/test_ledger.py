"""The ledger keeps to its schema when written and when read, and says which line of which file does not."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tileflash.bench import Line, Sitting, Statistic, append, read
from tileflash.bench.ledger import from_json, require_ledger, to_json

# The line that DESIGN section 6 shows.
DESIGN = (
    '{"run": "a", "date": "2026-12-01T09:30:00Z", "commit": "abc1234", "gpu": "NVIDIA H200", "versions": {"torch": '
    '"2.11.0+cu130", "triton": "3.6.0", "driver": "580.159.04"}, "suite": "attention", "case": '
    '{"direction": "forward", "batch": 4, "heads": 16, "kv_heads": 16, "seq": 4096, "head_dim": 128, "mask": "causal", '
    '"dtype": "bfloat16"}, "variant": "tileflash-hopper", "metric": "time_ms", "median": 0.41, "low": 0.40, '
    '"high": 0.43, "repeats": 5, "limit": 0.35, "flags": []}'
)
LINE = from_json(DESIGN)


def _changed(**changes: Any) -> str:
    return json.dumps(json.loads(DESIGN) | changes)


def test_the_design_line_is_read_and_written_back() -> None:
    record = json.loads(to_json(LINE))
    assert record.pop("schema") == 1
    assert record == json.loads(DESIGN)
    assert list(record) == list(json.loads(DESIGN))
    assert from_json(to_json(LINE)) == LINE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, "`schema` was 2; this version of tileflash reads 1"),
        ({"colour": 1}, "unknown field colour"),
        ({"run": ""}, "`run` was ''"),
        ({"gpu": None}, "`gpu` was None"),
        ({"date": "2026-12-01"}, "`date` was '2026-12-01'; it must be YYYY"),
        ({"versions": {"torch": 2}}, "`versions` was"),
        ({"case": {"batch": [1]}}, "`case` was"),
        ({"flags": "oom"}, "`flags` was 'oom'"),
        ({"flags": [1]}, r"`flags` was \(1,\)"),
        ({"repeats": 0}, "`repeats` was 0; it must be at least 1"),
        ({"repeats": 1.5}, "`repeats` was 1.5"),
        ({"repeats": True}, "`repeats` was True"),
        ({"median": 0.5}, "`median` was 0.5; it must be between low 0.4 and high 0.43"),
        ({"low": None}, "`low` was None"),
        ({"median": "0.41"}, "`median` was '0.41'"),
        ({"limit": "fast"}, "`limit` was 'fast'"),
        ({"median": None, "low": None, "high": None}, "`flags` was .*reason why there is no figure"),
        ({"median": float("nan")}, "`median` was nan"),
    ],
)
def test_wrong_lines_are_refused_with_file_and_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(DESIGN + "\n\n" + _changed(**changes) + "\n")
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 3: .*{message}"):
        read(path)


@pytest.mark.parametrize("text", ["{", "[1]", "1", '{"run": "a"}'])
def test_what_is_no_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.jsonl").write_text(text + "\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: "):
        read(tmp_path)


def test_nothing_wrong_can_be_written() -> None:
    for changes in ({"median": float("inf"), "high": float("inf")}, {"low": 0.42}, {"suite": ""}, {"schema": 2}):
        with pytest.raises(ValueError, match=r"must be|reads 1"):
            replace(LINE, **changes)


def test_no_figure_needs_a_reason() -> None:
    line = replace(LINE, median=None, low=None, high=None, repeats=0, flags=("out_of_memory",))
    assert from_json(to_json(line)) == line


def test_append_read_and_filters(tmp_path: Path) -> None:
    other = replace(LINE, run="b", gpu="NVIDIA A100", suite="train", case={"model": "gpt2", "seq": 64}, variant="flash")
    assert append(tmp_path / "sub" / "b.jsonl", [LINE, other]) == 2
    assert append(tmp_path / "sub" / "a.jsonl", [other]) == 1
    assert append(tmp_path / "sub" / "c.jsonl", []) == 0
    assert not (tmp_path / "sub" / "c.jsonl").exists()
    assert read(tmp_path / "sub") == [other, LINE, other]
    assert read([tmp_path / "sub" / "b.jsonl"], suite="attention") == [LINE]
    assert read(tmp_path / "sub", gpu="NVIDIA A100", case={"seq": 64}) == [other, other]
    assert read(tmp_path / "sub", case={"seq": 65}) == read(tmp_path / "sub", run="c") == []
    assert read(tmp_path / "sub", variant="flash", metric="time_ms", run="b") == [other, other]
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none.jsonl")


def test_appends_are_one_write_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[int] = []
    write = os.write

    def counted(descriptor: int, data: bytes) -> int:
        writes.append(len(data))
        return write(descriptor, data)

    monkeypatch.setattr("tileflash.bench.ledger.os.write", counted)
    append(tmp_path / "a.jsonl", [LINE] * 50)
    assert len(writes) == 1
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: append(tmp_path / "a.jsonl", [replace(LINE, run=f"r{n}")] * 20), range(20)))
    assert len(read(tmp_path / "a.jsonl")) == 50 + 400


def test_half_a_line_of_a_killed_writer_stays_alone(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(DESIGN[:40])
    append(tmp_path / "a.jsonl", [LINE])
    assert (tmp_path / "a.jsonl").read_text().splitlines()[1] == to_json(LINE)
    with pytest.raises(ValueError, match="line 1"):
        read(tmp_path / "a.jsonl")


def test_a_disk_that_is_full_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tileflash.bench.ledger.os.write", lambda descriptor, data: 10)
    with pytest.raises(OSError, match="only 10 of"):
        append(tmp_path / "a.jsonl", [LINE])


def test_sitting() -> None:
    facts: dict[str, str | int | None] = {
        "gpu": "NVIDIA H200",
        "commit": "abc",
        "torch": "2.11",
        "driver": None,
        "cpu": "x",
    }
    sitting = Sitting.begin(facts)
    assert Sitting.begin(facts).run != sitting.run
    line = sitting.line("attention", {"seq": 1}, "fa2", "time_ms", Statistic(2.0, 1.0, 3.0, 5), limit=0.5)
    assert isinstance(line, Line)
    assert (line.gpu, line.versions, line.median, line.repeats) == ("NVIDIA H200", {"torch": "2.11"}, 2.0, 5)
    none = sitting.line("attention", {}, "fa2", "time_ms", None, flags=("unsupported",))
    assert (none.median, none.repeats) == (None, 0)
    assert Sitting.begin({"gpu": None, "cpu": "EPYC"}).gpu == "CPU EPYC"


def test_the_record_of_gpu_tests_beside_the_figures_is_no_figure(tmp_path: Path) -> None:
    (tmp_path / "gpu-tests.jsonl").write_text('{"commit": "abc", "passed": 3, "failed": 0, "skipped": 1}\n')
    assert read(tmp_path) == []


@pytest.mark.parametrize("content", ["notes\n", DESIGN + "\nnotes\n", '{"commit": "abc", "passed": 3}\n', "[]", "\x00"])
def test_what_is_no_ledger_is_not_appended_to(tmp_path: Path, content: str) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"file is no ledger that lines could be appended to: .*line \d"):
        require_ledger(path)


def test_what_cannot_be_written_to_is_told_before_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file"):
        require_ledger(tmp_path / "file" / "below" / "a.jsonl")
    require_ledger(tmp_path / "new" / "a.jsonl")
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(os, "access", lambda place, mode: False)  # as root, everything may be written
    for path in (tmp_path / "file", tmp_path / "new" / "a.jsonl"):
        with pytest.raises(PermissionError):
            require_ledger(path)


def test_what_is_a_ledger_or_nothing_yet_is_appended_to(tmp_path: Path) -> None:
    require_ledger(tmp_path / "none.jsonl")
    require_ledger("/dev/null")
    (tmp_path / "empty.jsonl").write_text("\n")
    require_ledger(tmp_path / "empty.jsonl")
    append(tmp_path / "a.jsonl", [LINE])
    require_ledger(str(tmp_path / "a.jsonl"))
    with pytest.raises(ValueError, match="it is a directory"):
        require_ledger(tmp_path)
