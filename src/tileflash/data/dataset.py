"""A directory of prepared tokens: train*.bin, val*.bin and dataset.json, which says how they were made."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from tileflash.data.token_file import MAX_TOKENS, TokenFileWriter, open_token_file
from tileflash.data.tokenizers import Tokenizer

DATASET_FILE = "dataset.json"
SPLITS = ("train", "val")
_TOKEN_FILE = re.compile(r"(train|val)(_\d{6})?\.bin")


@dataclass(frozen=True)
class Dataset:
    """What dataset.json says: the tokenizer, the text's origin, and each file's number of tokens."""

    tokenizer: str
    vocab_size: int
    begin_of_text: int
    end_of_text: int
    source: str
    files: dict[str, int]  # file name -> tokens

    def paths(self, directory: Path, split: str) -> list[Path]:
        """The files of `train` or `val`, in order."""
        return [directory / name for name in sorted(self.files) if name.startswith(split)]

    def tokens(self, split: str) -> int:
        """Number of tokens of `train` or `val`."""
        return sum(count for name, count in self.files.items() if name.startswith(split))

    def is_complete(self, directory: Path) -> bool:
        """Whether every file is there, sound, and holds as many tokens as it should."""
        try:
            return all(open_token_file(directory / name).count == count for name, count in self.files.items())
        except (OSError, ValueError):
            return False


def read_dataset(directory: Path) -> Dataset | None:
    """dataset.json of a directory, None where there is none; ValueError when it is not one of ours."""
    path = directory / DATASET_FILE
    if not path.exists():
        return None
    try:
        return Dataset(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: not written by `tileflash data prepare` ({error}); remove it") from None


class DatasetWriter:
    """Writes a dataset aside, in a hidden directory within `directory`, and moves it into place when it is whole."""

    def __init__(self, directory: Path, tokenizer: Tokenizer, source: str, shard_tokens: int = MAX_TOKENS) -> None:
        if not 1 <= shard_tokens <= MAX_TOKENS:
            raise ValueError(f"`shard_tokens` was {shard_tokens}; it must be between 1 and {MAX_TOKENS}")
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.tokenizer = tokenizer
        self.source = source
        self.shard_tokens = shard_tokens
        self._aside = Path(tempfile.mkdtemp(prefix=".partial-", dir=directory))
        self._shards: dict[str, list[TokenFileWriter]] = {split: [] for split in SPLITS}

    def add_document(self, split: str, pieces: Iterable[str]) -> bool:
        """Encode one document; returns whether it holds anything but white space. It starts with begin_of_text, and
        ends with end_of_text where that is another id (GPT-2 has one id for both)."""
        visible = False
        begin, end = self.tokenizer.begin_of_text, self.tokenizer.end_of_text
        self._append(split, [begin])
        for piece in pieces:
            visible = visible or not (piece == "" or piece.isspace())
            self._append(split, self.tokenizer.encode(piece))
        if end != begin:
            self._append(split, [end])
        return visible

    def _append(self, split: str, ids: Sequence[int]) -> None:
        shards = self._shards[split]
        while ids:
            room = self.shard_tokens - shards[-1].count if shards else 0
            if room == 0:
                path = self._aside / f"{split}_{len(shards) + 1:06d}.bin"
                shards.append(TokenFileWriter(path, self.tokenizer.vocab_size))
                room = self.shard_tokens
            shards[-1].append(ids[:room])
            ids = ids[room:]

    def publish(self) -> Dataset:
        """Move the files into place. dataset.json goes first: a crash in between leaves a set that is seen to be
        incomplete, never one that mixes old and new files and looks whole."""
        names: dict[str, Path] = {}
        for split, shards in self._shards.items():
            for shard in shards:
                shard.close()
            # A single shard needs no number.
            names |= {f"{split}.bin" if len(shards) == 1 else shard.path.name: shard.path for shard in shards}
        dataset = Dataset(
            tokenizer=self.tokenizer.name,
            vocab_size=self.tokenizer.vocab_size,
            begin_of_text=self.tokenizer.begin_of_text,
            end_of_text=self.tokenizer.end_of_text,
            source=self.source,
            files={name: open_token_file(path).count for name, path in names.items()},
        )
        record = self._aside / DATASET_FILE
        record.write_text(json.dumps(asdict(dataset), indent=2) + "\n", encoding="utf-8")
        os.replace(record, self.directory / DATASET_FILE)
        for stale in set(token_files_in(self.directory)) - set(names):
            (self.directory / stale).unlink()
        for name, path in names.items():
            os.replace(path, self.directory / name)
        return dataset

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for shard in (shard for shards in self._shards.values() for shard in shards):
            with suppress(OSError):  # closing writes what is held back, which a full disk refuses again
                shard.discard()
        shutil.rmtree(self._aside)


def token_files_in(directory: Path) -> list[str]:
    """Names of the files in `directory` that a prepared set would write over."""
    return sorted(path.name for path in directory.iterdir() if _TOKEN_FILE.fullmatch(path.name))
