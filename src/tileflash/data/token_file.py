"""One token file as llm.c and InfiniTrain write it: 256 little-endian int32 of header, then the tokens.

header[0] magic, header[1] version, header[2] number of tokens (< 2^31), the rest 0. Two kinds: 16-bit tokens for
vocabularies up to 65,536 (GPT-2) and 32-bit ones for larger (Llama-3).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

HEADER_INTS = 256
HEADER_BYTES = HEADER_INTS * 4
MAX_TOKENS = 2**31 - 1  # the count is an int32

_PREPARE = "write it anew with `tileflash data prepare TEXT... --output DIR`"
# llm.c's other files: whoever passes one of them by mistake is told what it is.
_OTHER_FILES = {
    20240326: "GPT-2 weights",
    20240327: "a GPT-2 debug state",
    20240328: "a tokenizer",
    20240522: "an evaluation set (HellaSwag, MMLU)",
    20240527: "an optimizer state",
    20240803: "Llama-3 weights",
}


@dataclass(frozen=True)
class TokenKind:
    """A kind of token file: its magic number, version and the token's type on disk."""

    name: str
    magic: int
    version: int
    dtype: np.dtype


UINT16 = TokenKind("uint16 (GPT-2)", 20240520, 1, np.dtype("<u2"))
UINT32 = TokenKind("uint32 (Llama-3)", 20240801, 7, np.dtype("<u4"))
KINDS = (UINT16, UINT32)


def kind_for(vocab_size: int) -> TokenKind:
    """The kind of file that holds ids 0 .. vocab_size - 1; ValueError when none does."""
    if not 1 <= vocab_size <= 2**32:
        raise ValueError(f"`vocab_size` was {vocab_size}; it must be between 1 and 2^32")
    return UINT16 if vocab_size <= 2**16 else UINT32


@dataclass(frozen=True)
class TokenFile:
    """What the header of a token file says, checked against the file's size."""

    path: Path
    kind: TokenKind
    count: int

    def tokens(self) -> np.ndarray:
        """[count] tokens, mapped from the disk, read-only."""
        return np.memmap(self.path, dtype=self.kind.dtype, mode="r", offset=HEADER_BYTES, shape=(self.count,))


def open_token_file(path: str | os.PathLike[str]) -> TokenFile:
    """Read and check the header; ValueError names the file, what was found, what it must be and the remedy."""
    path = Path(path)
    with path.open("rb") as stream:
        raw = stream.read(HEADER_BYTES)
        size_bytes = os.fstat(stream.fileno()).st_size
    if len(raw) < HEADER_BYTES:
        raise ValueError(f"{path}: truncated: {len(raw)} bytes, less than a header of {HEADER_BYTES}; {_PREPARE}")
    header = np.frombuffer(raw, dtype="<i4")
    kind = _kind_of(path, int(header[0]), int(header[1]))
    count = int(header[2])
    if count < 1:
        raise ValueError(f"{path}: the header says {count} tokens; there must be at least 1; {_PREPARE}")
    _check_size(path, kind, count, size_bytes - HEADER_BYTES)
    return TokenFile(path, kind, count)


def _kind_of(path: Path, magic: int, version: int) -> TokenKind:
    expected = " or ".join(f"{kind.magic} for {kind.name}" for kind in KINDS)
    for kind in KINDS:
        if magic == kind.magic:
            if version != kind.version:
                raise ValueError(
                    f"{path}: found version {version}, expected {kind.version} for {kind.name} tokens; {_PREPARE}"
                )
            return kind
        if magic == int(np.array(kind.magic, dtype="<i4").byteswap()):
            raise ValueError(f"{path}: the bytes are in big-endian order, expected little-endian; {_PREPARE}")
    what = f" ({_OTHER_FILES[magic]})" if magic in _OTHER_FILES else ""
    raise ValueError(f"{path}: found magic {magic}{what}, expected {expected}: not a token file; {_PREPARE}")


def _check_size(path: Path, kind: TokenKind, count: int, body_bytes: int) -> None:
    expected_bytes = count * kind.dtype.itemsize
    if body_bytes == expected_bytes:
        return
    found = f"the header says {count} tokens of {kind.dtype.itemsize} bytes, {expected_bytes} bytes in all"
    if body_bytes < expected_bytes:
        raise ValueError(f"{path}: truncated: {found}, but only {body_bytes} follow; copy it again, or {_PREPARE}")
    raise ValueError(f"{path}: {found}, but {body_bytes} follow; the header's count is too small; {_PREPARE}")


class TokenFileWriter:
    """Writes a token file piece by piece. It gets its name only when whole: until then it is `NAME.partial`."""

    def __init__(self, path: str | os.PathLike[str], vocab_size: int) -> None:
        self.path = Path(path)
        self.vocab_size = vocab_size
        self.kind = kind_for(vocab_size)
        self.count = 0
        self._aside = self.path.with_name(self.path.name + ".partial")
        self._stream = self._aside.open("wb")
        self._stream.write(bytes(HEADER_BYTES))  # the count is known at the end

    def append(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append token ids; ValueError for an id that is negative or >= vocab_size (file, position, id)."""
        ids = np.asarray(tokens, dtype=np.int64)
        if ids.ndim != 1:
            raise ValueError(f"`tokens` had shape {list(ids.shape)}; it must be one sequence of ids")
        bad = np.flatnonzero((ids < 0) | (ids >= self.vocab_size))
        if bad.size:
            position = int(bad[0])
            raise ValueError(
                f"{self.path}: token id {int(ids[position])} at position {self.count + position} must be between 0 and "
                f"vocab_size - 1 = {self.vocab_size - 1} (tokens are stored as {self.kind.name})"
            )
        if self.count + ids.size > MAX_TOKENS:
            raise ValueError(f"{self.path}: more than {MAX_TOKENS} tokens; the header cannot count them: use shards")
        self._stream.write(ids.astype(self.kind.dtype).tobytes())
        self.count += ids.size

    def close(self) -> None:
        """Write the header, force all to the disk and give the file its name; ValueError when it holds no token."""
        if self.count == 0:
            self.discard()
            raise ValueError(f"{self.path}: no tokens to write")
        header = np.zeros(HEADER_INTS, dtype="<i4")
        header[:3] = self.kind.magic, self.kind.version, self.count
        self._stream.seek(0)
        self._stream.write(header.tobytes())
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        os.replace(self._aside, self.path)

    def discard(self) -> None:
        """Throw away what was written."""
        self._stream.close()
        self._aside.unlink(missing_ok=True)

    def __enter__(self) -> TokenFileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


def write_token_file(
    path: str | os.PathLike[str], tokens: Sequence[int] | np.ndarray, vocab_size: int = 2**16
) -> TokenFile:
    """Write ids [n], each 0 <= id < vocab_size, as one token file, aside and then renamed.

    Up to a vocab_size of 65,536 the tokens are uint16 (GPT-2 kind), above it uint32 (Llama-3 kind): an id never wraps.
    ValueError: an id out of range (position and id are named), no tokens, or 2^31 and more of them.
    """
    with TokenFileWriter(path, vocab_size) as writer:
        writer.append(tokens)
    return open_token_file(path)
