"""How a problem's tensors lie in memory: strides and offsets as numbers, from which tensors are made and kernels' variants are told."""

from __future__ import annotations

from typing import NamedTuple

from tileflash.fuzz.problems import Problem

_ROUND = 512  # elements: each tensor begins where an allocation of its own could
_GAP = 5  # elements of NaN behind each row of a "gapped" tensor


class Place(NamedTuple):
    """A tensor as a view of one long storage, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        """The first element of the storage behind it."""
        if 0 in self.shape:
            return self.offset
        return self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)) + 1


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, as PyTorch counts them where a size is 0."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(1, size))
    return tuple(strides[: len(shape)])


def place(shape: tuple[int, int, int, int], layout: str, start: int = 0) -> Place:
    """[B, S, H, D] in one of the layouts, from element `start` of a storage on."""
    batch, length, heads, d = (max(1, size) for size in shape)
    strides = {
        "contiguous": (length * heads * d, heads * d, d, 1),
        "misaligned": (length * heads * d, heads * d, d, 1),
        "heads_first": (heads * length * d, d, length * d, 1),
        "sequence_first": (heads * d, batch * heads * d, d, 1),
        "gapped": (length * heads * (d + _GAP), heads * (d + _GAP), d + _GAP, 1),
        "last": (length * heads * d, heads * d, 1, heads),
        "expanded": (length * d, d, 0, 1),
        "constant": (0, 0, 0, 0),
    }[layout]
    return Place(shape, strides, start + (layout == "misaligned"))


def places(problem: Problem) -> dict[str, Place]:
    """q, k, v and d_out in one storage. What a layout cannot do for a tensor is contiguous."""
    shapes = {"q": problem.query_shape, "k": problem.key_shape, "v": problem.value_shape, "d_out": problem.out_shape}
    found: dict[str, Place] = {}
    start = 0
    if _can_be_packed(problem):
        batch, length, heads, d = problem.query_shape
        row = (heads + 2 * problem.kv_heads) * d
        strides = (max(1, length) * row, row, d, 1)
        for name, first in (("q", 0), ("k", heads), ("v", heads + problem.kv_heads)):
            found[name] = Place(shapes[name], strides, first * d)
        start = _rounded(max(1, batch) * max(1, length) * row)
    for name, shape in shapes.items():
        if name in found:
            continue
        layout = problem.gradient_layout if name == "d_out" else problem.layout
        if layout == "packed" or (layout == "expanded" and name == "q"):
            layout = "contiguous"
        found[name] = place(shape, layout, start)
        start = _rounded(found[name].end + _GAP)
    return found


def bias_place(problem: Problem) -> Place:
    """The bias in a storage of its own."""
    shape = problem.bias_shape
    strides = list(row_major(shape))
    if problem.bias_layout == "gapped" and len(shape) > 1:
        strides = [stride * 2 for stride in strides]
    elif problem.bias_layout == "transposed" and len(shape) > 1:
        strides[-2:] = 1, max(1, shape[-2])
    elif problem.bias_layout == "expanded" and len(shape) >= 3:
        # one matrix for all heads (and batch entries), expanded
        strides[:-2] = [0] * (len(shape) - 2)
    return Place(shape, tuple(strides), 0)


def signature(problem: Problem) -> tuple[object, ...]:
    """What Triton compiles a kernel anew for: constants, which integers are 1 or multiples of 16, which addresses of 16 bytes.

    It may tell apart more than is compiled, and costs time, not truth, where it tells less.
    """
    from tileflash.attention.band import Band

    if problem.lengths is None:
        band = Band.of(problem.causal, problem.window, problem.sq, problem.sk)
    else:
        band = Band.packed(problem.causal, problem.window)
    itemsize = problem.dtype.itemsize
    found = places(problem)
    facts: list[object] = []
    for name, shape in (
        ("q", None), ("k", None), ("v", None), ("d_out", None),
        ("out", problem.out_shape), ("d_q", problem.query_shape), ("d_k", problem.key_shape), ("d_v", problem.value_shape),
    ):  # fmt: skip
        here = found[name] if shape is None else place(shape, "contiguous")
        if here.strides[3] != 1:  # copied
            here = place(here.shape, "contiguous")  # type: ignore[arg-type]
        strides = here.strides[:3] if problem.lengths is None else (0, *here.strides[1:3])
        facts.append((tuple(map(_kind, strides)), here.offset * itemsize % 16 == 0))
    if problem.bias:
        here = bias_place(problem)
        strides = tuple(0 if size == 1 else stride for size, stride in zip(here.shape, here.strides, strict=True))
        whole = (problem.sequences, problem.heads, problem.query_length, problem.key_length)
        full = (1,) * (4 - len(here.shape)) + here.shape
        facts.append((tuple(map(_kind, strides)), tuple(a == b for a, b in zip(full, whole, strict=True))))
    padded = tuple(max(16, 1 << (d - 1).bit_length()) for d in (problem.d, problem.dv))
    return (
        *facts, padded, padded[0] == problem.d, padded[1] == problem.dv, _kind(problem.d), _kind(problem.dv), problem.dtype,
        problem.dtype_of_options, band.low is not None, band.high is not None, problem.heads // problem.kv_heads,
        problem.with_lse and problem.loss != "out", tuple(sorted(_feature(name) for name in problem.options)),
        problem.lengths is not None,
    )  # fmt: skip


def _feature(name: str) -> str:
    return {"alibi_batch": "alibi", "mask_keys": "mask"}.get(name, "bias" if name.startswith("bias") else name)


def _kind(value: int) -> str:
    return "one" if value == 1 else "sixteens" if value % 16 == 0 else "other"


def _rounded(elements: int) -> int:
    return -(-elements // _ROUND) * _ROUND


def _can_be_packed(problem: Problem) -> bool:
    return problem.layout == "packed" and problem.query_shape[:2] == problem.key_shape[:2] and problem.d == problem.dv
