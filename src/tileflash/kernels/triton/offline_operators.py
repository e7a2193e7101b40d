"""Compile the operators' kernels for a GPU that is not there, and read what came out, as `offline` does for attention.

`python -m tileflash.kernels.triton.offline_operators sm_90` prints a JSON line for every kernel, dtype and size below.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import triton
from triton.compiler import ASTSource

from tileflash.kernels.triton.cross_entropy import cross_entropy_kernel, lanes_and_warps, scale_kernel
from tileflash.kernels.triton.offline import TARGETS, _read_amd, _read_nvidia

DTYPES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class OperatorReport:
    """What one kernel compiled to; `case` says for what. `spill_bytes` counts stores and loads."""

    target: str
    kernel: str
    case: str
    registers: int
    spill_bytes: int
    shared_bytes: int


class Case(NamedTuple):
    """One compilation. `types` are those of the parameters that are no constants, "*" for pointers to the case's dtype; all
    pointers, and the integers in `divisible`, are multiples of 16."""

    kernel: Any
    name: str
    types: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[str, ...]
    warps: int


def cases() -> Iterator[Case]:
    """Everything that a training step of GPT-2 or LLaMA-3 launches, and the options beside it."""
    yield from _cross_entropy_cases()


def _cross_entropy_cases() -> Iterator[Case]:
    for columns in (257, 50257, 128256):
        lanes, warps = lanes_and_warps(columns)
        for dtype in DTYPES:
            for smoothing, gradient in ((False, True), (False, False), (True, True)):
                types = {
                    "logits_ptr": f"*{dtype}", "targets_ptr": "*i64", "divisor_ptr": "*fp32", "losses_ptr": "*fp32", "stride_row": "i32",
                    "classes": "i32", "columns": "i32", "ignored": "i32", "smoothing": "fp32", "z_loss": "fp32",
                }  # fmt: skip
                constants = {"LANES": lanes, "HAS_SMOOTHING": smoothing, "MAKE_GRADIENT": gradient}
                name = f"{columns} {dtype}{' smoothing' * smoothing}{' gradient' * gradient}"
                yield Case(cross_entropy_kernel, name, types, constants, ("stride_row", "columns"), warps)
    types = {"values_ptr": "*fp32", "factor_ptr": "*fp32", "number": "i32", "programs": "i32"}
    yield Case(scale_kernel, "fp32", types, {"BLOCK": 4096}, ("number", "programs"), 8)


def compile_case(case: Case, target: str) -> OperatorReport:
    """Compile one case for one of `offline.TARGETS`. Works without a GPU; takes a second or less."""
    names = case.kernel.arg_names
    signature = {name: "constexpr" if name in case.constants else case.types[name] for name in names}
    aligned = [i for i, name in enumerate(names) if signature[name].startswith("*") or name in case.divisible]
    attributes: dict[Any, Any] = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(case.kernel, signature, case.constants, attributes)
    compiled = triton.compile(source, target=TARGETS[target], options={"num_warps": case.warps})
    read = _read_amd if TARGETS[target].backend == "hip" else _read_nvidia
    registers, spill_bytes, _, _ = read(compiled, target)
    return OperatorReport(target, case.kernel.__name__, case.name, registers, spill_bytes, compiled.metadata.shared)


def main(targets: list[str]) -> None:
    """Print a JSON line for each case and target."""
    for target in targets:
        for case in cases():
            print(json.dumps(asdict(compile_case(case, target))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["sm_90"])
