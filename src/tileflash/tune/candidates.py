"""Which configurations of a kernel are tried: the shipped one first, then what differs from it in one or two choices and fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from tileflash.kernels.triton.configurations import HOPPER, HOPPER_WITH_OPTIONS, Tile

# What a problem has besides q, k and v; "" is nothing.
OPTION_SETS = ("", "softcap", "alibi", "bias", "dropout", "mask")
KERNELS = {"hopper": ("forward", "backward"), "triton": ("forward", "dkdv", "dk", "dv", "dq")}


@dataclass(frozen=True)
class Target:
    """One row of a table of configurations. `head_dim` is padded (64, 128 or 256); `banded` says that a mask cuts tiles; `options` is
    one of OPTION_SETS. ValueError names what is no row."""

    backend: str
    kernel: str
    head_dim: int
    banded: bool
    options: str = ""

    def __post_init__(self) -> None:
        if self.backend not in KERNELS or self.kernel not in KERNELS[self.backend]:
            known = "; ".join(f"{name}: {', '.join(kernels)}" for name, kernels in KERNELS.items())
            raise ValueError(f"no kernel {self.kernel!r} of backend {self.backend!r}; there are {known}")
        if self.options not in OPTION_SETS or (self.options and self.backend == "hopper"):
            raise ValueError(
                f"no options {self.options!r} with {self.backend}; triton has {', '.join(OPTION_SETS[1:])}"
            )
        if self.backend == "triton" and (self.kernel, self.head_dim) not in HOPPER:
            raise ValueError(f"triton's {self.kernel} has no row for head dimension {self.head_dim}")
        if self.head_dim not in (64, 128, 256):
            raise ValueError(f"no row for head dimension {self.head_dim}: they are padded to 64, 128 or 256")

    @property
    def is_forward(self) -> bool:
        return self.kernel == "forward"

    def __str__(self) -> str:
        mask = "causal" if self.banded else "full"
        return f"{self.backend} {self.kernel}, head dimension {self.head_dim}, {mask}" + (
            f", {self.options}" if self.options else ""
        )


def targets_of(backend: str, kernels: list[str], head_dims: list[int], masks: list[str], options: str) -> list[Target]:
    """All rows asked for; triton's d_k and d_v are one kernel up to 128 and two above. ValueError if there is none."""
    if unknown := set(masks) - {"full", "causal"}:
        raise ValueError(f"no mask {', '.join(sorted(unknown))}; there are full, causal")
    found = []
    for kernel, head_dim, mask in product(kernels, head_dims, masks):
        if backend == "triton" and kernel in ("dk", "dv", "dkdv") and (kernel, head_dim) not in HOPPER:
            continue
        found.append(Target(backend, kernel, head_dim, mask == "causal", options))
    if not found:
        raise ValueError(f"{backend} has no kernel {', '.join(kernels)} for head dimensions {head_dims}")
    return found


def shipped(target: Target) -> Any:
    """What `tileflash.attention` launches today."""
    if target.backend == "triton":
        if target.options:
            return HOPPER_WITH_OPTIONS[target.kernel, target.head_dim]  # type: ignore[index]
        return HOPPER[target.kernel, target.head_dim][target.banded]  # type: ignore[index]
    from tileflash.kernels.hopper.configurations import BACKWARD, FORWARD

    table: dict[Any, Any] = FORWARD if target.is_forward else BACKWARD
    return table[target.head_dim, target.banded]


def candidates(target: Target) -> list[Any]:
    """Configurations to try, the shipped one first; none of them asks for more shared memory than there is."""
    first = shipped(target)
    neighbours = _tiles(target, first) if target.backend == "triton" else _hopper(target, first)
    return list(dict.fromkeys([first, *neighbours]))


def words(configuration: Any) -> str:
    """A configuration on one line: the ledger's name of it."""
    values = configuration._asdict() if isinstance(configuration, Tile) else asdict(configuration)
    return " ".join(f"{name}={value}" for name, value in values.items())


def _tiles(target: Target, first: Tile) -> Iterator[Tile]:
    """One or two choices changed. Queries are what d_k and d_v sum over, keys what the others do: with options 32 or more."""
    rows = {size for size in (first.block_m // 2, first.block_m, first.block_m * 2) if 16 <= size <= 256}
    keys = {size for size in (first.block_n // 2, first.block_n, first.block_n * 2) if 16 <= size <= 256}
    for block_m, block_n, warps, stages in product(sorted(rows), sorted(keys), (4, 8), (1, 2, 3, 4)):
        tile = Tile(block_m, block_n, warps, stages)
        summed = block_m if target.kernel in ("dk", "dv", "dkdv") else block_n
        changed = sum(a != b for a, b in zip(tile[:4], first[:4], strict=True))
        # K and V, or Q and dO, of each stage, and once more for what stays; 2 bytes an element
        bytes_at_least = (block_m + 2 * block_n * stages) * target.head_dim * 2
        if changed <= 2 and bytes_at_least <= 227 * 1024 and not (target.options and summed < 32):
            yield tile
    for registers in (0, 96, 128, 168):
        yield first._replace(max_registers=registers)


def _hopper(target: Target, first: Any) -> Iterator[Any]:
    from tileflash.kernels.hopper.configurations import check_configuration

    def fits(configuration: Any) -> bool:
        try:
            check_configuration(configuration, target.head_dim)
        except ValueError:
            return False
        return True

    if target.is_forward:
        for warpgroups, block_n, stages, out_in_q in product((2, 3), (64, 128), (2, 3, 4), (False, True)):
            registers = {2: (240, 24), 3: (160, 32)}[warpgroups]
            one = replace(
                first, warpgroups=warpgroups, block_n=block_n, stages=stages, out_in_q=out_in_q,
                consumer_registers=registers[0], producer_registers=registers[1],
            )  # fmt: skip
            if fits(one):
                yield one
    elif first.keys == 64:  # the wide kernel knows two choices
        for stages, persistent in product((1, 2, 3), (False, True)):
            if fits(one := replace(first, stages=stages, persistent=persistent)):
                yield one
    else:
        for block_m, stages, prefetch, by_tma, persistent in product(
            (64, 128), (2, 3), (0, 1, 2), (False, True), (False, True)
        ):
            one = replace(
                first, block_m=block_m, stages=stages, prefetch=prefetch, dq_by_tma=by_tma, persistent=persistent
            )
            changed = sum(getattr(one, name) != getattr(first, name) for name in asdict(one))
            if changed <= 2 and fits(one):
                yield one
