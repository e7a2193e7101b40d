"""What a token file holds, for a person to look at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tileflash.data.dataset import read_dataset
from tileflash.data.token_file import UINT16
from tileflash.data.token_files import TokenFiles
from tileflash.data.tokenizers import Tokenizer, get_tokenizer


@dataclass(frozen=True)
class Summary:
    """A token file in figures; `documents` is [n, 2]: where each begins (at its begin_of_text) and ends (exclusive)."""

    path: Path
    kind: str
    magic: int
    version: int
    tokens: int
    first_ids: list[int]
    first_text: str | None
    tokenizer: str | None
    documents: np.ndarray


def summarize(
    path: Path, tokenizer_name: str | None = None, tokenizer_path: Path | None = None, first: int = 64
) -> Summary:
    """Read one token file. The tokenizer is, unless named, the one that dataset.json beside it says, else GPT-2's for
    16-bit tokens and none for 32-bit ones. ValueError: a bad file, or an id beyond the tokenizer's vocabulary."""
    if first < 0:
        raise ValueError(f"`first` was {first}; it must be at least 0")
    if not path.is_file():
        raise ValueError(f"{path}: not a file")
    tokenizer = _tokenizer_for(path, tokenizer_name, tokenizer_path)
    files = TokenFiles(path, None if tokenizer is None else tokenizer.vocab_size)
    ids = files.read(0, min(first, len(files))).tolist()
    begin = np.zeros(0, dtype=np.int64) if tokenizer is None else files.positions_of(tokenizer.begin_of_text)
    if begin.size == 0 or begin[0] != 0:
        begin = np.insert(begin, 0, 0)
    return Summary(
        path=path,
        kind=files.kind.name,
        magic=files.kind.magic,
        version=files.kind.version,
        tokens=len(files),
        first_ids=ids,
        first_text=None if tokenizer is None else tokenizer.decode(ids),
        tokenizer=None if tokenizer is None else tokenizer.name,
        documents=np.stack([begin, np.append(begin[1:], len(files))], axis=1),
    )


def _tokenizer_for(path: Path, name: str | None, tokenizer_path: Path | None) -> Tokenizer | None:
    if name is not None:
        return get_tokenizer(name, tokenizer_path)
    dataset = read_dataset(path.parent)
    if dataset is not None and path.name in dataset.files:
        # Llama-3's needs a path: without one the ids alone are shown.
        if dataset.tokenizer != "llama3" or tokenizer_path is not None:
            return get_tokenizer(dataset.tokenizer, tokenizer_path)
        return None
    return get_tokenizer("gpt2") if TokenFiles(path).kind is UINT16 else None
