"""One kernel with everything fixed that does not depend on the tensors: what the launcher starts and what is compiled offline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from tileflash.kernels.compat_gluon import gl
from tileflash.kernels.hopper.attention_backward import attention_backward_kernel
from tileflash.kernels.hopper.attention_backward_queries import attention_backward_queries_kernel
from tileflash.kernels.hopper.attention_backward_wide import attention_backward_wide_kernel
from tileflash.kernels.hopper.attention_forward import attention_forward_kernel
from tileflash.kernels.hopper.configurations import (
    BACKWARD,
    FORWARD,
    QUERIES,
    TYPE_NAMES,
    backward_configuration,
    check_configuration,
)

# Which edges of the band a kernel knows. "full" has no mask at all and needs whole tiles of keys; "high" masks beyond the upper edge and
# beyond the last key; "window" masks both edges.
Band = Literal["full", "high", "window"]
BANDS: tuple[Band, ...] = ("full", "high", "window")

_GLUON_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@dataclass(frozen=True)
class Box:
    """What one TMA descriptor moves at a time, and how it lies in shared memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Any

    @staticmethod
    def of_rows(rows: int, head_dim: int, dtype: torch.dtype, packed: bool = False) -> Box:
        """Rows of one head of a [B, H, S, D] tensor, swizzled as wgmma reads them. Packed rows have a dimension more."""
        shape = (1, 1, 1, rows, head_dim) if packed else (1, 1, rows, head_dim)
        return Box(shape, dtype, gl.NVMMASharedLayout.get_default_for(list(shape), _GLUON_TYPES[dtype]))

    @staticmethod
    def flat(rows: int, columns: int) -> Box:
        """fp32 as it lies in memory."""
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
        return Box((rows, columns), torch.float32, layout)

    def signature(self) -> str:
        """The type of such a descriptor in Triton's words."""
        name = TYPE_NAMES.get(self.dtype, "fp32")
        return f"tensordesc<{name}{list(self.shape)},{self.layout!r}>"


@dataclass(frozen=True)
class KernelOptions:
    """Which options a kernel is compiled with."""

    soft_cap: bool = False
    sinks: bool = False
    packed: bool = False

    def absent(self, *parameters: str) -> tuple[str, ...]:
        """Those of the parameters that belong to an option that is off: they are None, and the kernel is what it is without them."""
        there = {"cap_scale": self.soft_cap, "sinks_ptr": self.sinks}
        return tuple(name for name in parameters if not there[name])


NONE = KernelOptions()


@dataclass(frozen=True)
class KernelCall:
    """A kernel, its descriptors' boxes and its constants by parameter name."""

    kernel: Any
    boxes: dict[str, Box]
    constants: dict[str, Any]
    absent: tuple[str, ...] = ()  # parameters that are None: options that are off

    def type_of(self, parameter: str) -> str:
        """The type of a parameter in Triton's words."""
        if parameter in self.boxes:
            return self.boxes[parameter].signature()
        if parameter in self.constants or parameter in self.absent:
            return "constexpr"
        if parameter in ("q_ptr", "k_ptr", "v_ptr"):
            return f"*{TYPE_NAMES[self.boxes['q_desc'].dtype]}"
        if parameter.endswith("_ptr"):
            return "*i32" if parameter == "table_ptr" else "*fp32"
        return "fp32" if parameter.startswith(("scale", "cap_scale")) else "i32"


def forward_call(head_dim: int, dtype: torch.dtype, band: Band, on: KernelOptions = NONE) -> KernelCall:
    """The forward kernel for a padded head dimension, with the options that are `on`."""
    configuration = FORWARD[head_dim, band != "full"]
    check_configuration(configuration, head_dim)
    query_box = Box.of_rows(64, head_dim, dtype, on.packed)
    key_box = Box.of_rows(configuration.block_n, head_dim, dtype, on.packed)
    return KernelCall(
        attention_forward_kernel,
        {"q_desc": query_box, "k_desc": key_box, "v_desc": key_box, "out_desc": query_box},
        {
            "BLOCK_N": configuration.block_n,
            "BLOCK_D": head_dim,
            "STAGES": configuration.stages,
            "WARPGROUPS": configuration.warpgroups,
            "HAS_LOW": band == "window",
            "HAS_HIGH": band != "full",
            "OUT_IN_Q": configuration.out_in_q,
            "CONSUMER_REGISTERS": configuration.consumer_registers,
            "PRODUCER_REGISTERS": configuration.producer_registers,
            "PACKED": on.packed,
        },
        on.absent("sinks_ptr", "cap_scale"),
    )


def backward_call(
    head_dim: int, dtype: torch.dtype, band: Band, grouped: bool, with_d_q: bool = True, on: KernelOptions = NONE
) -> KernelCall:
    """The backward kernel for a padded head dimension; `grouped`: several query heads share a K/V head. Without d_q it makes d_k and d_v
    alone."""
    configuration = backward_configuration(head_dim, band != "full", with_d_q, on.soft_cap, on.packed)
    check_configuration(configuration, head_dim)
    query_box = Box.of_rows(configuration.block_m, head_dim, dtype, on.packed)
    wide = configuration.keys == 64
    gradient_box = Box.of_rows(64, head_dim // 2 if wide else head_dim, dtype, on.packed)
    boxes = {
        "q_desc": query_box,
        "k_desc": query_box,  # keys come in tiles of the same size
        "v_desc": query_box,
        "d_out_desc": query_box,
        "stats_desc": Box.flat(1, 2 * configuration.block_m),
        "acc_desc": Box.flat(16, 256),
        "d_k_desc": gradient_box,
        "d_v_desc": gradient_box,
    }
    edges = {"HAS_LOW": band == "window", "HAS_HIGH": band != "full"}
    if wide:
        constants = {
            "BLOCK_D": head_dim,
            "STAGES": configuration.stages,
            **edges,
            "PERSISTENT": configuration.persistent,
            "HAS_DQ": with_d_q,
            "PACKED": on.packed,
        }
        return KernelCall(attention_backward_wide_kernel, boxes, constants, on.absent("cap_scale"))
    constants = {
        "BLOCK_M": configuration.block_m,
        "BLOCK_D": head_dim,
        "STAGES": configuration.stages,
        **edges,
        "GROUPED": grouped,
        "PREFETCH": configuration.prefetch,
        "DQ_BY_TMA": configuration.dq_by_tma,
        "PERSISTENT": configuration.persistent,
        "HAS_DQ": with_d_q,
        "PACKED": on.packed,
    }
    return KernelCall(attention_backward_kernel, boxes, constants, on.absent("cap_scale"))


def backward_queries_call(head_dim: int, dtype: torch.dtype, band: Band, on: KernelOptions = NONE) -> KernelCall:
    """The kernel that makes d_q alone, for a padded head dimension."""
    configuration = QUERIES[head_dim]
    check_configuration(configuration, head_dim)
    query_box = Box.of_rows(64, head_dim, dtype, on.packed)
    key_box = Box.of_rows(configuration.block_n, head_dim, dtype, on.packed)
    return KernelCall(
        attention_backward_queries_kernel,
        {"q_desc": query_box, "k_desc": key_box, "v_desc": key_box, "d_out_desc": query_box},
        {
            "BLOCK_N": configuration.block_n,
            "BLOCK_D": head_dim,
            "STATS_ROWS": BACKWARD[head_dim, band != "full"].block_m,
            "K_STAGES": configuration.k_stages,
            "V_STAGES": configuration.v_stages,
            "HAS_LOW": band == "window",
            "HAS_HIGH": band != "full",
            "PACKED": on.packed,
        },
        on.absent("cap_scale"),
    )
