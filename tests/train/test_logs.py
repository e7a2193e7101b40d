"""Logs: what the disk does not take, what is not theirs, and what a resumed run finds in them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tileflash.train.logs import JsonLog, TensorBoardLog


def test_a_full_disk_leaves_gaps_in_the_logs_and_does_not_end_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    log = JsonLog(tmp_path / "log.jsonl", say=said.append)
    log.write({"event": "step", "step": 1})
    whole = log._file
    for step, fails in ((2, True), (3, True), (4, False), (5, False)):
        log._file = HalfFull(whole) if fails else whole
        log.write({"event": "step", "step": step})
    log.close()
    read = []
    for line in (tmp_path / "log.jsonl").read_text().splitlines():
        with contextlib.suppress(ValueError):
            read.append(json.loads(line)["step"])
    assert read == [1, 4, 5]  # what was written half does not spoil the next line
    assert len(said) == 1
    assert "No space left on device; the log has gaps from here. Training goes on" in said[0]


class HalfFull:
    """A file that takes five more bytes of each write."""

    name = "log.jsonl"

    def __init__(self, file: Any) -> None:
        self.write = lambda line: file.write(line[:5])


def test_tensorboard_on_a_full_disk_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    board = TensorBoardLog(tmp_path, say=said.append)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    board.validation(1, 2.0)
    board._writer.close()
    monkeypatch.setattr(board._writer, "add_scalar", fail)
    for step in (2, 3):
        board.validation(step, 2.0)
    board.flush()
    board.close()
    assert said == ["warning: TensorBoard's log ends here: No space left on device. Training goes on"]


def test_a_file_that_is_no_log_is_never_written_over(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("years of work\n")
    with pytest.raises(ValueError, match=r"log_json is .*notes.txt: it holds something else"):
        JsonLog(notes)
    assert notes.read_text() == "years of work\n"
    (tmp_path / "old.jsonl").write_text('{"event": "start"}\n')
    JsonLog(tmp_path / "old.jsonl").close()
    assert (tmp_path / "old.jsonl").read_text() == ""


def test_garbage_in_a_log_does_not_stop_a_resumed_run(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(
        '{"event": "start"}\n{"event": "step", "step": 1}\n{"step": "x"}\n{"step": null}\n[1]\n3\nnothing\n'
    )
    JsonLog(path, resumed_step=1).close()
    assert path.read_text() == '{"event": "start"}\n{"event": "step", "step": 1}\n'
