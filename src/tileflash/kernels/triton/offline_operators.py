"""Compile the operators' kernels for a GPU that is not there, and read what came out, as `offline` does for attention.

`python -m tileflash.kernels.triton.offline_operators sm_90` prints a JSON line for every kernel, dtype and size below.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.compiler import ASTSource

from tileflash.kernels.triton import adamw, embedding
from tileflash.kernels.triton.cross_entropy import cross_entropy_kernel, lanes_and_warps, scale_kernel
from tileflash.kernels.triton.gated import ACTIVATIONS, gated_backward_kernel, gated_forward_kernel
from tileflash.kernels.triton.gated import block_and_warps as gated_tile
from tileflash.kernels.triton.norm import (
    PARTS_COLUMNS,
    PARTS_ROWS,
    PARTS_WARPS,
    add_parts_kernel,
    norm_backward_kernel,
    norm_forward_kernel,
)
from tileflash.kernels.triton.norm import block_and_warps as norm_tile
from tileflash.kernels.triton.offline import TARGETS, read_compiled
from tileflash.kernels.triton.rotary import rotary_kernel, tile_and_warps

DTYPES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class OperatorReport:
    """What one kernel compiled to; `case` says for what. `spill_bytes` counts stores and loads.

    `widest_bytes` is the most that one thread loads at a time, 16 at best; 0 where the target's code does not tell.
    """

    target: str
    kernel: str
    case: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    widest_bytes: int


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
    yield from _norm_cases()
    yield from _gated_cases()
    yield from _rotary_cases()
    yield from _adamw_cases()
    yield from _embedding_cases()


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


def _norm_cases() -> Iterator[Case]:
    for width in (768, 1600, 2048, 4096):
        block, warps = norm_tile(width)
        for centered in (True, False):
            # As training has it: an fp32 stream, updates and norms in bf16.
            types = {
                "x_ptr": "*fp32", "update_ptr": "*bf16", "weight_ptr": "*fp32", "bias_ptr": "*fp32", "update_bias_ptr": "*bf16",
                "stream_ptr": "*fp32",
                "out_ptr": "*bf16", "mean_ptr": "*fp32", "rstd_ptr": "*fp32", "stride_x": "i32", "stride_update": "i32", "C": "i32",
                "epsilon": "fp32",
            }  # fmt: skip
            constants = {
                "BLOCK": block,
                "CENTERED": centered,
                "HAS_BIAS": centered,
                "HAS_UPDATE": True,
                "HAS_UPDATE_BIAS": centered,
            }
            name = f"{width} {'layer_norm' if centered else 'rms_norm'}"
            yield Case(norm_forward_kernel, name, types, constants, ("stride_x", "stride_update", "C"), warps)
            types = {
                "d_out_ptr": "*bf16", "d_stream_ptr": "*fp32", "stream_ptr": "*fp32", "weight_ptr": "*fp32", "mean_ptr": "*fp32",
                "rstd_ptr": "*fp32", "d_x_ptr": "*fp32", "d_update_ptr": "*bf16", "d_weight_ptr": "*fp32", "d_bias_ptr": "*fp32",
                "d_update_bias_ptr": "*fp32",
                **dict.fromkeys(("stride_d_out", "stride_d_stream", "stride_stream", "rows", "programs", "C"), "i32"),
            }  # fmt: skip
            constants = {
                "BLOCK": block, "CENTERED": centered, "HAS_BIAS": centered, "HAS_D_STREAM": True, "HAS_D_UPDATE": True,
                "HAS_UPDATE_BIAS": centered,
            }  # fmt: skip
            divisible = ("stride_d_out", "stride_d_stream", "stride_stream", "C")
            yield Case(norm_backward_kernel, name, types, constants, divisible, warps)

    for dtype in ("bf16", "fp32"):
        types = {"parts_ptr": "*fp32", "sums_ptr": f"*{dtype}", "programs": "i32", "C": "i32"}
        constants = {"ROWS": PARTS_ROWS, "COLUMNS": PARTS_COLUMNS}
        yield Case(add_parts_kernel, dtype, types, constants, ("C",), PARTS_WARPS)


def _gated_cases() -> Iterator[Case]:
    for columns in (3072, 14336):
        block, warps = gated_tile(columns)
        for activation in ACTIVATIONS:
            constants = {"BLOCK": block, "ACTIVATION": ACTIVATIONS.index(activation)}
            types = dict.fromkeys(("stride_d_out", "stride_gate", "stride_up", "columns", "blocks"), "i32")
            types |= dict.fromkeys(("d_out_ptr", "gate_ptr", "up_ptr", "out_ptr", "d_gate_ptr", "d_up_ptr"), "*bf16")
            divisible = ("stride_d_out", "stride_gate", "stride_up", "columns")
            for kernel in (gated_forward_kernel, gated_backward_kernel):
                yield Case(kernel, f"{columns} {activation}", types, constants, divisible, warps)


def _rotary_cases() -> Iterator[Case]:
    for q_heads, k_heads, head_dim in ((32, 8, 64), (24, 8, 128), (32, 8, 128)):
        q_tile, k_tile, half, warps = tile_and_warps(q_heads, k_heads, head_dim)
        for backward in (False, True):
            constants = {"Q_HEADS": q_tile, "K_HEADS": k_tile, "HALF": half, "BACKWARD": backward}
            strides = tuple(f"stride_{name}" for name in ("qb", "qs", "qh", "kb", "ks", "kh", "cos", "sin"))
            types = dict.fromkeys((*strides, "S", "q_heads", "k_heads", "half"), "i32")
            types |= dict.fromkeys(("q_ptr", "k_ptr", "q_out_ptr", "k_out_ptr"), "*bf16")
            types |= {"cos_ptr": "*fp32", "sin_ptr": "*fp32"}
            yield Case(rotary_kernel, f"{q_heads}/{k_heads} {head_dim}", types, constants, (*strides, "half"), warps)


def _adamw_cases() -> Iterator[Case]:
    walk = {"chunks_ptr": "*i32", "table_ptr": "*i64", "gradients_ptr": "*i64"}
    sizes = {"COLUMNS": adamw.COLUMNS, "CHUNK": adamw.CHUNK, "BLOCK": adamw.BLOCK}
    read = sizes | {"BLOCK": adamw.READ_BLOCK}
    for dtype, element in (("bf16", tl.bfloat16), ("fp32", tl.float32)):
        for kernel in (adamw.square_sum_kernel, adamw.add_kernel):
            sums = "*i64" if kernel is adamw.add_kernel else "*fp32"
            yield Case(kernel, dtype, walk | {"sums_ptr": sums}, {"GRADIENT": element} | read, (), adamw.WARPS)
        for split, clear in ((True, False), (True, True), (False, False)):
            types = walk | dict.fromkeys(("decays_ptr", "scalars_ptr", "result_ptr"), "*fp32")
            types |= dict.fromkeys(("beta1", "rest1", "beta2", "rest2", "epsilon"), "fp32")
            constants = {"SPLIT": split, "GRADIENT": element, "CLEAR": clear} | sizes
            name = f"{dtype}{' split' * split}{' clear' * clear}"
            yield Case(adamw.adamw_kernel, name, types, constants, (), adamw.WARPS)
    pointers = ("sums", "loss", "loss_limit", "gradient_limit", "rate", "step", "result", "scalars")
    types = {f"{name}_ptr": "*fp32" for name in pointers} | {"betas_ptr": "*fp64", "chunks": "i32", "clip": "fp32"}
    yield Case(adamw.finish_kernel, "", types, {"BLOCK": adamw.SUM_BLOCK}, (), adamw.FINISH_WARPS)


def _embedding_cases() -> Iterator[Case]:
    for dtype in ("bf16", "fp32"):
        types = {
            "sums_ptr": f"*{dtype}",
            "sorted_ptr": "*i64",
            "order_ptr": "*i64",
            "rows_ptr": "*fp32",
            "number": "i32",
            "C": "i32",
        }
        constants = {"ROWS": embedding.ROWS, "COLUMNS": embedding.COLUMNS}
        yield Case(embedding.add_rows_kernel, dtype, types, constants, ("C",), embedding.WARPS)


def compile_case(case: Case, target: str) -> OperatorReport:
    """Compile one case for one of `offline.TARGETS`. Works without a GPU; takes a second or less."""
    names = case.kernel.arg_names
    signature = {name: "constexpr" if name in case.constants else case.types[name] for name in names}
    aligned = [i for i, name in enumerate(names) if signature[name].startswith("*") or name in case.divisible]
    attributes: dict[Any, Any] = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(case.kernel, signature, case.constants, attributes)
    compiled = triton.compile(source, target=TARGETS[target], options={"num_warps": case.warps})
    registers, spill_bytes, _, _ = read_compiled(compiled, target)
    return OperatorReport(
        target,
        case.kernel.__name__,
        case.name,
        registers,
        spill_bytes,
        compiled.metadata.shared,
        _widest_load(compiled.asm.get("ptx", "")),
    )


def _widest_load(ptx: str) -> int:
    loads = re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)", ptx)
    return max((int(number or 1) * int(bits) // 8 for number, bits in loads), default=0)


def main(targets: list[str]) -> None:
    """Print a JSON line for each case and target."""
    for target in targets:
        for case in cases():
            print(json.dumps(asdict(compile_case(case, target))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["sm_90"])
