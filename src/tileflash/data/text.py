"""Text files of any size, read in pieces that tokenize as the whole would."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from pathlib import Path

_BLOCK_BYTES = 1 << 18
_LONGEST_LINE_BYTES = 1 << 20
PIECE_CHARACTERS = 1 << 18  # tiktoken's regular expressions panic on a few hundred thousand characters more
_BYTE_ORDER_MARK = "\ufeff"


def file_pieces(
    path: Path, start: int = 0, stop: int | None = None, on_bytes: Callable[[int], None] | None = None
) -> Iterator[str]:
    """The text of bytes [start, stop) of a UTF-8 file in pieces, line ends as they are, a byte order mark dropped.

    `on_bytes` is told how many bytes each read took. ValueError with file and byte position where it is not UTF-8.
    """
    return split_pieces(_blocks(path, start, stop, on_bytes))


def split_pieces(blocks: Iterator[str], limit: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Cut a stream of text where GPT-2's and Llama-3's splitting rules cut too, so that ids do not depend on the cuts.

    Both rules end a match between a letter and what is none, and between a visible character and a space. Text with
    neither for `limit` characters is cut anywhere: the ids are then valid, and decode to the same text.
    """
    rest = ""
    for block in blocks:
        rest += block
        while len(rest) > limit:
            cut = _last_cut(rest, limit)
            yield rest[:cut]
            rest = rest[cut:]
    if rest:
        yield rest


def _last_cut(text: str, limit: int) -> int:
    for cut in range(limit, 0, -1):
        before, after = text[cut - 1], text[cut]
        if (before.isalpha() and not after.isalpha()) or (after == " " and not before.isspace()):
            return cut
    return limit


def _blocks(path: Path, start: int, stop: int | None, on_bytes: Callable[[int], None] | None) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as stream:
        stream.seek(start)
        position = start
        while True:
            wanted = _BLOCK_BYTES if stop is None else min(_BLOCK_BYTES, stop - position)
            raw = stream.read(wanted)
            pending = len(decoder.getstate()[0])  # the head of a character that the last block cut in two
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}: not UTF-8 at byte {position - pending + error.start} ({error.reason}); convert it, for "
                    "example with `iconv -f LATIN1 -t UTF-8`"
                ) from None
            if position == 0:
                text = text.removeprefix(_BYTE_ORDER_MARK)
            position += len(raw)
            if on_bytes is not None:
                on_bytes(len(raw))
            if not raw:
                return
            yield text


def split_point(path: Path, fraction: float) -> int:
    """The byte where the last `fraction` of a file begins: the first line that begins there or, where none does (a file
    of few or endless lines), the first character."""
    size = path.stat().st_size
    target = round(size * (1 - fraction))
    with path.open("rb") as stream:
        stream.seek(target)
        behind = stream.readline(_LONGEST_LINE_BYTES)
        if behind.endswith(b"\n") and stream.tell() < size:
            return stream.tell()
    # Bytes 10xxxxxx continue a character.
    return target + next((i for i, byte in enumerate(behind) if byte & 0xC0 != 0x80), len(behind))


def split_text(text: str, fraction: float) -> tuple[str, str]:
    """The same cut for a text in memory: (head, tail)."""
    target = round(len(text) * (1 - fraction))
    line_end = text.find("\n", target) + 1
    cut = line_end if 0 < line_end < len(text) else target
    return text[:cut], text[cut:]
