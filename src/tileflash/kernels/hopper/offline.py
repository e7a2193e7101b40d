"""Compile the Hopper kernels without a GPU, and read what came out: registers, spills, shared memory, wgmma.

`python -m tileflash.kernels.hopper.offline` prints a JSON line for every shipped configuration, three minutes for each dtype (`... bf16`
for one dtype only, `--tested` for what the tests compile).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from tileflash.kernels.compat_gluon import LAUNCH_OPTIONS, GluonASTSource
from tileflash.kernels.hopper.configurations import BACKWARD, FORWARD, TYPE_NAMES, padded_backward
from tileflash.kernels.hopper.launch import (
    BANDS,
    Band,
    KernelCall,
    KernelOptions,
    backward_call,
    backward_queries_call,
    forward_call,
)

OPTION_BANDS: dict[torch.dtype, Band] = {torch.bfloat16: "window", torch.float16: "high"}
TARGET = GPUTarget("cuda", 90, 32)


@dataclass(frozen=True)
class Report:
    """What one kernel compiled to. `spill_bytes` counts stores and loads, `spills_in_loops` those instructions among them that stand in
    a loop over tiles; `serialised` the times that ptxas had to run wgmma one after the other (C75xx); `named_barriers` the waits
    at a hardware barrier of our own, one a warpgroup where there are any."""

    kernel: str
    head_dim: int
    band: str
    dtype: str
    registers: int
    spill_bytes: int
    spills_in_loops: int
    shared_bytes: int
    wgmma: int
    serialised: int
    named_barriers: int


def shipped_calls(dtype: torch.dtype) -> Iterator[tuple[str, int, str, KernelCall]]:
    """(kernel, head dimension, band, call) of everything that the launcher starts; of soft caps and packed sequences one band for each
    dtype."""
    yield from _default_calls(dtype)
    yield from _option_calls(dtype)


def tested_calls(dtype: torch.dtype) -> Iterator[tuple[str, int, str, KernelCall]]:
    """Of these all without an option, and of each option one band: in bf16 at every head dimension, in fp16 (in the tests another version
    of Triton) at 128, where determinism goes with the other options, too."""
    yield from _default_calls(dtype)
    for kernel, head_dim, band, call in _option_calls(dtype):
        of_two_options = kernel.startswith(("backward keys, ", "backward queries, "))
        if band == OPTION_BANDS[dtype] and (head_dim == 128 if dtype == torch.float16 else not of_two_options):
            yield kernel, head_dim, band, call


def _default_calls(dtype: torch.dtype) -> Iterator[tuple[str, int, str, KernelCall]]:
    for band in BANDS:
        for head_dim in sorted({head_dim for head_dim, _ in FORWARD}):
            yield "forward", head_dim, band, forward_call(head_dim, dtype, band)
        for head_dim in sorted({head_dim for head_dim, _ in BACKWARD}):
            for grouped in (False, True):
                call = backward_call(head_dim, dtype, band, grouped)
                if not grouped or "GROUPED" in call.constants:  # the wide kernel is the same for both
                    yield "backward, grouped" if grouped else "backward", head_dim, band, call


def _option_calls(dtype: torch.dtype) -> Iterator[tuple[str, int, str, KernelCall]]:
    """deterministic=True (d_k and d_v, then d_q), a soft cap (and sinks, in the forward pass), packed sequences. All with grouped heads,
    which are a counter more."""
    for band in BANDS:
        for head_dim in sorted({head_dim for head_dim, _ in BACKWARD}):
            yield "backward keys", head_dim, band, backward_call(head_dim, dtype, band, True, with_d_q=False)
            yield "backward queries", head_dim, band, backward_queries_call(head_dim, dtype, band)
    kinds = {"soft cap": KernelOptions(soft_cap=True, sinks=True), "packed": KernelOptions(packed=True)}
    band = OPTION_BANDS[dtype]
    for name, options in kinds.items():
        for head_dim in sorted({head_dim for head_dim, _ in FORWARD}):
            yield f"forward, {name}", head_dim, band, forward_call(head_dim, dtype, band, options)
        for head_dim in sorted({padded_backward(head_dim, options.soft_cap) for head_dim, _ in BACKWARD}):
            yield f"backward, {name}", head_dim, band, backward_call(head_dim, dtype, band, True, on=options)
            call = backward_call(head_dim, dtype, band, True, with_d_q=False, on=options)
            yield f"backward keys, {name}", head_dim, band, call
            yield f"backward queries, {name}", head_dim, band, backward_queries_call(head_dim, dtype, band, options)


def compile_offline(call: KernelCall) -> Any:
    """The compiled kernel of a call. Works without a GPU; takes one to four seconds."""
    function = call.kernel
    signature = {name: call.type_of(name) for name in function.arg_names}
    aligned = [i for i, name in enumerate(function.arg_names) if signature[name][0] == "*" and name != "lse_ptr"]
    constants = {**call.constants, **dict.fromkeys(call.absent)}
    source = GluonASTSource(function, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    return triton.compile(source, target=TARGET, options=LAUNCH_OPTIONS)


def report(kernel: str, head_dim: int, band: str, dtype: torch.dtype, compiled: Any) -> Report:
    """Assembles the PTX once more, because only `ptxas -v` tells of spills and of wgmma that it had to serialise."""
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        for ptxas in ("ptxas", "ptxas-blackwell"):  # from Triton 3.9 on the first is too old for what Triton writes
            command = [str(tools / ptxas), "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            if run.returncode == 0:
                break
    run.check_returncode()
    said = run.stdout + run.stderr
    return Report(
        kernel,
        head_dim,
        band,
        TYPE_NAMES[dtype],
        int(re.findall(r"Used (\d+) registers", said)[0]),
        sum(int(count) for count in re.findall(r"(\d+) bytes spill", said)),
        spills_in_loops(_disassembled(compiled)),
        compiled.metadata.shared,
        ptx.count("wgmma.mma_async"),
        len(re.findall(r"C75\d\d", said)),
        len(re.findall(r"bar\.sync\s+1\d,", ptx)),
    )


def _disassembled(compiled: Any) -> str:
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        run = subprocess.run([str(tools / "nvdisasm"), "-c", file.name], capture_output=True, text=True, check=True)
    return run.stdout


def spills_in_loops(sass: str) -> int:
    """Number of accesses to local memory in the innermost loops that multiply with wgmma; a loop is what a jump backwards spans."""
    lines = sass.splitlines()
    labels = {line[:-1]: at for at, line in enumerate(lines) if line.startswith(".L_") and line.endswith(":")}
    loops = []
    for at, line in enumerate(lines):
        target = re.search(r"BRA(?:\.\w+)* .*\((\.L_\w+)\)", line)
        if target and labels.get(target[1], at) < at:
            loops.append(range(labels[target[1]], at))
    loops = [loop for loop in loops if any("HGMMA" in lines[i] for i in loop)]

    def is_innermost(one: range) -> bool:
        """Holds no other loop; and is none that only seems to be one, where what a loop does rarely stands far behind it and jumps back."""
        return not any(
            other != one and ((other[0] in one and other[-1] in one) or (other[0] < one[0] <= other[-1] < one[-1]))
            for other in loops
        )

    innermost = [loop for loop in loops if is_innermost(loop)]
    return sum(bool(re.search(r"\b(LDL|STL)\b", lines[i])) for loop in innermost for i in loop)


def main(arguments: list[str]) -> None:
    """Print a JSON line for each shipped configuration, or with --tested for each that the tests compile."""
    dtypes = [argument for argument in arguments if argument != "--tested"]
    calls = shipped_calls if dtypes == arguments else tested_calls
    for dtype, name in TYPE_NAMES.items():
        if dtypes and name not in dtypes:
            continue
        for kernel, head_dim, band, call in calls(dtype):
            compiled = compile_offline(call)
            print(json.dumps(asdict(report(kernel, head_dim, band, dtype, compiled))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
