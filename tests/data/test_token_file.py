"""Token files: the bytes on disk, and a clear word for each way in which they can be wrong."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tileflash.data import TokenFiles, open_token_file, write_token_file
from tileflash.data.token_file import TokenFileWriter


def _raw(path: Path, header: dict[int, int], body: bytes = b"\1\0\2\0") -> Path:
    ints = np.zeros(256, dtype="<i4")
    for index, value in ({0: 20240520, 1: 1, 2: 2} | header).items():
        ints[index] = value
    path.write_bytes(ints.tobytes() + body)
    return path


def _refused(path: Path, *words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        TokenFiles(path)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("vocab_size", "magic", "version", "dtype"), [(65536, 20240520, 1, "<u2"), (65537, 20240801, 7, "<u4")]
)
def test_layout_on_disk(tmp_path: Path, vocab_size: int, magic: int, version: int, dtype: str) -> None:
    ids = [0, 1, 50256, 65535]
    write_token_file(tmp_path / "a.bin", ids, vocab_size)
    raw = (tmp_path / "a.bin").read_bytes()
    assert np.frombuffer(raw[:1024], "<i4").tolist() == [magic, version, 4, *[0] * 253]
    assert np.frombuffer(raw[1024:], dtype).tolist() == ids
    files = TokenFiles(tmp_path / "a.bin")
    assert (len(files), files.dtype, files.read(0, 4).tolist()) == (4, np.dtype(dtype), ids)
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]  # nothing is left aside


def test_wrong_magic(tmp_path: Path) -> None:
    _refused(_raw(tmp_path / "a.bin", {0: 1234}), "found magic 1234", "20240520", "20240801", "tileflash data prepare")


def test_weights_given_as_data(tmp_path: Path) -> None:
    _refused(_raw(tmp_path / "a.bin", {0: 20240326}), "20240326", "GPT-2 weights")


def test_big_endian(tmp_path: Path) -> None:
    swapped = int(np.array(20240801, dtype="<i4").byteswap())
    _refused(_raw(tmp_path / "a.bin", {0: swapped}), "big-endian")


@pytest.mark.parametrize(("magic", "version", "expected"), [(20240520, 2, 1), (20240801, 1, 7)])
def test_wrong_version(tmp_path: Path, magic: int, version: int, expected: int) -> None:
    path = _raw(tmp_path / "a.bin", {0: magic, 1: version})
    _refused(path, f"found version {version}", f"expected {expected}", "tileflash data prepare")


@pytest.mark.parametrize("size", [0, 1, 1023])
def test_truncated_header(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(size))
    _refused(path, "truncated", f"{size} bytes", "1024")


@pytest.mark.parametrize("lost", [1, 2, 4])
def test_truncated_body(tmp_path: Path, lost: int) -> None:
    path = _raw(tmp_path / "a.bin", {}, b"\1\0\2\0"[:-lost])
    _refused(path, "truncated", "2 tokens", f"only {4 - lost} follow")


def test_header_counts_too_few(tmp_path: Path) -> None:
    _refused(_raw(tmp_path / "a.bin", {2: 1}), "1 tokens", "4 follow", "too small")


@pytest.mark.parametrize("count", [0, -5])
def test_no_tokens(tmp_path: Path, count: int) -> None:
    _refused(_raw(tmp_path / "a.bin", {2: count}, b""), f"{count} tokens", "at least 1")


def test_no_match(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no file matches .*train\*\.bin.*tileflash data prepare"):
        TokenFiles(str(tmp_path / "train*.bin"))
    with pytest.raises(ValueError, match="empty list"):
        TokenFiles([])


@pytest.mark.parametrize(
    ("ids", "position", "bad"), [([1, 65536, 2], 1, 65536), ([128000], 0, 128000), ([3, 4, -1], 2, -1)]
)
def test_ids_beyond_uint16_never_wrap(tmp_path: Path, ids: list[int], position: int, bad: int) -> None:
    with pytest.raises(ValueError, match=rf"a\.bin: token id {bad} at position {position} .*65535"):
        write_token_file(tmp_path / "a.bin", ids)
    assert list(tmp_path.iterdir()) == []


def test_written_ids_are_below_the_vocabulary(tmp_path: Path) -> None:
    writer = TokenFileWriter(tmp_path / "a.bin", 257)
    writer.append([1, 2, 3])
    with pytest.raises(ValueError, match=r"token id 257 at position 5 .*256"):
        writer.append(np.array([4, 256, 257]))
    writer.discard()
    with pytest.raises(ValueError, match="no tokens"):
        write_token_file(tmp_path / "a.bin", [])
    with pytest.raises(ValueError, match="`vocab_size` was 0"):
        write_token_file(tmp_path / "a.bin", [1], 0)
    assert list(tmp_path.iterdir()) == []


def test_id_beyond_the_vocabulary_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tileflash.data.token_files._SCAN_TOKENS", 16)  # the position counts across chunks
    write_token_file(tmp_path / "a_1.bin", np.arange(50))
    ids = np.zeros(100, dtype=np.int64)
    ids[[77, 90]] = 50257, 60000
    write_token_file(tmp_path / "a_2.bin", ids)
    with pytest.raises(ValueError, match=r"a_2\.bin: token id 50257 at position 77 .*50257"):
        TokenFiles(str(tmp_path / "a_*.bin"), vocab_size=50257)
    assert len(TokenFiles(str(tmp_path / "a_*.bin"), vocab_size=60001)) == 150
    with pytest.raises(ValueError, match="`vocab_size` was 0"):
        TokenFiles(tmp_path / "a_1.bin", vocab_size=0)


def test_shards_are_one_stream(tmp_path: Path) -> None:
    stream = np.random.default_rng(0).integers(0, 1000, size=60)
    for number, (start, stop) in enumerate([(0, 7), (7, 8), (8, 40), (40, 60)]):
        write_token_file(tmp_path / f"train_{number:06d}.bin", stream[start:stop])
    files = TokenFiles(str(tmp_path / "train_*.bin"))
    assert len(files) == 60
    for start in range(61):
        for stop in range(start, 61):
            assert np.array_equal(files.read(start, stop), stream[start:stop])
    for start, stop in [(-1, 3), (5, 61), (5, 4)]:
        with pytest.raises(IndexError):
            files.read(start, stop)
    assert np.array_equal(files.positions_of(int(stream[7])), np.flatnonzero(stream == stream[7]))
    listed = TokenFiles([tmp_path / "train_000002.bin", tmp_path / "train_000000.bin"])
    assert np.array_equal(listed.read(0, 39), np.concatenate([stream[8:40], stream[:7]]))


def test_both_kinds_do_not_mix(tmp_path: Path) -> None:
    write_token_file(tmp_path / "a.bin", [1, 2])
    write_token_file(tmp_path / "b.bin", [1, 2], 128256)
    with pytest.raises(ValueError, match=r"b\.bin holds uint32 .*a\.bin uint16"):
        TokenFiles(str(tmp_path / "*.bin"))


def test_a_name_with_brackets_is_a_name(tmp_path: Path) -> None:
    write_token_file(tmp_path / "a[1].bin", [1, 2, 3])
    assert open_token_file(tmp_path / "a[1].bin").count == len(TokenFiles(str(tmp_path / "a[1].bin"))) == 3
