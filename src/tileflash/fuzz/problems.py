"""Attention problems as plain facts: what a problem asks for, in words and numbers that JSON can hold. Nothing is drawn here."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

# Each adds one argument; a problem has any of them, but at most one bias.
BIASES = ("bias", "bias_heads", "bias_keys", "bias_queries", "bias_one", "bias_hiding", "mask", "mask_keys")
OTHERS = ("alibi", "alibi_batch", "softcap", "documents", "prefix", "sinks", "dropout", "negative_scale")
OPTIONS = BIASES + OTHERS
SLOPES = {"alibi", "alibi_batch"}  # one of them at most
HIDING = ("bias_hiding", "mask", "mask_keys", "documents", "prefix")  # these hide keys besides the band

# How q, k, v and the gradient of out lie in memory; see `layouts`.
LAYOUTS = ("contiguous", "heads_first", "sequence_first", "gapped", "misaligned", "last", "expanded", "packed")
GRADIENT_LAYOUTS = ("contiguous", "heads_first", "sequence_first", "gapped", "misaligned", "last", "constant")
BIAS_LAYOUTS = ("contiguous", "transposed", "expanded", "gapped")
# What k, v (and q) hold where it must not matter: "unseen": keys that no query sees, and queries that see none, for all is as if
# they were 0; "hidden": some keys that others see, and then only rows that do not see them are judged.
POISONS = ("", "unseen-nan", "unseen-inf", "unseen--inf", "hidden-nan", "hidden-inf")
LOSSES = ("out", "lse", "both")  # what the gradient comes from
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Problem:
    """One problem. With `lengths` its sequences are packed: (queries, keys) of each, and `slack` rows behind the last one.

    Args:
        options: names out of OPTIONS.
        sq, sk, d, dv, batch, heads, kv_heads: shapes; `sq`, `sk` and `batch` do not count for packed sequences.
        causal, window: as `attention` takes them.
        seed: of all numbers in the tensors.
        spread: standard deviation of q and k; large ones make extreme logits.
        offset: a constant that is added to all products of q and k.
        layout, gradient_layout, bias_layout: strides.
        option_dtype: of bias, slopes and sinks; "" is fp32 for even seeds and the problem's for odd ones.
        poison: see POISONS.
        with_lse: the log-sum-exp is asked for.
        loss: where the gradient comes from; without `with_lse` it is out.
    """

    options: tuple[str, ...] = ()
    sq: int = 50
    sk: int = 50
    d: int = 16
    dv: int = 16
    batch: int = 2
    heads: int = 2
    kv_heads: int = 2
    causal: Any = False
    window: tuple[int | None, int | None] = (None, None)
    dtype: torch.dtype = torch.float32
    lengths: tuple[tuple[int, int], ...] | None = None
    slack: int = 0
    seed: int = 0
    spread: float = 1.0
    offset: float = 0.0
    layout: str = "contiguous"
    gradient_layout: str = "contiguous"
    bias_layout: str = "contiguous"
    option_dtype: str = ""
    poison: str = ""
    with_lse: bool = True
    loss: str = "both"

    def __str__(self) -> str:
        shape = (
            f"{self.sq}x{self.sk}" if self.lengths is None else "packed" + "_".join(f"{a}.{b}" for a, b in self.lengths)
        )
        names = "+".join(self.options) or "plain"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{names}-{shape}-d{self.d}v{self.dv}-h{self.heads}/{self.kv_heads}-{self.causal}-{self.window}-{dtype}"

    def on(self, dtype: torch.dtype) -> Problem:
        return replace(self, dtype=dtype)

    @property
    def sequences(self) -> int:
        return self.batch if self.lengths is None else len(self.lengths)

    @property
    def query_length(self) -> int:
        """Of the longest sequence."""
        return self.sq if self.lengths is None else max((a for a, _ in self.lengths), default=0)

    @property
    def key_length(self) -> int:
        """Of the longest sequence."""
        return self.sk if self.lengths is None else max((b for _, b in self.lengths), default=0)

    @property
    def query_shape(self) -> tuple[int, int, int, int]:
        """[batch, rows, heads, d]; packed sequences are one batch entry."""
        return (*self._rows(0), self.heads, self.d)

    @property
    def key_shape(self) -> tuple[int, int, int, int]:
        return (*self._rows(1), self.kv_heads, self.d)

    @property
    def value_shape(self) -> tuple[int, int, int, int]:
        return (*self._rows(1), self.kv_heads, self.dv)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return (*self._rows(0), self.heads, self.dv)

    @property
    def bias(self) -> str:
        """The name of the bias, "" without."""
        return next((name for name in self.options if name in BIASES), "")

    @property
    def bias_shape(self) -> tuple[int, ...]:
        batch, heads, sq, sk = self.sequences, self.heads, self.query_length, self.key_length
        if self.lengths is not None:  # at least max_seqlen, where 0 is "nobody said"
            sq, sk = max(1, sq), max(1, sk)
        return {
            "bias": (batch, heads, sq, sk), "bias_heads": (heads, sq, sk), "bias_keys": (batch, 1, 1, sk),
            "bias_queries": (1, 1, sq, 1), "bias_one": (1,), "bias_hiding": (1, heads, sq, sk),
            "mask": (batch, 1, sq, sk), "mask_keys": (batch, 1, 1, sk),
        }[self.bias]  # fmt: skip

    @property
    def dtype_of_options(self) -> torch.dtype:
        if self.option_dtype:
            return DTYPES[self.option_dtype]
        return self.dtype if self.seed % 2 else torch.float32

    def _rows(self, which: int) -> tuple[int, int]:
        if self.lengths is None:
            return self.batch, (self.sq, self.sk)[which]
        return 1, sum(pair[which] for pair in self.lengths) + self.slack


def changed_fields(problem: Problem) -> dict[str, Any]:
    """What differs from the plainest problem, the dtype by its torch name."""
    plain = Problem()
    named = {field.name: getattr(problem, field.name) for field in fields(problem)}
    return {name: value for name, value in named.items() if value != getattr(plain, name)}


def to_json(problem: Problem) -> str:
    """One line, all fields."""
    record = asdict(problem)
    record["dtype"] = str(problem.dtype).removeprefix("torch.")
    return json.dumps(record)


def from_json(text: str) -> Problem:
    """The problem of `to_json`; fields that are left out have their defaults. ValueError names what is wrong."""
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"a problem must be JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"a problem must be a JSON object, got {type(record).__name__}")
    known = {field.name for field in fields(Problem)}
    if unknown := sorted(set(record) - known):
        raise ValueError(f"a problem has no field {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    _check_types(record)
    if "dtype" in record:
        if record["dtype"] not in DTYPES:
            raise ValueError(f"a problem's dtype must be one of {', '.join(DTYPES)}, got {record['dtype']!r}")
        record["dtype"] = DTYPES[record["dtype"]]
    if record.get("lengths") is not None:
        record["lengths"] = tuple(tuple(pair) for pair in record["lengths"])
    for name in ("options", "window"):
        if name in record:
            record[name] = tuple(record[name])
    problem = Problem(**record)
    check_problem(problem)
    return problem


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: Any, of: Callable[[Any], bool], length: int | None = None) -> bool:
    return isinstance(value, (list, tuple)) and length in (None, len(value)) and all(of(each) for each in value)


# What fields hold in JSON, besides words of which `check_problem` has lists: what it must be called, and whether it is that.
_JSON_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("sq", "sk", "d", "dv", "batch", "heads", "kv_heads", "slack", "seed"), ("a whole number", _is_number)),
    **dict.fromkeys(("spread", "offset"), ("a number", lambda value: _is_number(value) or isinstance(value, float))),
    "options": ("a list of words", lambda value: _is_list(value, lambda each: isinstance(each, str))),
    "window": (
        "two bounds, each a number >= 0 or null",
        lambda value: _is_list(value, lambda each: each is None or (_is_number(each) and each >= 0), 2),
    ),
    "lengths": (
        "null or pairs of numbers >= 0",
        lambda value: value is None
        or _is_list(value, lambda pair: _is_list(pair, lambda each: _is_number(each) and each >= 0, 2)),
    ),
    "causal": (
        'false, true, "top-left" or "bottom-right"',
        lambda value: value in (False, True, "top-left", "bottom-right") and not _is_number(value),
    ),
    "dtype": ("a word", lambda value: isinstance(value, str)),
    "with_lse": ("true or false", lambda value: isinstance(value, bool)),
}  # fmt: skip


def _check_types(record: dict[str, Any]) -> None:
    for name, value in record.items():
        wanted, is_right = _JSON_TYPES.get(name, ("", lambda value: True))
        if not is_right(value):
            raise ValueError(f"a problem's {name} must be {wanted}, got {json.dumps(value)}")


def check_problem(problem: Problem) -> None:
    """Raise ValueError for words that are none."""
    for name, words in (
        ("layout", LAYOUTS), ("gradient_layout", GRADIENT_LAYOUTS), ("bias_layout", BIAS_LAYOUTS), ("poison", POISONS),
        ("loss", LOSSES), ("option_dtype", ("", *DTYPES)),
    ):  # fmt: skip
        if getattr(problem, name) not in words:
            raise ValueError(f"a problem's {name} must be one of {', '.join(words)}, got {getattr(problem, name)!r}")
    if wrong := [name for name in problem.options if name not in OPTIONS]:
        raise ValueError(f"a problem's options are {', '.join(OPTIONS)}, not {wrong[0]!r}")
    if sum(name in BIASES for name in problem.options) > 1 or set(problem.options) >= SLOPES:
        raise ValueError(f"a problem has one bias and one kind of slopes, got {', '.join(problem.options)}")
    if min(problem.d, problem.dv, problem.kv_heads) < 1 or problem.heads % problem.kv_heads:
        raise ValueError("a problem's heads must be a multiple of kv_heads, and d and dv at least 1")
    if min(problem.sq, problem.sk, problem.batch, problem.slack) < 0:
        raise ValueError("a problem's lengths, batch and slack must not be negative")
