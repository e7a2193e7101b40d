"""`tileflash explain`: what `attention` would run for given sizes, how and why, without writing Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tileflash.cli.errors import friendly_errors

if TYPE_CHECKING:
    import torch

_HELP = """What `tileflash.attention` would run for given sizes: the choice, the reasons against every other backend,
FLOPs and bytes, the time that this GPU cannot beat, and the tiles and programs of what is launched.
Nothing is computed and no memory is taken.

Examples:

\b
  tileflash explain --batch 1 --length 4096 --heads 32 --kv-heads 8 --head-dim 128 --causal
  tileflash explain --length 1 --key-length 65536 --heads 32 --kv-heads 8 --no-gradients
      decoding: one query against a long context
  tileflash explain --length 8192 --window 1023,0 --dtype float16 --backend sdpa
  tileflash explain --length 1024 --head-dim 64 --device cpu --dtype float32

Exit status: 0 something serves, 1 nothing does, 2 bad input.
"""


@friendly_errors
def explain(
    batch: Annotated[int, typer.Option(min=0, help="Batch size.")] = 1,
    length: Annotated[int, typer.Option(min=0, help="Queries of a sequence.")] = 4096,
    key_length: Annotated[int | None, typer.Option(min=0, help="Keys of a sequence.", show_default="--length")] = None,
    heads: Annotated[int, typer.Option(min=0, help="Query heads.")] = 32,
    kv_heads: Annotated[int | None, typer.Option(min=0, help="K/V heads.", show_default="--heads")] = None,
    head_dim: Annotated[int, typer.Option(min=0, help="Head dimension of Q and K.")] = 128,
    head_dim_v: Annotated[int | None, typer.Option(min=0, help="That of V.", show_default="--head-dim")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="The last query stands at the last key.")] = False,
    top_left: Annotated[bool, typer.Option("--top-left", help="Causal, the first query at the first key.")] = False,
    window: Annotated[str | None, typer.Option(help="LEFT,RIGHT keys around each query; none: no bound.")] = None,
    scale: Annotated[float | None, typer.Option(help="Of the logits.", show_default="1 / sqrt(D)")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32 or float64.")] = "bfloat16",
    device: Annotated[
        str | None, typer.Option(help="cuda, cuda:1, cpu, meta.", show_default="cuda where there is a GPU, else cpu")
    ] = None,
    backend: Annotated[str, typer.Option(help="auto, sdpa, or one by name.")] = "auto",
    lse: Annotated[bool, typer.Option("--lse", help="With the log-sum-exp returned.")] = False,
    gradients: Annotated[bool, typer.Option("--gradients/--no-gradients", help="Training or inference.")] = True,
) -> None:
    from dataclasses import replace

    import torch

    import tileflash
    from tileflash.attention.explanation import explain_problem
    from tileflash.attention.problem import FLOATS

    kinds = {str(kind).removeprefix("torch."): kind for kind in FLOATS}
    if dtype not in kinds:
        raise ValueError(f"`--dtype` was {dtype!r}; it must be one of {', '.join(kinds)}")
    where = _device(device)

    def example(rows: int, head_count: int, columns: int) -> torch.Tensor:  # [B, S, H, D], of no size in memory
        return torch.empty(
            (batch, rows, head_count, columns), dtype=kinds[dtype], device="meta", requires_grad=gradients
        )

    keys = length if key_length is None else key_length
    shared = heads if kv_heads is None else kv_heads
    q, k = example(length, heads, head_dim), example(keys, shared, head_dim)
    v = example(keys, shared, head_dim if head_dim_v is None else head_dim_v)
    explanation = tileflash.explain(
        q, k, v, causal="top-left" if top_left else causal, window=_window(window), scale=scale, return_lse=lse,
        backend=backend,
    )  # fmt: skip
    explanation = explain_problem(replace(explanation.problem, device=where), backend)
    typer.echo(str(explanation))
    if explanation.choice is None:
        raise typer.Exit(1)


explain.__doc__ = _HELP


def _device(name: str | None) -> torch.device:
    import torch

    has_gpu = torch.cuda.is_available()
    if name is None:
        name = "cuda" if has_gpu else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"`--device` was {name!r}; it must be cuda, cuda:1, cpu or meta") from None
    if device.type == "cuda" and not has_gpu:
        raise ValueError(f"`--device` was {name}, but PyTorch sees no GPU here; tileflash doctor says why")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"`--device` was {name}, but PyTorch sees {torch.cuda.device_count()} GPUs")
    return device


def _window(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    try:
        left, right = (None if word.strip() == "none" else int(word) for word in text.split(","))
    except ValueError:
        raise ValueError(f"`--window` was {text!r}; it must be LEFT,RIGHT, each a whole number or none") from None
    return left, right
