"""`tileflash weights`: convert weights between formats, and show what a file holds."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from .errors import friendly_errors

weights_app = typer.Typer(help="Convert and inspect model weights.", no_args_is_help=True)


class Format(str, Enum):
    huggingface = "huggingface"
    llmc = "llmc"


class StoredType(str, Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


_SOURCE = typer.Argument(help="A Hugging Face directory or an llm.c .bin file.", metavar="SRC", show_default=False)
_TRAINED_SOURCE = typer.Argument(
    help="A Hugging Face directory, an llm.c .bin file, or a checkpoint of tileflash train (or the run's directory).",
    metavar="SRC",
    show_default=False,
)
_DESTINATION = typer.Argument(help="The directory or the .bin file to write.", metavar="DST", show_default=False)


@weights_app.command("convert")
@friendly_errors
def convert(
    source: Annotated[Path, _TRAINED_SOURCE],
    destination: Annotated[Path, _DESTINATION],
    to: Annotated[Format, typer.Option("--to", help="Format to write.", show_default=False)],
    dtype: Annotated[
        StoredType | None, typer.Option(help="Number format to write.", show_default="the source's, or float32")
    ] = None,
    max_shard_bytes: Annotated[
        int, typer.Option(help="Largest safetensors file in bytes (huggingface).", min=1)
    ] = 5_000_000_000,
    float_header: Annotated[
        bool,
        typer.Option(
            "--float-header",
            help="LLaMA-3 .bin: store the header's fractions as floats, as InfiniTrain reads them (llmc).",
        ),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the weights already there.")] = False,
) -> None:
    """Convert weights: Hugging Face safetensors to llm.c .bin or the other way, or a trained model to either.

    Examples:

        tileflash weights convert gpt2_124M.bin gpt2/ --to huggingface

        tileflash weights convert Llama-3.2-1B/ llama3.2_1B.bin --to llmc --dtype bfloat16

        tileflash weights convert runs/gpt2 exported/ --to huggingface
    """
    import torch

    from ..train.export import holds_checkpoints, load_trained
    from ..weights import load_weights, open_weights, save_huggingface, save_llmc

    _require_room(destination, to, overwrite)
    if holds_checkpoints(source):
        model, checkpoint = load_trained(source, typer.echo)
        typer.echo(f"taking {checkpoint}")
        wanted = torch.float32 if dtype is None else getattr(torch, dtype.value)
        model.to(wanted)
    else:
        with open_weights(source) as opened:
            stored = opened.dtype
        wanted = getattr(torch, dtype.value) if dtype else stored if stored == torch.bfloat16 else torch.float32
        model = load_weights(source, dtype=wanted)
    if to is Format.llmc:
        save_llmc(model, destination, wanted, float_header=float_header)
    else:
        save_huggingface(model, destination, max_shard_bytes=max_shard_bytes)
    typer.echo(f"wrote {destination} ({to.value}, {str(wanted).removeprefix('torch.')})")


def _require_room(destination: Path, to: Format, overwrite: bool) -> None:
    """Told before the source is read, which may take minutes."""
    from ..weights import replaced_by_huggingface

    wrong_kind = destination.is_dir() if to is Format.llmc else destination.is_file()
    if wrong_kind:
        is_now, must_be = ("a directory", "a file") if to is Format.llmc else ("a file", "a directory")
        raise ValueError(f"{destination} is {is_now}; --to {to.value} must have the name of {must_be}")
    if overwrite or not destination.exists():
        return
    there = [destination] if to is Format.llmc else replaced_by_huggingface(destination)
    if there:
        names = "is there" if to is Format.llmc else f"holds {', '.join(path.name for path in there)}"
        raise ValueError(f"{destination} already {names}; choose another name, or pass `--overwrite`")


@weights_app.command("show")
@friendly_errors
def show(source: Annotated[Path, _SOURCE]) -> None:
    """Show the model that weights are for, after checking that all of its tensors are there.

    Example:

        tileflash weights show gpt2_124M.bin
    """
    from dataclasses import fields

    from ..models import parameter_count
    from ..weights import open_weights

    with open_weights(source) as opened:
        config = opened.config
        rows: list[tuple[str, object]] = [
            ("format", opened.kind),
            ("dtype", str(opened.dtype).removeprefix("torch.")),
            ("tensors", len(opened.maps)),
            ("parameters", f"{parameter_count(config):,}"),
            ("family", config.family),
        ]
    rows += [(field.name, getattr(config, field.name)) for field in fields(config)]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        typer.echo(f"{name:<{width}}  {value}")
