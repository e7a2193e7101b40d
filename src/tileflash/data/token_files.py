"""Many token files read as one stream of tokens."""

from __future__ import annotations

import glob
import os
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from tileflash.data.token_file import TokenFile, open_token_file

_SCAN_TOKENS = 1 << 22  # 8 or 16 MB at a time: a file of any size is scanned in little memory


class TokenFiles:
    """The tokens of all files that match, one after another: `len(files)` tokens, `files.read(start, stop)`.

    `pattern`: a path, a glob such as `data/train*.bin`, or a list of them; matches are sorted by name.
    Files are mapped, not loaded. With `vocab_size`, every id is checked once, here: no kernel meets a wild index.

    ValueError: no match, a bad file (see `open_token_file`), files of both kinds mixed, an id >= vocab_size.
    """

    def __init__(
        self, pattern: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], vocab_size: int | None = None
    ) -> None:
        patterns = [pattern] if isinstance(pattern, str | os.PathLike) else list(pattern)
        self.files: tuple[TokenFile, ...] = tuple(open_token_file(path) for path in _match(patterns))
        self.kind = self.files[0].kind
        for file in self.files:
            if file.kind is not self.kind:
                raise ValueError(
                    f"{file.path} holds {file.kind.name} tokens, but {self.files[0].path} {self.kind.name} ones; "
                    "all files of a set must be of one kind"
                )
        self._tokens = [file.tokens() for file in self.files]
        self._ends = list(accumulate(file.count for file in self.files))
        self.vocab_size = vocab_size
        if vocab_size is not None:
            self._check_ids(vocab_size)

    @property
    def dtype(self) -> np.dtype:
        """The tokens' type on disk: uint16 or uint32."""
        return self.kind.dtype

    @property
    def name(self) -> str:
        """The files in words, for messages: the first, and how many more."""
        more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        return f"{self.files[0].path}{more}"

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the stream as int64, across the files' bounds; IndexError outside the stream."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} to {stop} of {self.name}: it holds {len(self)}")
        out = np.empty(stop - start, dtype=np.int64)
        done = 0
        shard = bisect_right(self._ends, start)
        while done < out.size:
            offset = start + done - (self._ends[shard] - self.files[shard].count)
            piece = self._tokens[shard][offset : offset + out.size - done]
            out[done : done + piece.size] = piece
            done += piece.size
            shard += 1
        return out

    def positions_of(self, token: int) -> np.ndarray:
        """Where in the stream `token` stands, in order, int64: the document bounds when it is the separator."""
        found = [np.zeros(0, dtype=np.int64)]
        for file, tokens, end in zip(self.files, self._tokens, self._ends, strict=True):
            for start in range(0, file.count, _SCAN_TOKENS):
                hits = np.flatnonzero(tokens[start : start + _SCAN_TOKENS] == token)
                found.append(hits.astype(np.int64) + (end - file.count + start))
        return np.concatenate(found)

    def _check_ids(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ValueError(f"`vocab_size` was {vocab_size}; it must be at least 1")
        if vocab_size > np.iinfo(self.dtype).max:
            return  # no id that the type can hold is out of range
        for file, tokens in zip(self.files, self._tokens, strict=True):
            for start in range(0, file.count, _SCAN_TOKENS):
                chunk = tokens[start : start + _SCAN_TOKENS]
                if int(chunk.max()) >= vocab_size:
                    offset = int(np.flatnonzero(chunk >= vocab_size)[0])
                    raise ValueError(
                        f"{file.path}: token id {int(chunk[offset])} at position {start + offset} must be less than "
                        f"the vocabulary size {vocab_size}; was the file made for another tokenizer?"
                    )


def _match(patterns: Sequence[str | os.PathLike[str]]) -> list[Path]:
    if not patterns:
        raise ValueError("`pattern` was an empty list; it must name at least one token file")
    paths: list[Path] = []
    for pattern in patterns:
        # A file whose very name holds a [ or a * is itself, not a pattern.
        matches = [os.fspath(pattern)] if Path(pattern).is_file() else sorted(glob.glob(os.fspath(pattern)))
        if not matches:
            raise ValueError(
                f"no file matches {os.fspath(pattern)!r}; make token files with `tileflash data prepare TEXT... "
                "--output DIR`, or the demo's with `tileflash data demo --output DIR`"
            )
        paths += [Path(match) for match in matches]
    return paths
