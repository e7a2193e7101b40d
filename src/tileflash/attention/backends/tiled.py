"""Plain PyTorch with O(S) memory: what serves when no fused kernel can."""

from torch import Tensor

from tileflash.attention.backends.base import Backend
from tileflash.attention.ops import Kernels, attend_with_kernels, register_kernels
from tileflash.attention.problem import FLOATS
from tileflash.attention.tiled import tiled_backward, tiled_forward


class TiledBackend(Backend):
    name = "tiled"
    summary = "plain PyTorch, a strip of queries at a time"
    devices = frozenset({"cpu", "cuda", "mps", "xpu"})
    dtypes = frozenset(FLOATS)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, low: int | None, high: int | None, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        return attend_with_kernels(self.name, q, k, v, scale, low, high)


register_kernels(TiledBackend.name, lambda: Kernels(tiled_forward, tiled_backward))
