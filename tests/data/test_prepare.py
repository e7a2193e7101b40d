"""Text to token files: whole or not at all, decoding gives the text back, and bad text is told clearly."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from tileflash.data import TokenFiles, demo_corpus, get_tokenizer, prepare, prepare_demo, read_dataset
from tileflash.data.corpus import demo_topics
from tileflash.data.show import summarize
from tileflash.data.text import split_point, split_text

BYTES = get_tokenizer("bytes")
LINES = "".join(f"line {n} of the text, naïve 你好\n" for n in range(50))


def _write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def _text(path: Path, name: str = "bytes") -> str:
    files = TokenFiles(path)
    return get_tokenizer(name).decode(files.read(0, len(files)))


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_train_and_val_are_the_text(tmp_path: Path, name: str) -> None:
    texts = [_write(tmp_path / "a.txt", LINES), _write(tmp_path / "b.txt", "\ufeffother\r\n" * 40)]
    read: list[int] = []
    dataset = prepare(texts, get_tokenizer(name), tmp_path / "out", validation_fraction=0.2, on_bytes=read.append)
    assert sum(read) == sum(path.stat().st_size for path in texts)
    end = "<|endoftext|>"
    train = _text(tmp_path / "out" / "train.bin", name).split(end)
    val = _text(tmp_path / "out" / "val.bin", name).split(end)
    assert train[0] == val[0] == ""
    assert train[1] + val[1] == LINES
    assert train[2] + val[2] == "\ufeffother\r\n".replace("\ufeff", "", 1) + "\ufeffother\r\n" * 39
    assert 0.15 < len(val[1]) / len(LINES) <= 0.2
    assert val[1].startswith("line")  # cut at a line
    assert dataset == read_dataset(tmp_path / "out")
    assert dataset.tokens("train") == len(TokenFiles(dataset.paths(tmp_path / "out", "train")))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["dataset.json", "train.bin", "val.bin"]


def test_shards(tmp_path: Path) -> None:
    text = _write(tmp_path / "a.txt", LINES)
    whole = prepare([text], BYTES, tmp_path / "whole", validation_fraction=0.1)
    parts = prepare([text], BYTES, tmp_path / "parts", validation_fraction=0.1, shard_tokens=300)
    assert sorted(parts.files)[:2] == ["train_000001.bin", "train_000002.bin"]
    assert max(parts.files.values()) == 300
    one, many = TokenFiles(tmp_path / "whole" / "train.bin"), TokenFiles(str(tmp_path / "parts" / "train_*.bin"))
    assert len(one) == len(many) == whole.tokens("train") == parts.tokens("train")
    assert np.array_equal(one.read(0, len(one)), many.read(0, len(many)))


def test_no_validation(tmp_path: Path) -> None:
    dataset = prepare([_write(tmp_path / "a.txt", "short")], BYTES, tmp_path / "out", validation_fraction=0)
    assert dataset.files == {"train.bin": 6}


def test_llama3_documents_have_both_ends_and_32_bits(tmp_path: Path) -> None:
    class Wide:
        name, vocab_size, begin_of_text, end_of_text = "llama3", 128256, 128000, 128001

        def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
            return [ord(character) for character in text]

        def decode(self, ids: object) -> str:
            raise NotImplementedError

    prepare(
        [_write(tmp_path / "a.txt", "ab"), _write(tmp_path / "b.txt", "c")], Wide(), tmp_path, validation_fraction=0
    )
    files = TokenFiles(tmp_path / "train.bin", vocab_size=128256)
    assert files.dtype == np.uint32
    assert files.read(0, len(files)).tolist() == [128000, 97, 98, 128001, 128000, 99, 128001]
    assert summarize(tmp_path / "train.bin").first_text is None  # its tokenizer needs a path


@pytest.mark.parametrize("content", ["", " \n\t\n", "\ufeff"])
def test_empty_text(tmp_path: Path, content: str) -> None:
    good, bad = _write(tmp_path / "a.txt", LINES), _write(tmp_path / "bad.txt", content)
    with pytest.raises(ValueError, match=r"bad\.txt: (empty|nothing but white space); it must hold some text"):
        prepare([good, bad], BYTES, tmp_path / "out")
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("content", "position"), [(b"abc\xff", 3), (b"\xe4\xbd", 0), (b"x" * 262143 + b"\xe4\xbdx", 262143)]
)
def test_not_utf8(tmp_path: Path, content: bytes, position: int) -> None:
    bad = _write(tmp_path / "bad.txt", content)
    with pytest.raises(ValueError, match=rf"bad\.txt: not UTF-8 at byte {position} .*iconv"):
        prepare([bad], BYTES, tmp_path / "out", validation_fraction=0)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_character_across_two_reads(tmp_path: Path) -> None:
    content = "x" * 262143 + "你" + "y" * 10
    prepare([_write(tmp_path / "a.txt", content)], BYTES, tmp_path / "out", validation_fraction=0)
    assert _text(tmp_path / "out" / "train.bin") == "<|endoftext|>" + content


def test_bad_arguments(tmp_path: Path) -> None:
    text = _write(tmp_path / "a.txt", LINES)
    with pytest.raises(ValueError, match="`texts` was empty"):
        prepare([], BYTES, tmp_path / "out")
    for fraction in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="`validation_fraction` was"):
            prepare([text], BYTES, tmp_path / "out", validation_fraction=fraction)
    with pytest.raises(ValueError, match="`shard_tokens` was 0"):
        prepare([text], BYTES, tmp_path / "out", shard_tokens=0)
    with pytest.raises(FileNotFoundError):
        prepare([tmp_path / "none.txt"], BYTES, tmp_path / "out")
    with pytest.raises(IsADirectoryError):
        prepare([tmp_path], BYTES, tmp_path / "out")


def test_existing_files_are_kept_unless_told(tmp_path: Path) -> None:
    text, out = _write(tmp_path / "a.txt", LINES), tmp_path / "out"
    prepare([text], BYTES, out, shard_tokens=300)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(ValueError, match=r"already holds train_000001\.bin.*--overwrite"):
        prepare([text], BYTES, out)
    bad = _write(tmp_path / "bad.txt", b"\xff")
    with pytest.raises(ValueError, match="not UTF-8"):
        prepare([text, bad], BYTES, out, overwrite=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    prepare([text], BYTES, out, overwrite=True)
    assert sorted(path.name for path in out.iterdir()) == ["dataset.json", "train.bin", "val.bin"]


@pytest.mark.parametrize("content", ["a\nb\nc\n", "你" * 100, "one line", "\n" * 30, "x"])
@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 0.99])
def test_cuts_lose_nothing(tmp_path: Path, content: str, fraction: float) -> None:
    raw = content.encode()
    cut = split_point(_write(tmp_path / "a.txt", content), fraction)
    assert raw[:cut].decode() + raw[cut:].decode() == content  # decode fails within a character
    assert "".join(split_text(content, fraction)) == content
    if fraction == 0:
        assert cut == len(raw)


def test_demo_corpus_is_english_and_large() -> None:
    corpus = demo_corpus()
    assert len(corpus) > 300000
    assert corpus.isascii() or len(corpus.encode()) < 1.02 * len(corpus)
    assert 'The "assert" statement' in corpus


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_demo(tmp_path: Path, name: str) -> None:
    paths = prepare_demo(tmp_path / "demo", name)
    assert [path.name for path in paths] == ["train.bin", "val.bin"]
    train, val = (_text(path, name).split("<|endoftext|>")[1:] for path in paths)
    heads_and_tails = [split_text(topic, 0.1) for topic in demo_topics()]
    assert train == [head for head, _ in heads_and_tails if head]
    assert val == [tail for _, tail in heads_and_tails if tail]
    assert 0.05 < sum(map(len, val)) / len(demo_corpus()) < 0.11


def test_demo_is_a_no_op_only_when_complete(tmp_path: Path) -> None:
    train, val = prepare_demo(tmp_path, "bytes")
    content = val.read_bytes()
    stamps = [os.stat(path).st_mtime_ns for path in (train, val)]
    prepare_demo(tmp_path, "bytes")
    assert [os.stat(path).st_mtime_ns for path in (train, val)] == stamps
    val.write_bytes(content[:-7])  # truncated: made anew
    prepare_demo(tmp_path, "bytes")
    assert val.read_bytes() == content
    val.unlink()
    prepare_demo(tmp_path, "bytes")
    assert val.read_bytes() == content


def test_demo_never_writes_over_other_data(tmp_path: Path) -> None:
    prepare([_write(tmp_path / "a.txt", LINES)], BYTES, tmp_path / "own")
    prepare_demo(tmp_path / "demo", "bytes")
    (tmp_path / "bare").mkdir()
    (tmp_path / "own" / "train.bin").rename(tmp_path / "bare" / "train.bin")
    with pytest.raises(ValueError, match="holds bytes tokens of"):
        prepare_demo(tmp_path / "own", "bytes")
    with pytest.raises(ValueError, match="holds bytes tokens of demo"):
        prepare_demo(tmp_path / "demo", "gpt2")
    with pytest.raises(ValueError, match="token files of other text"):
        prepare_demo(tmp_path / "bare", "bytes")
    _write(tmp_path / "demo" / "dataset.json", json.dumps({"color": "red"}))
    with pytest.raises(ValueError, match=r"dataset\.json: not written by"):
        prepare_demo(tmp_path / "demo", "bytes")


def test_summary(tmp_path: Path) -> None:
    texts = [_write(tmp_path / "a.txt", "hello there"), _write(tmp_path / "b.txt", "good bye now")]
    prepare(texts, BYTES, tmp_path / "out", validation_fraction=0)
    summary = summarize(tmp_path / "out" / "train.bin", first=6)
    assert (summary.tokenizer, summary.tokens, summary.first_text) == ("bytes", 25, "<|endoftext|>hello")
    assert summary.documents.tolist() == [[0, 12], [12, 25]]
    with pytest.raises(ValueError, match="not a file"):
        summarize(tmp_path)
    gpt2 = summarize(tmp_path / "out" / "train.bin", "gpt2")
    assert gpt2.documents.tolist() == [[0, 25]]  # its separator does not occur: one document
