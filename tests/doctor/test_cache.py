"""The kernel cache: where Triton has it, its size, whether it can be written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tileflash.doctor.cache import cache_directory, cache_problems, inspect_cache


def test_the_directory_is_tritons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    knobs = pytest.importorskip("triton").knobs
    for variables in (
        {},
        {"TRITON_HOME": str(tmp_path)},
        {"TRITON_HOME": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "c")},
    ):
        for name in ("TRITON_HOME", "TRITON_CACHE_DIR"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert cache_directory() == Path(knobs.cache.dir)


def test_size_and_what_empties_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = tmp_path / "a cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(place))
    absent = inspect_cache()
    assert (absent.exists, absent.bytes, absent.files, absent.writable) == (False, 0, 0, True)
    (place / "x" / "y").mkdir(parents=True)
    (place / "x" / "k.cubin").write_bytes(b"1" * 1000)
    (place / "x" / "y" / "k.json").write_bytes(b"1" * 24)
    found = inspect_cache()
    assert (found.exists, found.bytes, found.files, found.writable, found.error) == (True, 1024, 2, True, "")
    assert found.free_bytes == pytest.approx(shutil.disk_usage(place).free, rel=0.2)
    assert found.empty_command == f"rm -rf '{place}'"
    assert len(list(place.rglob("*"))) == 4  # looking leaves nothing behind
    assert [problem.id for problem in cache_problems(found) if problem.id == "cache.not-writable"] == []


def test_what_cannot_be_written_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    [problem] = [problem for problem in cache_problems(inspect_cache()) if problem.id == "cache.not-writable"]
    assert problem.severity == "error"
    assert problem.fix.startswith("export TRITON_CACHE_DIR=")
    assert "NotADirectoryError" in problem.said


def test_a_full_disk_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10**12, 10**12, 100 * 2**20))
    [problem] = cache_problems(inspect_cache())
    assert (problem.id, problem.severity) == ("cache.disk-full", "warning")
    assert "only 100 MiB are free" in problem.what
