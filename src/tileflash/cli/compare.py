"""`tileflash compare`: what `--flash` gains in time and memory, measured, with a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tileflash.cli.errors import friendly_errors

# What an option is when it is not given, and what it is then with --demo: two models that a laptop's CPU trains in a
# minute or two, float32 so that both losses must agree closely, and steps enough for them to fall.
_DEFAULTS: dict[str, Any] = {
    "models": [],
    "lengths": "64,256,1024,4096,8192",
    "repeats": 3,
    "num_iteration": 10,
    "dtype": "bfloat16",
    "public_setting": True,
    "learning_rate": None,
    "warmup_iterations": None,
}
_DEMO_DEFAULTS: dict[str, Any] = {
    "models": ["gpt2-tiny", "llama3-tiny"],
    "lengths": "64,256",
    "repeats": 2,
    "num_iteration": 50,
    "dtype": "float32",
    "public_setting": False,
    "learning_rate": 5e-4,
    # At twice this rate, or without warm-up, some seeds meet a step so unstable that rounding alone drives two runs
    # apart by 1e-3; with both they stay within 2e-6 of each other (7 pairs, 4 seeds).
    "warmup_iterations": 10,
}
# A ladder is long: by default one length.
_LADDER_DEFAULTS = {**_DEFAULTS, "lengths": "64", "public_setting": False}


def _shown(name: str) -> str:
    return f"{_DEFAULTS[name]}; with --demo {_DEMO_DEFAULTS[name]}"


@friendly_errors
def compare(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL...", help="presets (gpt2, llama3-1b, ...) or TOML files, as for tileflash train"),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="sequences a step; a step is one batch")] = 4,
    lengths: Annotated[
        str | None, typer.Option(help="sequence lengths, comma-separated", show_default=_shown("lengths"))
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="how often each pair is measured", show_default=_shown("repeats"))
    ] = None,
    num_iteration: Annotated[
        int | None,
        typer.Option(help="steps of a run; the first is not counted", show_default=_shown("num_iteration")),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="compute dtype: bfloat16 or float32", show_default=_shown("dtype"))
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cuda, cuda:N or cpu")] = "auto",
    public_setting: Annotated[
        bool | None,
        typer.Option(
            "--public-setting/--no-public-setting",
            help="first measure the public report's setting (bfloat16, batch 4, sequence 64, 10 steps)",
            show_default="on; with --demo off",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="of the weights, the data, and the order of the runs")] = 42,
    learning_rate: Annotated[
        float | None, typer.Option(help="of both schemes", show_default="the trainer's; with --demo 5e-4")
    ] = None,
    warmup_iterations: Annotated[
        int | None, typer.Option(help="steps of linear warm-up", show_default="the trainer's; with --demo 10")
    ] = None,
    input_bin: Annotated[
        str | None, typer.Option(help="token files to train on (a glob)", show_default="the demo corpus")
    ] = None,
    attention_backend: Annotated[
        str | None, typer.Option(help="the backend that --flash uses", show_default="the trainer's choice")
    ] = None,
    cuda_graph: Annotated[
        bool | None,
        typer.Option(
            "--cuda-graph/--no-cuda-graph",
            help="both schemes replay their step from CUDA graphs: what is measured is the GPU, not the host",
            show_default="on an NVIDIA GPU yes, elsewhere no",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option(help="directory of report.html, report.md, plots/ and runs/ (one log a run)")
    ] = Path("reports/compare"),
    language: Annotated[str, typer.Option(help="of the report: en or zh")] = "en",
    ledger: Annotated[
        Path | None, typer.Option(help="also append the figures to this ledger, e.g. benchmarks/results/train.jsonl")
    ] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="a small comparison for any machine; fails unless losses fall and agree")
    ] = False,
    ladder: Annotated[
        bool,
        typer.Option(
            "--ladder",
            help="instead of the comparison a table that adds one measure at a time: flash, fused operators, split masters, compiled "
            "layers, CUDA graph",
        ),
    ] = False,
    budget_seconds: Annotated[
        float | None, typer.Option(help="end with a report of what is there after this time", show_default="no limit")
    ] = None,
    timeout_seconds: Annotated[float, typer.Option(help="a single run that takes longer is killed")] = 1800.0,
    resume: Annotated[
        bool, typer.Option("--continue", help="take up an interrupted comparison: finished runs are not made again")
    ] = False,
) -> None:
    """Compare training without --flash (a chain of small operators) and with it: time, memory, losses.

    Each configuration is a `tileflash train` process of its own; both schemes of a pair run back to back, the order
    turning round at each repeat. The report says what was measured, with the spread over the repeats. Out of memory is
    a result. Exit status: 0; 1 when a run failed or the demo's losses are not as they must be; 2 bad input; 130 Ctrl-C
    (the report of what is there is written; --continue does the rest).

    Examples:

        tileflash compare --demo

        tileflash compare gpt2 llama3-1b

        tileflash compare gpt2 --lengths 1024,4096 --repeats 5 --language zh --continue

        tileflash compare gpt2 --ladder --batch-size 32 --lengths 1024
    """
    from tileflash.compare.ladder import climb
    from tileflash.compare.plan import CompareConfig
    from tileflash.compare.session import compare as run_comparison

    if ladder:
        _check_ladder(demo=demo, public_setting=public_setting, ledger=ledger, language=language)
    defaults = _DEMO_DEFAULTS if demo else _LADDER_DEFAULTS if ladder else _DEFAULTS
    given = {
        "models": models,
        "lengths": lengths,
        "repeats": repeats,
        "num_iteration": num_iteration,
        "dtype": dtype,
        "public_setting": public_setting,
        "learning_rate": learning_rate,
        "warmup_iterations": warmup_iterations,
    }
    chosen: dict[str, Any] = {name: defaults[name] if value is None else value for name, value in given.items()}
    config = CompareConfig(
        **{**chosen, "models": tuple(chosen["models"]), "lengths": _parse_lengths(chosen["lengths"])},
        batch_size=batch_size,
        device=device,
        seed=seed,
        input_bin=input_bin,
        attention_backend=attention_backend,
        cuda_graph=cuda_graph,
        output=output,
        language=language,
        ledger=ledger,
        demo=demo,
        budget_seconds=budget_seconds,
        timeout_seconds=timeout_seconds,
        resume=resume,
    )
    _require_known(config.models)
    raise typer.Exit(climb(config) if ladder else run_comparison(config))


def _check_ladder(*, demo: bool, public_setting: bool | None, ledger: Path | None, language: str) -> None:
    """ValueError for what only the comparison has."""
    others = {"--demo": demo, "--public-setting": public_setting, "--ledger": ledger, "--language": language != "en"}
    for name, given in others.items():
        if given:
            raise ValueError(f"--ladder and {name} do not go together: the ladder has a table of its own, in English")


def _parse_lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--lengths is {text!r}; must be integers with commas between, such as 64,1024") from None


def _require_known(models: tuple[str, ...]) -> None:
    """Told here once, rather than by every run."""
    from tileflash.models import PRESETS

    for model in models:
        if model.endswith(".toml"):
            if not Path(model).is_file():
                raise ValueError(f"model is {model!r}: there is no such file")
        elif model not in PRESETS:
            raise ValueError(f"model is {model!r}; must be a TOML file or one of {', '.join(PRESETS)}")
