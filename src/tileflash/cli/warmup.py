"""`tileflash warmup`: compile attention kernels before a run needs them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from tileflash.cli.errors import friendly_errors

if TYPE_CHECKING:
    from tileflash.warmup import Done

_HELP = """Compile attention kernels ahead, so that no first call waits for them.

A kernel is compiled for a head dimension, a dtype, a mask and the query heads that share a K/V head, not for lengths or
batches. It stays in Triton's cache on disk (TRITON_CACHE_DIR), where every process finds it: run this once after an
installation, while an image is built on a machine with the GPU, or before a job with many processes.

Examples:

\b
  tileflash warmup gpt2 llama3-1b
      what training these models calls
  tileflash warmup --head-dims 64,128 --dtypes bfloat16,float16 --masks full,causal --kv-groups 1,4

Exit status: 0; 1 when a kind failed; 2 for bad usage and where there is no GPU.
"""


@friendly_errors
def warmup(
    models: Annotated[list[str] | None, typer.Argument(help="Models whose training is prepared.")] = None,
    head_dims: Annotated[
        str | None, typer.Option(help="Head dimensions.", show_default="64,128 where no model is given")
    ] = None,
    dtypes: Annotated[str, typer.Option(help="bfloat16, float16, float32.")] = "bfloat16",
    masks: Annotated[str, typer.Option(help="full, causal, window; with --head-dims.")] = "full,causal",
    kv_groups: Annotated[str, typer.Option(help="Query heads a K/V head; with --head-dims.")] = "1",
    backends: Annotated[str, typer.Option(help="hopper, triton: those with kernels of ours.")] = "hopper,triton",
    device: Annotated[str, typer.Option(help="cuda or cuda:N.")] = "cuda",
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes.", show_default="half the CPU cores, at most 8")
    ] = None,
) -> None:
    from rich.console import Console
    from rich.progress import Progress

    from tileflash.cli.comma_separated import numbers, words
    from tileflash.doctor.cache import inspect_cache
    from tileflash.train.setup import find_gpu_device
    from tileflash.warmup import kinds_of_model, make_kinds, warm_up

    kinds = [kind for name in models or () for kind in kinds_of_model(name, words(dtypes), words(backends))]
    if head_dims is not None or not models:
        kinds += make_kinds(
            numbers("--head-dims", head_dims or "64,128"),
            words(dtypes),
            words(masks),
            numbers("--kv-groups", kv_groups),
            words(backends),
        )
    kinds = list(dict.fromkeys(kinds))
    device = find_gpu_device(device)
    at_once = jobs or max(1, min(8, (os.cpu_count() or 2) // 2))
    out, errors = Console(highlight=False, soft_wrap=True), Console(stderr=True)
    failed = False
    with Progress(console=errors, disable=not errors.is_terminal) as progress:
        bar = progress.add_task("compiling", total=len(kinds))
        for done in warm_up(kinds, device, at_once):
            failed = failed or bool(done.failure)
            out.print(f"{done.kind}: {_what_came(done)}", markup=False)
            progress.advance(bar)
    cache = inspect_cache()
    out.print(f"{cache.directory}: {cache.files:,} files, {cache.bytes / 2**20:,.0f} MiB")
    raise typer.Exit(int(failed))


def _what_came(done: Done) -> str:
    if done.failure:
        return f"failed ({done.failure})"
    return f"not served ({done.refused})" if done.refused else f"{done.seconds:.1f} s"


warmup.__doc__ = _HELP
