"""`tileflash train`: the fields of TrainConfig as flags."""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from tileflash.cli.errors import friendly_errors
from tileflash.train.config import TrainConfig, load_toml, parse_override

INTERRUPTED, OUT_OF_MEMORY, FAILED = 130, 3, 1  # exit statuses; 2 is bad input

# Named here, not read from tileflash.models, which would load PyTorch for `--help`; a test compares them.
_PRESETS = "gpt2-tiny, gpt2, gpt2-medium, gpt2-large, gpt2-xl, llama3-tiny, llama3-1b, llama3-3b, llama3-8b"

_HELP = """Train GPT-2 or LLaMA-3 on one device, or by torchrun on several, from a preset or from a TOML file (its keys: the flags).

Examples:

\b
  tileflash train gpt2-tiny --num-iteration 200 --learning-rate 1e-3
      a small model on the bundled text, on whatever this machine has
  tileflash train gpt2 --flash --batch-size 16 --sequence-length 1024 --num-iteration 1000 --output runs/gpt2
  tileflash train gpt2 --flash --output runs/gpt2 --resume
      go on exactly where the run above was killed (give it the same flags)
  tileflash train llama3-1b --flash --input-bin 'data/train_*.bin' --input-val-bin data/val.bin --val-loss-every 100
  tileflash train my-run.toml --learning-rate 3e-4
      flags win over the file
  torchrun --nproc-per-node 8 -m tileflash train llama3-8b --flash --data-parallel 4 --zero-stage 3 --tensor-parallel 2
      8 GPUs; data x tensor x context x pipeline ranks = all ranks

Exit status: 0 finished, 130 interrupted (Ctrl-C; saved), 3 out of memory, 2 bad input, 1 anything else.
"""


def train(context: typer.Context, model: str, **flags: Any) -> None:
    """Settings come from the file, if MODEL is one, then from the flags that were typed."""
    with friendly_errors():
        config = read_config(context, model, flags)
        _end(_run(config))


def read_config(context: typer.Context, model: str, flags: dict[str, Any]) -> TrainConfig:
    """The settings of a command whose flags are those of `with_settings`."""
    flags["model_overrides"] = dict(parse_override(text) for text in flags["model_overrides"])
    settings: dict[str, Any] = {"model": model}
    if model.endswith(".toml"):
        settings = load_toml(Path(model))
    for name, value in flags.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            settings[name] = value
    return TrainConfig(**settings)


def _run(config: TrainConfig) -> int:
    """Train; return the exit status."""
    from tileflash.train import (
        CheckpointError,
        GraphCaptureError,
        RankLostError,
        TrainingOutOfMemoryError,
        TrainingStoppedError,
    )
    from tileflash.train import train as run_training

    try:
        result = run_training(config)
    except TrainingOutOfMemoryError as error:
        typer.echo(f"error: {error}", err=True)
        return OUT_OF_MEMORY
    except (CheckpointError, GraphCaptureError, RankLostError, TrainingStoppedError) as error:
        typer.echo(f"error: {error}", err=True)
        return FAILED
    except KeyboardInterrupt as error:
        typer.echo(str(error) or "interrupted", err=True)
        return INTERRUPTED
    return INTERRUPTED if result.status == "interrupted" else 0


def _end(status: int) -> None:
    """End with `status`: a rank of several at once, for the threads of its process group outlive the interpreter's own
    end and may then abort it (seen with PyTorch 2.13 and gloo), or keep it waiting for a rank that is gone."""
    from tileflash.parallel.ranks import world_size_from_environment

    if world_size_from_environment() is None:
        raise typer.Exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def with_settings(command: Callable[..., Any], help_text: str) -> None:
    """Give `command(context, model, *, ..., **flags)` a flag for each setting: its name, type, default and help are those of the
    dataclass's field. Parameters of its own stay."""
    types = get_type_hints(TrainConfig)
    keyword = inspect.Parameter.KEYWORD_ONLY
    own = get_type_hints(command, include_extras=True)
    parameters = [
        inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
        inspect.Parameter(
            "model",
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            annotation=Annotated[
                str, typer.Argument(metavar="MODEL|FILE.toml", help=f"A preset ({_PRESETS}), or a TOML file.")
            ],
        ),
    ]
    for parameter in inspect.signature(command).parameters.values():
        if parameter.kind is keyword:
            parameters.append(parameter.replace(annotation=own[parameter.name]))
    for setting in dataclasses.fields(TrainConfig):
        if setting.name == "model":
            continue
        facts = setting.metadata
        names = ["--model-override"] if setting.name == "model_overrides" else []
        option = typer.Option(*names, help=facts["help"], rich_help_panel=facts["group"])
        is_list = setting.name == "model_overrides"
        parameters.append(
            inspect.Parameter(
                setting.name,
                keyword,
                default=[] if is_list else setting.default,
                annotation=Annotated[list[str] if is_list else types[setting.name], option],
            )
        )
    # typer reads a command's flags from its signature; written out by hand it would be every setting a second time.
    command.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = help_text


with_settings(train, _HELP)
