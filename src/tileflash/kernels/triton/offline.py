"""Compile the attention kernels for a GPU that is not there, and read what came out: registers, spills, shared memory, wgmma.

`python -m tileflash.kernels.triton.offline sm_90 sm_80 gfx942` prints a JSON line for every shipped configuration.
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
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from tileflash.kernels.triton import features
from tileflash.kernels.triton.attention_backward import (
    attention_backward_dkdv_kernel,
    attention_backward_dq_kernel,
)
from tileflash.kernels.triton.attention_backward_bias import attention_backward_bias_kernel
from tileflash.kernels.triton.attention_forward import attention_forward_kernel
from tileflash.kernels.triton.configurations import AMD, SPLIT_KEY_PASS_FROM, Kernel, Tile, select_tile

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_KERNELS = {
    "forward": attention_forward_kernel,
    "dkdv": attention_backward_dkdv_kernel,
    "dk": attention_backward_dkdv_kernel,
    "dv": attention_backward_dkdv_kernel,
    "dq": attention_backward_dq_kernel,
    "bias": attention_backward_bias_kernel,
}
# A mask and a bias are one operand, so two sets cover all; a scale that is not positive adds nothing to these.
EVERY_OPTION = sum(
    bit.value
    for bit in (
        features.ALIBI, features.SOFTCAP, features.BIAS, features.DOCUMENTS, features.PREFIX, features.SINKS, features.DROPOUT,
        features.VARLEN,
    )
)  # fmt: skip
EVERY_OPTION_MASKED = EVERY_OPTION - features.BIAS.value + features.MASK.value
_BIAS_TYPES = ("*fp32", *["i32"] * 6)
_MASK_TYPES = ("*i1", *["i32"] * 6)
_EXTRAS_TYPES = (
    "*fp32", "*fp32", "*i64", "*i32", "*i32", "*i32", "*i32", "*i32", *["i32"] * 7, "fp32", "i32", "fp32", "i32",
)  # fmt: skip
_TYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Report:
    """What one kernel compiled to.

    `spill_bytes` counts stores and loads (on AMD: 4 bytes a spilled register), `matrix_instructions` wgmma on sm_90, mma on other
    NVIDIA targets, MFMA on AMD; `warnings` the times that ptxas had to run wgmma one after the other (C75xx); `narrow_products` see
    there.
    """

    target: str
    kernel: str
    head_dim: int
    banded: bool
    dtype: str
    features: int
    tile: tuple[int, ...]
    registers: int
    spill_bytes: int
    shared_bytes: int
    matrix_instructions: int
    warnings: int
    narrow_products: int


def shipped_configurations(
    target: str, dtype: torch.dtype, head_dims: tuple[int, ...] = (64, 128, 256), feature_bits: int = 0,
    tf32: bool = False,
) -> Iterator[tuple[str, int, bool, Tile]]:  # fmt: skip
    """(kernel, head dimension, banded, tile) of everything that `tileflash.attention` launches on the target."""
    gpu = TARGETS[target]
    capability = divmod(int(gpu.arch), 10) if gpu.backend == "cuda" else AMD
    for head_dim in head_dims:
        key_passes: tuple[Kernel, ...] = ("dk", "dv") if head_dim >= SPLIT_KEY_PASS_FROM else ("dkdv",)
        kernels: tuple[Kernel, ...] = ("forward", *key_passes, "dq")
        if feature_bits & features.BIAS.value:
            kernels = (*kernels, "bias")
        for banded in (False, True) if not feature_bits else (True,):
            for kernel in kernels:
                tile = select_tile(kernel, head_dim, dtype, capability, banded, feature_bits, tf32)
                yield kernel, head_dim, banded, tile


def compile_offline(
    target: str, kernel: str, head_dim: int, banded: bool, tile: Tile, dtype: torch.dtype, feature_bits: int = 0,
    precision: str = "ieee",
) -> Report:  # fmt: skip
    """Compile one kernel for a target and read the result. Works without a GPU; takes one to ten seconds."""
    function = _KERNELS[kernel]
    constants: dict[Any, Any] = {
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_D": head_dim, "BLOCK_DV": head_dim, "KV_GROUP": 1,
        "EVEN_D": True, "EVEN_DV": True, "HAS_LOW": False, "HAS_HIGH": banded, "HAS_D_LSE": False, "PRECISION": precision,
        "MAKE_DK": kernel != "dv", "MAKE_DV": kernel != "dk", "FEATURES": feature_bits,
        "ONE_BATCH": True, "ONE_HEAD": False, "ONE_QUERY": False, "ONE_KEY": False,
    }  # fmt: skip
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    tuples = {
        "bias": _BIAS_TYPES
        if feature_bits & features.BIAS.value
        else _MASK_TYPES
        if feature_bits & features.MASK.value
        else (),
        "extras": _EXTRAS_TYPES if feature_bits else (),
    }
    signature = {
        name: "constexpr" if name in constants else tuples[name] if name in tuples else _type_of(name, dtype)
        for name in function.arg_names
    }  # fmt: skip
    # Strides, head dimensions and addresses are multiples of 16 in every case that matters.
    divisible = [
        i
        for i, name in enumerate(function.arg_names)
        if name.endswith("_ptr") or name.startswith("stride") or name in ("D", "DV")
    ]
    attributes = {(i,): [["tt.divisibility", 16]] for i in divisible}
    source = ASTSource(function, signature, constants, attributes)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    if tile.max_registers:
        options["maxnreg"] = tile.max_registers
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    registers, spill_bytes, matrix_instructions, warnings = read_compiled(compiled, target)
    return Report(
        target,
        kernel,
        head_dim,
        banded,
        _TYPE_NAMES[dtype],
        feature_bits,
        (*tile,),
        registers,
        spill_bytes,
        compiled.metadata.shared,
        matrix_instructions,
        warnings,
        narrow_products(compiled.asm["ttgir"]),
    )


def narrow_products(ttgir: str) -> int:
    """Number of matrix products that sum over fewer elements than four threads of mma.sync hold, which Triton 3.6 multiplies wrongly.

    A thread holds `kWidth` neighbours of a row and four threads share it. kWidth is made for the narrowest type that an operand was
    made from: 2 for bf16, but 8 where bytes decide about its elements (a mask and what dropout keeps, together). Then a product over
    16 is wrong on the GPU, and no error says so; over 32 it is right.
    """
    found = 0
    for shape, layout in re.findall(
        r"tt\.dot .*? : tensor<([\dx]+)x[a-z]\w*, #ttg\.dot_op<\{(opIdx = 0[^}]*)\}>>", ttgir
    ):
        width = re.search(r"kWidth = (\d+)", layout)
        found += width is not None and int(shape.split("x")[-1]) < 4 * int(width[1])
    return found


def _type_of(name: str, dtype: torch.dtype) -> str:
    if name in ("lse_ptr", "delta_ptr", "d_lse_ptr", "d_slopes_ptr", "d_bias_ptr"):
        return "*fp32"
    if name.endswith("_ptr"):
        return "*" + _TYPE_NAMES[dtype]
    return "fp32" if name.startswith("scale") else "i32"


def read_compiled(compiled: Any, target: str) -> tuple[int, int, int, int]:
    """(registers, spill bytes, matrix instructions, warnings) of a kernel compiled for one of TARGETS, as `Report` has them."""
    read = _read_amd if TARGETS[target].backend == "hip" else _read_nvidia
    return read(compiled, target)


def _read_nvidia(compiled: Any, target: str) -> tuple[int, int, int, int]:
    """Assembles the PTX once more, because only `ptxas -v` tells of spills and of wgmma that it had to serialise (C75xx)."""
    ptxas = (
        Path(triton.__file__).parent / "backends/nvidia/bin" / ("ptxas-blackwell" if target == "sm_100" else "ptxas")
    )
    architecture = target + ("a" if target in ("sm_90", "sm_100") else "")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        command = [str(ptxas), "-v", f"--gpu-name={architecture}", file.name, "-o", "/dev/null"]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    said = run.stdout + run.stderr
    spills = sum(int(count) for count in re.findall(r"(\d+) bytes spill", said))
    registers = int(re.findall(r"Used (\d+) registers", said)[0])
    instruction = {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}.get(target, "mma.sync")
    return registers, spills, compiled.asm["ptx"].count(instruction), len(re.findall(r"C75\d\d", said))


def _read_amd(compiled: Any, target: str) -> tuple[int, int, int, int]:
    text = compiled.asm["amdgcn"]
    spilled = sum(int(count) for count in re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", text))
    return int(re.findall(r"\.vgpr_count:\s*(\d+)", text)[0]), 4 * spilled, text.count("v_mfma"), 0


def check_signatures() -> None:
    """Make each kernel's launch function, which a launch does first and a compilation alone does not: it refuses some names."""
    for target in ("sm_90", "gfx942"):
        backend = make_backend(TARGETS[target])
        for kernel in _KERNELS.values():
            create_function_from_signature(kernel.signature, kernel.params, backend)


def main(targets: list[str]) -> None:
    """Print a JSON line for each shipped configuration of each target: bf16; head dimension 64 in fp32; and with every option on."""
    check_signatures()
    for target in targets:
        for dtype, head_dims, feature_bits, precision in (
            (torch.bfloat16, (64, 128, 256), 0, "ieee"),
            (torch.float32, (64,), 0, "ieee"),
            (torch.bfloat16, (64, 256, 512), EVERY_OPTION, "ieee"),
            (torch.bfloat16, (128, 512), EVERY_OPTION_MASKED, "ieee"),
            (torch.float32, (64, 128), EVERY_OPTION_MASKED, "tf32"),
        ):
            shipped = shipped_configurations(target, dtype, head_dims, feature_bits, precision == "tf32")
            for kernel, head_dim, banded, tile in shipped:
                report = compile_offline(target, kernel, head_dim, banded, tile, dtype, feature_bits, precision)
                print(json.dumps(asdict(report)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(TARGETS))
