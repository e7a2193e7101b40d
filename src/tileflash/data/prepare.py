"""From text to token files, whole or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from tileflash.data.corpus import demo_topics
from tileflash.data.dataset import DATASET_FILE, Dataset, DatasetWriter, read_dataset, token_files_in
from tileflash.data.text import file_pieces, split_pieces, split_point, split_text
from tileflash.data.token_file import MAX_TOKENS
from tileflash.data.tokenizers import Tokenizer, get_tokenizer

_DEMO_VALIDATION_FRACTION = 0.1


def prepare(
    texts: Sequence[Path],
    tokenizer: Tokenizer,
    output: Path,
    *,
    validation_fraction: float = 0.1,
    shard_tokens: int = MAX_TOKENS,
    overwrite: bool = False,
    on_bytes: Callable[[int], None] | None = None,
) -> Dataset:
    """Encode UTF-8 text files into `output`/train.bin and val.bin (train_000001.bin ... beyond `shard_tokens`).

    Each file is one document; the last `validation_fraction` of each goes to val.bin, so that both hold the same kinds
    of text. Memory does not grow with the files. All is written aside and moved into place at the end.

    ValueError: no file, an empty one, one that is not UTF-8 (file and byte), a fraction outside [0, 1), an output that
    already holds token files (unless `overwrite`). OSError: a file that cannot be read.
    """
    if not texts:
        raise ValueError("`texts` was empty; name at least one text file")
    if not 0 <= validation_fraction < 1:
        raise ValueError(f"`validation_fraction` was {validation_fraction}; it must be at least 0 and less than 1")
    for path in texts:
        if path.stat().st_size == 0:
            raise ValueError(f"{path}: empty; it must hold some text")
    output.mkdir(parents=True, exist_ok=True)
    if (existing := token_files_in(output)) and not overwrite:
        raise ValueError(
            f"{output} already holds {', '.join(existing)}; choose another directory, or pass `--overwrite`"
        )
    source = ", ".join(str(path) for path in texts[:20]) + (f" and {len(texts) - 20} more" if len(texts) > 20 else "")
    with DatasetWriter(output, tokenizer, source, shard_tokens) as writer:
        for path in texts:
            cut = split_point(path, validation_fraction)
            parts = (("train", 0, cut), ("val", cut, path.stat().st_size))
            visible = [
                writer.add_document(split, file_pieces(path, start, stop, on_bytes))
                for split, start, stop in parts
                if start < stop
            ]
            if not any(visible):
                raise ValueError(f"{path}: nothing but white space; it must hold some text")
        return writer.publish()


def prepare_demo(directory: Path, tokenizer_name: str, tokenizer_path: Path | None = None) -> tuple[Path, Path]:
    """Write the demo corpus as `directory`/train.bin and val.bin and return both paths; the last tenth of every topic
    is held out. Nothing is done when they are there and complete; other people's files are never written over.

    ValueError: a wrong tokenizer, or a directory that holds other token files.
    """
    directory = Path(directory)
    topics = demo_topics()
    source = "demo " + hashlib.sha256("\0".join(topics).encode()).hexdigest()[:16]
    paths = directory / "train.bin", directory / "val.bin"
    tokenizer = get_tokenizer(tokenizer_name, tokenizer_path)
    if directory.exists():
        found = read_dataset(directory)
        if found is None and token_files_in(directory):
            raise ValueError(
                f"{directory} holds token files of other text (no {DATASET_FILE}); choose another directory"
            )
        if found is not None and (found.tokenizer, found.source.split()[0]) != (tokenizer.name, "demo"):
            raise ValueError(
                f"{directory} holds {found.tokenizer} tokens of {found.source}; choose another directory for the "
                f"demo's {tokenizer.name} tokens"
            )
        if found is not None and found.source == source and found.is_complete(directory):
            return paths
    with DatasetWriter(directory, tokenizer, source) as writer:
        for topic in topics:
            head, tail = split_text(topic, _DEMO_VALIDATION_FRACTION)
            for split, text in (("train", head), ("val", tail)):
                if text:
                    writer.add_document(split, split_pieces(iter([text])))
        writer.publish()
    return paths
