"""Which problems are drawn. A variant is what kernels are compiled for; its problems differ in all else, and cost no compilation.

Variants are chosen one after the other, each as the one of some random candidates that brings the most pairs of traits that no
variant before it had: single options soon all stand, and most pairs after some dozens.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from itertools import combinations

from tileflash.fuzz.layouts import signature
from tileflash.fuzz.limits import ANYTHING, Limits
from tileflash.fuzz.problems import (
    BIAS_LAYOUTS,
    BIASES,
    DTYPES,
    GRADIENT_LAYOUTS,
    LAYOUTS,
    LOSSES,
    OTHERS,
    POISONS,
    Problem,
)

_CANDIDATES = 24
_DRAWS = 40  # of shapes, until one is compiled like its variant
_TRIALS = 15  # shapes of which a variant takes the commonest kind
_MOST_LOGITS = 6_000_000  # of a problem, padded: 48 MB for each fp64 matrix of the judge
_BANDS = (
    "full", "causal", "causal", "top-left", "window", "left", "right", "causal window", "top-left window",
)  # fmt: skip
# Padded to a power of two of at least 16; the wide ones compile for long.
_HEAD_DIMS = (1, 3, 8, 16, 16, 24, 31, 32, 33, 40, 64, 64, 65, 72, 80, 96, 100, 112, 127, 128, 128)
_WIDE_HEAD_DIMS = (129, 160, 192, 200, 255, 256, 257, 320, 384, 511, 512)


@dataclass(frozen=True)
class Variant:
    """A problem that stands for all that are compiled like it, and the kind of its band."""

    model: Problem
    band: str

    def traits(self) -> frozenset[str]:
        """What pairs are counted of."""
        p = self.model
        padded = max(16, 1 << (max(p.d, p.dv) - 1).bit_length())
        return frozenset(
            [
                *p.options, f"band {self.band}", f"dtype {p.dtype}", f"head dimension {padded}", f"layout {p.layout}",
                f"gradient {p.gradient_layout}", f"group {min(3, p.heads // p.kv_heads)}", "packed" if p.lengths else "batch",
                f"loss {p.loss}" if p.with_lse else "no lse", "dv" if p.d != p.dv else "square",
            ]
        )  # fmt: skip


def make_variants(count: int, seed: int, device: str = "cuda", limits: Limits = ANYTHING) -> list[Variant]:
    """`count` variants within `limits`; the first ones are the same whatever the count. Interpreted on a CPU, heads are narrow and
    bf16 is left out."""
    covered: set[tuple[str, ...]] = set()
    chosen: list[Variant] = []
    for number in range(count):
        random_numbers = random.Random(f"variant {seed} {number}")
        candidates = [_candidate(random_numbers, number, device, limits) for _ in range(_CANDIDATES)]
        best = max(candidates, key=lambda variant: len(_pairs(variant) - covered))
        covered |= _pairs(best)
        chosen.append(_commonest(best, random_numbers, device, limits))
    return chosen


def _commonest(variant: Variant, numbers: random.Random, device: str, limits: Limits) -> Variant:
    """The variant with a model that many shapes are compiled like."""
    trials = [_shaped(variant, numbers, _longest(device), limits) for _ in range(_TRIALS)]
    signatures = [signature(trial) for trial in trials]
    counts = Counter(signatures)
    return replace(variant, model=trials[signatures.index(max(signatures, key=lambda one: counts[one]))])


def _longest(device: str) -> int:
    return 200 if device.startswith("cuda") else 70


def _pairs(variant: Variant) -> set[tuple[str, ...]]:
    traits = sorted(variant.traits())
    return {(trait,) for trait in traits} | set(combinations(traits, 2))


def _candidate(numbers: random.Random, number: int, device: str, limits: Limits) -> Variant:
    # every sixth has no options: the kernels without them are others, and the most used
    options: list[str] = []
    if number % 6:
        options = [name for name in OTHERS if numbers.random() < 0.3]
        if "alibi" in options and "alibi_batch" in options:
            options.remove(numbers.choice(["alibi", "alibi_batch"]))
        if numbers.random() < 0.6:
            options.append(numbers.choice(BIASES))
    on_gpu = device.startswith("cuda")
    dims = _WIDE_HEAD_DIMS if on_gpu and number % 7 == 3 else _HEAD_DIMS
    d = numbers.choice(dims) if on_gpu else numbers.choice([1, 7, 16, 20, 33])
    dv = d
    if numbers.random() < 0.3:
        dv = numbers.choice(_HEAD_DIMS) if on_gpu else numbers.choice([1, 8, 16, 33])
    dtypes = ["float16", "bfloat16", "float32"] if on_gpu else ["float16", "float32"]
    kv_heads, group = numbers.choice([1, 2, 2, 3]), numbers.choice([1, 1, 2, 3, 4])
    with_lse = numbers.random() < 0.7
    packed = numbers.random() < 0.35
    model = Problem(
        options=tuple(options), d=d, dv=dv, heads=kv_heads * group, kv_heads=kv_heads, dtype=DTYPES[numbers.choice(dtypes)],
        lengths=((numbers.randint(20, 60), numbers.randint(20, 60)),) * 2 if packed else None,
        option_dtype=numbers.choice(["float32", *dtypes]),
        layout=numbers.choice(["contiguous", "contiguous", *LAYOUTS]),
        gradient_layout=numbers.choice(["contiguous", "contiguous", *GRADIENT_LAYOUTS]),
        bias_layout=numbers.choice(BIAS_LAYOUTS) if any(name in BIASES for name in options) else "contiguous",
        with_lse=with_lse, loss=numbers.choice(LOSSES) if with_lse else "out",
    )  # fmt: skip
    band = numbers.choice(_BANDS)
    model = _with_band(limits.bend(model), band, numbers)
    return Variant(replace(model, sq=numbers.randint(30, 60), sk=numbers.randint(30, 60)), band)


def make_problem(variant: Variant, seed: int, index: int, device: str = "cuda", limits: Limits = ANYTHING) -> Problem:
    """Problem `index` of a run: a function of the variant, the seed, the index and the limits."""
    numbers = random.Random(f"problem {seed} {index}")
    wanted = signature(variant.model)
    problem = variant.model
    for attempt in range(_DRAWS):
        problem = _shaped(variant, numbers, _longest(device), limits)
        if attempt >= _DRAWS // 2:
            problem = replace(
                problem, batch=variant.model.batch, heads=variant.model.heads, kv_heads=variant.model.kv_heads
            )
        if signature(problem) == wanted and _logits(problem) <= _MOST_LOGITS:
            break
    else:
        problem = variant.model  # a variant whose own shape is rare
    return replace(
        problem,
        seed=numbers.getrandbits(30),
        spread=numbers.choice([1.0, 1.0, 1.0, 3.0, 8.0, 0.01]),
        offset=numbers.choice([0.0] * 9 + [100.0, -1000.0, 30000.0]),
        poison=numbers.choice(["", "", "", *POISONS]),
    )


def _shaped(variant: Variant, numbers: random.Random, longest: int, limits: Limits) -> Problem:
    model = variant.model
    group = model.heads // model.kv_heads
    kv_heads = numbers.choice([1, 1, 2, 3]) if group < 3 else numbers.choice([1, 2])
    d, dv = _near(model.d, numbers), _near(model.dv, numbers)
    if model.d == model.dv:
        dv = d
    problem = limits.bend(replace(model, kv_heads=kv_heads, heads=kv_heads * group, d=d, dv=dv))
    if model.lengths is None:
        sq = _length(numbers, longest)
        sk = sq if model.layout == "packed" or numbers.random() < 0.3 else _length(numbers, longest)
        batch = numbers.choice([1, 2, 2, 3]) if max(sq, sk) <= 200 else 1
        if numbers.random() < 0.01:
            batch = 0
        problem = replace(problem, sq=sq, sk=sk, batch=batch)
    else:
        pairs = tuple(
            (_length(numbers, longest // 2), _length(numbers, longest // 2)) for _ in range(numbers.randint(1, 5))
        )
        if model.layout == "packed":
            pairs = tuple((a, a) for a, _ in pairs)
        problem = replace(problem, lengths=pairs, slack=numbers.choice([0, 0, 1, 7, 40]))
    return _with_band(problem, variant.band, numbers)


def _length(numbers: random.Random, longest: int) -> int:
    """Mostly small, often at the border of a tile, seldom long, now and then 0 or 1."""
    kind = numbers.random()
    if kind < 0.04:
        return numbers.choice([0, 0, 1, 2])
    if kind < 0.25:
        border = numbers.choice([16, 32, 64, 128, 192]) + numbers.choice([-1, 0, 1])
        return min(border, longest)
    if kind < 0.254 and longest >= 100:
        return numbers.randint(200, 1000)
    return numbers.randint(1, longest) if kind < 0.6 else numbers.randint(1, max(1, longest // 3))


def _near(d: int, numbers: random.Random) -> int:
    """Another head dimension with the same padding; `signature` says whether it compiles the same."""
    padded = max(16, 1 << (d - 1).bit_length())
    if d == padded or numbers.random() < 0.5:
        return d
    return numbers.randint(1 if padded == 16 else padded // 2 + 1, padded - 1)


def _with_band(problem: Problem, band: str, numbers: random.Random) -> Problem:
    causal: bool | str = "top-left" if band.startswith("top-left") else band.startswith("causal")
    if not causal and numbers.random() < 0.5 and band != "full" and problem.causal == "top-left":
        causal = False
    widest = max(2, min(problem.query_length, problem.key_length))
    left = numbers.randint(0, widest) if "window" in band or band == "left" else None
    right = numbers.randint(0, widest) if band in ("window", "right") else None
    return replace(problem, causal=causal, window=(left, right))


def total_traits(variants: list[Variant]) -> dict[str, int]:
    """How many variants have each trait."""
    counts: dict[str, int] = {}
    for variant in variants:
        for trait in variant.traits():
            counts[trait] = counts.get(trait, 0) + 1
    return dict(sorted(counts.items()))


def _logits(problem: Problem) -> int:
    """How many a problem has, padded: what its judgement costs."""
    return problem.sequences * problem.heads * problem.query_length * problem.key_length
