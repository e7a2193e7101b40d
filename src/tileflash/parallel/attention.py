"""The attention that a model gets from outside: of a sequence cut among context ranks, of documents that do not see each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tileflash.models import AttentionFunction

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ContextAttention:
    """An AttentionFunction of parts of sequences, those that belong on this rank of `mesh`; `kind` is "ring" or "ulysses".

    `attention` computes whole sequences for Ulysses, `backend` is whose kernels the ring uses.
    """

    def __init__(self, mesh: DeviceMesh, kind: str, attention: AttentionFunction, backend: str) -> None:
        self._mesh, self._kind, self._attention, self._backend = mesh, kind, attention, backend

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        from tileflash.parallel.context import ring_attention, ulysses_attention

        if self._kind == "ring":
            out = ring_attention(q, k, v, self._mesh, backend=self._backend, **options)
        else:
            out = ulysses_attention(q, k, v, self._mesh, attention=self._attention, **options)
        assert isinstance(out, torch.Tensor)
        return out


class DocumentAttention:
    """An AttentionFunction in which a query sees keys of its own document only; documents begin at the token `first_token`.

    Which they are it must be told before each forward pass: models know nothing of documents.
    """

    def __init__(self, attention: Any, first_token: int) -> None:
        self._attention, self._first_token = attention, first_token
        self.ids: torch.Tensor | None = None  # int32 [B, S], of the tokens that this rank has

    def ids_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """int32 [B, S]: the number of each token's document, of whole samples int64 [B, S]. What comes before the first one's
        beginning is the rest of a document, too."""
        return (tokens == self._first_token).cumsum(1, dtype=torch.int32)

    def look_at(self, module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        """Take the documents from the tokens of a forward pass, as a hook before the embedding."""
        self.ids = self.ids_of(arguments[0])

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float | None
    ) -> torch.Tensor:
        out: torch.Tensor = self._attention(q, k, v, causal=causal, scale=scale, document_ids=self.ids)
        return out
