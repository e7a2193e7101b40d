"""What `bench parallel` runs: layouts of several ranks, each beside one rank that does the same work or its share of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

WEAK, STRONG = "weak", "strong"


@dataclass(frozen=True)
class Work:
    """A model and a step of it. `samples`: of one forward pass of a rank; `micro_batches`: passes of one rank's step.

    `reason`: why the model is not the preset itself, None where it is.
    """

    model: str
    samples: int
    sequence_length: int
    micro_batches: int = 1
    overrides: Mapping[str, Any] = field(default_factory=dict)
    reason: str | None = None


@dataclass(frozen=True)
class ParallelCase:
    """A layout and its work.

    `scaling`: "weak", N ranks have N times the work of one; "strong", the same work. `wanted`: the efficiency that two H200 are to
    reach.
    """

    name: str
    work: Work
    settings: Mapping[str, Any]  # of TrainConfig, for the number of ranks
    scaling: str
    wanted: float | None = None


# layout -> (kind of work, the setting that is the number of ranks, further settings, scaling, efficiency wanted of two H200)
_LAYOUTS: Mapping[str, tuple[str, str, dict[str, Any], str, float | None]] = MappingProxyType(
    {
        "dp": ("data", "data_parallel", {}, WEAK, 0.96),
        "zero1": ("data", "data_parallel", {"zero_stage": 1}, WEAK, 0.94),
        "zero2": ("data", "data_parallel", {"zero_stage": 2}, WEAK, None),
        "zero3": ("data", "data_parallel", {"zero_stage": 3}, WEAK, 0.90),
        "tp": ("layers", "tensor_parallel", {}, STRONG, 0.80),
        "tp-sp": ("layers", "tensor_parallel", {"sequence_parallel": True}, STRONG, None),
        "pp": ("layers", "pipeline_parallel", {}, STRONG, 0.85),
        "pp-zb": ("layers", "pipeline_parallel", {"pipeline_schedule": "zb"}, STRONG, None),
        "cp-ring": ("context", "context_parallel", {}, STRONG, 0.90),
        "cp-ulysses": ("context", "context_parallel", {"context_parallel_kind": "ulysses"}, STRONG, None),
    }
)
LAYOUTS = tuple(_LAYOUTS)
DEFAULT_LAYOUTS = ("dp", "zero1", "zero3", "tp", "pp", "cp-ring")

# size -> kind -> work
_WORK: Mapping[str, Mapping[str, Work]] = MappingProxyType(
    {
        "full": {
            "data": Work("llama3-1b", samples=4, sequence_length=4096),
            # 16 micro-batches: 1F1B on two ranks leaves 1 / 17 of the time idle, with 4 of them it would be a fifth.
            "layers": Work(
                "llama3-8b", 1, 4096, 16, {"n_layer": 16},
                "all 32 layers take 128 GB for weights, gradients and moments in fp32 alone, and 177 GB in all (`tileflash plan`): "
                "more than a GPU of 141 GB has",
            ),
            "context": Work(
                "llama3-1b", 1, 131072, 1, {"n_layer": 4, "vocab_size": 16384},
                "the whole model keeps 230 GB of activations and 200 GB of logits at 128k tokens (`tileflash plan`), "
                "for nothing is computed again",
            ),
        },
        "tiny": {
            "data": Work("llama3-tiny", 2, 32),
            "layers": Work("llama3-tiny", 1, 32, 4),
            "context": Work("llama3-tiny", 1, 64),
        },
    }
)  # fmt: skip
SIZES = tuple(_WORK)


def parallel_case(name: str, size: str, ranks: int) -> ParallelCase:
    """The case `name` of LAYOUTS at a size of SIZES; ValueError for another name or size."""
    if name not in _LAYOUTS:
        raise ValueError(f"`cases` held {name!r}; it must be some of {', '.join(LAYOUTS)}")
    if size not in _WORK:
        raise ValueError(f"`size` was {size!r}; it must be {' or '.join(SIZES)}")
    kind, setting, further, scaling, wanted = _LAYOUTS[name]
    return ParallelCase(name, _WORK[size][kind], {setting: ranks, **further}, scaling, wanted)
