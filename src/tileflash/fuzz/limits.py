"""What all backends of a run serve, by their declared facts: problems are bent to it when they are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tileflash.attention.dispatch import BACKENDS
from tileflash.fuzz.problems import DTYPES, OPTIONS, Problem

# What `tileflash.attention.problem.FEATURES` calls the options; a negative scale is none of the features.
_FEATURES = {
    **dict.fromkeys(("bias", "bias_heads", "bias_keys", "bias_queries", "bias_one", "bias_hiding"), "bias"),
    **dict.fromkeys(("mask", "mask_keys"), "mask"),
    **dict.fromkeys(("alibi", "alibi_batch"), "ALiBi"),
    "softcap": "soft cap", "documents": "document ids", "prefix": "prefix lengths", "sinks": "sinks", "dropout": "dropout",
}  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """`dtypes` and `options` by their names in `problems`; head dimensions are at most `most` and multiples of `multiple`."""

    dtypes: tuple[str, ...] = tuple(DTYPES)
    options: frozenset[str] = frozenset(OPTIONS)
    packed: bool = True
    most: int = 512
    multiple: int = 1

    @staticmethod
    def of(backends: Sequence[str]) -> Limits:
        """The common part of what the backends declare. ValueError where they have no dtype in common, or one serves too little."""
        facts = [BACKENDS[name] for name in backends]
        for fact in facts:
            if fact.bands != "any" or fact.lse != "differentiable":
                raise ValueError(
                    f"--backend {fact.name}: fuzz draws windows, other lengths of queries than of keys, and gradients of the log-sum-exp, "
                    f"which {fact.name} does not have"
                )
        served = {name for name, feature in _FEATURES.items() if all(feature in fact.features for fact in facts)}
        if not any(fact.positive_scale for fact in facts):
            served.add("negative_scale")
        dtypes = tuple(name for name, dtype in DTYPES.items() if all(dtype in fact.dtypes for fact in facts))
        if not dtypes:
            raise ValueError(f"backends {', '.join(backends)} have no dtype in common: fuzz them one by one")
        return Limits(
            dtypes,
            frozenset(served),
            all("packed sequences" in fact.features for fact in facts),
            min(fact.max_head_dim or 512 for fact in facts),
            max(fact.head_dim_multiple for fact in facts),
        )

    def bend(self, problem: Problem) -> Problem:
        """The problem without what is not served; itself where all of it is."""
        dtype = problem.dtype
        if dtype not in {DTYPES[name] for name in self.dtypes}:
            dtype = DTYPES[self.dtypes[0]]
        bias_layout = problem.bias_layout
        options = tuple(name for name in problem.options if name in self.options)
        if options != problem.options and not any("bias" in name or "mask" in name for name in options):
            bias_layout = "contiguous"
        return replace(
            problem,
            dtype=dtype,
            options=options,
            lengths=problem.lengths if self.packed else None,
            slack=problem.slack if self.packed else 0,
            d=self._head_dim(problem.d),
            dv=self._head_dim(problem.dv),
            bias_layout=bias_layout,
        )

    def _head_dim(self, d: int) -> int:
        return min(self.most, -(-d // self.multiple) * self.multiple)


ANYTHING = Limits()
