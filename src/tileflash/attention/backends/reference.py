"""The textbook formula as a backend: everything is supported, nothing is fast, memory grows with Sq * Sk."""

from torch import Tensor

from tileflash.attention.backends.base import Backend, logits_line
from tileflash.attention.band import Band
from tileflash.attention.packed import packed_forward
from tileflash.attention.problem import FEATURES, FLOATS, AttentionProblem, compute_dtype
from tileflash.attention.reference import reference_attention
from tileflash.kernels.options import PLAIN, Options


class ReferenceBackend(Backend):
    name = "reference"
    summary = "the textbook formula in fp32 (fp64 for fp64), whole matrices"
    devices = frozenset({"cpu", "cuda", "meta", "mps", "xpu"})
    dtypes = frozenset(FLOATS)
    linear_memory = False
    second_derivative = True
    features = frozenset(FEATURES)

    def plan(self, problem: AttentionProblem) -> list[str]:
        return [logits_line(problem, compute_dtype(problem.dtype))]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        low: int | None,
        high: int | None,
        return_lse: bool,
        options: Options = PLAIN,
    ) -> tuple[Tensor, Tensor | None]:
        if options.packed:
            return packed_forward(_forward, q, k, v, scale, low, high, options)
        return reference_attention(q, k, v, Band(low, high), scale, options)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    low: int | None,
    high: int | None,
    options: Options,
    first_sequence: int,
) -> tuple[Tensor, Tensor]:
    return reference_attention(q, k, v, Band(low, high), scale, options, first_sequence)
