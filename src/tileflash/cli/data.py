"""`tileflash data`: text to token files, and a look into them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tileflash.cli.errors import friendly_errors

app = typer.Typer(no_args_is_help=True, help="Make and inspect token files (.bin of llm.c and InfiniTrain).")

_TokenizerName = Annotated[str, typer.Option(help="gpt2 (50,257 ids), llama3 (128,256; with --tokenizer-path), bytes.")]
_TokenizerPath = Annotated[Path | None, typer.Option(help="Meta's tokenizer.model, for llama3.")]
_Output = Annotated[Path, typer.Option(help="Directory for train.bin, val.bin and dataset.json.")]


@app.command(no_args_is_help=True)
@friendly_errors
def prepare(
    texts: Annotated[list[Path], typer.Argument(metavar="TEXT...", help="UTF-8 text files; each is one document.")],
    output: _Output,
    tokenizer: _TokenizerName = "gpt2",
    tokenizer_path: _TokenizerPath = None,
    validation_fraction: Annotated[float, typer.Option(help="Share of each file that goes to val.bin.")] = 0.1,
    shard_tokens: Annotated[int | None, typer.Option(help="Most tokens in a file (default 2^31 - 1).")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the token files already there.")] = False,
) -> None:
    """Encode text files into token files.

    Example: tileflash data prepare book.txt notes.txt --output data/books
    then: tileflash train gpt2 --flash --input-bin data/books/train.bin --input-val-bin data/books/val.bin
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from tileflash.data import get_tokenizer
    from tileflash.data import prepare as prepare_files
    from tileflash.data.token_file import MAX_TOKENS

    codec = get_tokenizer(tokenizer, tokenizer_path)
    columns = (TextColumn("encoding"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    total_bytes = sum(path.stat().st_size for path in texts)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("encoding", total=total_bytes)
        dataset = prepare_files(
            texts,
            codec,
            output,
            validation_fraction=validation_fraction,
            shard_tokens=MAX_TOKENS if shard_tokens is None else shard_tokens,
            overwrite=overwrite,
            on_bytes=lambda count: progress.advance(task, count),
        )
    for name, count in sorted(dataset.files.items()):
        typer.echo(f"{output / name}: {count:,} tokens")


@app.command(no_args_is_help=True)
@friendly_errors
def demo(output: _Output, tokenizer: _TokenizerName = "gpt2", tokenizer_path: _TokenizerPath = None) -> None:
    """Write the demo corpus (English text that ships with Python); does nothing when it is already there.

    Example: tileflash data demo --output data/demo
    """
    from tileflash.data import open_token_file, prepare_demo

    for path in prepare_demo(output, tokenizer, tokenizer_path):
        typer.echo(f"{path}: {open_token_file(path).count:,} tokens")


@app.command(no_args_is_help=True)
@friendly_errors
def show(
    file: Annotated[Path, typer.Argument(help="A token file.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="gpt2, llama3 or bytes; by default as dataset.json beside the file says.")
    ] = None,
    tokenizer_path: _TokenizerPath = None,
    first: Annotated[int, typer.Option(help="How many tokens to print.")] = 64,
    documents: Annotated[int, typer.Option(min=0, help="How many documents to list.")] = 8,
) -> None:
    """Print a token file's header, its first tokens decoded, and where its documents begin and end.

    Example: tileflash data show data/demo/train.bin --first 32
    """
    from tileflash.data.show import summarize

    summary = summarize(file, tokenizer, tokenizer_path, first)
    typer.echo(f"{summary.path}: {summary.kind} tokens, magic {summary.magic}, version {summary.version}")
    typer.echo(f"tokens: {summary.tokens:,}")
    typer.echo(f"first {len(summary.first_ids)} ids: {' '.join(map(str, summary.first_ids))}")
    if summary.first_text is None:
        typer.echo("text: unknown; name the tokenizer with --tokenizer (and --tokenizer-path for llama3)")
        return
    typer.echo(f"text ({summary.tokenizer}): {summary.first_text!r}")
    bounds = summary.documents
    lengths = bounds[:, 1] - bounds[:, 0]
    typer.echo(f"documents: {len(bounds):,}, of {lengths.min():,} to {lengths.max():,} tokens")
    for number, (begin, end) in enumerate(bounds[:documents].tolist()):
        typer.echo(f"  {number}: tokens {begin:,} to {end:,} ({end - begin:,})")
