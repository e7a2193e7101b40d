"""Plain PyTorch with O(S) memory: what serves when no fused kernel can."""

from torch import Tensor

from tileflash.attention.backends.base import KernelBackend
from tileflash.attention.ops import Kernels, register_kernels
from tileflash.attention.packed import packed_backward, packed_forward
from tileflash.attention.problem import FEATURES, FLOATS, AttentionProblem, compute_dtype
from tileflash.attention.tiled import strip_rows, tiled_backward, tiled_forward
from tileflash.kernels.options import PLAIN, OptionGradients, Options


class TiledBackend(KernelBackend):
    name = "tiled"
    summary = "plain PyTorch, a strip of queries at a time"
    devices = frozenset({"cpu", "cuda", "mps", "xpu"})
    dtypes = frozenset(FLOATS)
    features = frozenset(FEATURES)

    def plan(self, problem: AttentionProblem) -> list[str]:
        rows = min(strip_rows(problem.batch, problem.heads, problem.key_length), max(1, problem.query_length))
        logits = problem.batch * problem.heads * rows * problem.key_length * compute_dtype(problem.dtype).itemsize
        if "packed sequences" in problem.features:
            return ["strips of queries x all keys, a sequence at a time"]
        strips = -(-problem.query_length // rows)
        passes = "forward, and as many again backward" if problem.needs_grad else "forward"
        return [
            f"{passes}: {strips:,} strips of {rows:,} queries x all keys, logits of {logits / 2**20:,.1f} MiB a strip"
        ]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, low: int | None, high: int | None, options: Options = PLAIN
) -> tuple[Tensor, Tensor]:
    if options.packed:
        return packed_forward(tiled_forward, q, k, v, scale, low, high, options)
    return tiled_forward(q, k, v, scale, low, high, options)


def _backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float, low: int | None, high: int | None, options: Options = PLAIN,
) -> tuple[Tensor, Tensor, Tensor, OptionGradients]:  # fmt: skip
    if options.packed:
        return packed_backward(tiled_backward, d_out, d_lse, q, k, v, out, lse, scale, low, high, options)
    return tiled_backward(d_out, d_lse, q, k, v, out, lse, scale, low, high, options)


register_kernels(TiledBackend.name, lambda: Kernels(_forward, _backward))
