"""NaN and Inf behind masks: what a query does not see never touches its row, in either pass, whatever hides it.

Cases of issues: pytorch#101967 (NaN in masked K and V), flash-attention#443, pytorch#103963, #119320, #125674 (gradients),
flashinfer#760, #945 (uninitialised memory behind the keys). 0 * NaN is NaN: a weight of 0 is not enough.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support.masks import EXTRAS, KINDS, Kind, Ran, draw, run

NAN, INF = float("nan"), float("inf")
OURS = ["triton", "tiled", "reference"]
KEYS = (2, 18, 33)  # in the first tile, in the middle of a sequence, in the second tile


def close(name: str, ours: Tensor, clean: Tensor, dtype: torch.dtype | None = None) -> None:
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype or ours.dtype]
    torch.testing.assert_close(ours, clean, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}")


def lost(rows: Tensor, poison: float) -> bool:
    """Whether every row holds what is not finite: NaN where NaN was seen; Inf may stay Inf."""
    found = rows.isnan() if poison != poison else ~rows.isfinite()
    return bool(found.flatten(1).any(1).all())


def assert_only_those_that_see(
    kind: Kind, backend: str, dirty: Ran, clean: Ran, key: int, target: str, poison: float
) -> None:
    """Rows that see `key` are lost, all others as they were; a key's gradient is lost only where such a row sees it, too."""
    visible = kind.table().to(dirty.out.device)
    seeing = visible[:, key]
    head = dirty.out.shape[1] - 1  # the poisoned one; the other one, where there is one, stays clean
    others = ~seeing
    close("other head", dirty.out[:, :head], clean.out[:, :head])
    close("out", dirty.out[others, head], clean.out[others, head])
    close("d_q", dirty.d_q[others, head], clean.d_q[others, head])
    close("d_q of the other head", dirty.d_q[:, :head], clean.d_q[:, :head])
    rows = others if target == "k" else torch.ones_like(others)  # values have no part in the log-sum-exp
    close("lse", dirty.lse[head, rows], clean.lse[head, rows])
    untouched = ~visible[seeing].any(0)
    for name in ("d_k", "d_v"):
        ours, theirs = getattr(dirty, name), getattr(clean, name)
        close(f"{name} of the other head", ours[:, :head], theirs[:, :head])
        close(name, ours[untouched, head], theirs[untouched, head])
    for name, gradient in dirty.others.items():
        if name == "bias":
            close("d_bias", gradient[others], clean.others[name][others], dirty.out.dtype)
            assert torch.equal(gradient[~visible], torch.zeros_like(gradient[~visible]))
        else:
            close(f"d_{name} of the other head", gradient[:head], clean.others[name][:head])
    if seeing.any():
        assert lost(dirty.out[seeing, head], poison)
        if not (
            backend == "reference" and target == "v"
        ):  # it puts NaN in the output by hand, which autograd passes by
            assert lost(dirty.d_q[seeing, head], poison)
        if target == "k":
            assert lost(dirty.lse[head, seeing, None], poison)


def with_and_without(
    kind: Kind,
    key: int,
    target: str,
    poison: float,
    backend: str,
    device: str,
    dtype: torch.dtype,
    extra: str = "plain",
) -> tuple[Ran, Ran]:
    heads = 1 if extra == "plain" and backend == "triton" and device == "cpu" else 2  # the interpreter is slow
    tensors = draw(kind, device, dtype, heads, heads)
    place = tensors[1 if target == "k" else 2]
    place[key, -1] = 0.0
    # What tests of options hold to be the same is taken from the backend that is fast on a CPU.
    clean = run(kind, tensors, "tiled" if dtype == torch.float32 else backend, **EXTRAS[extra])
    if poison != poison and key != KEYS[0]:
        place[key, -1, 3] = poison  # one element is enough
    else:
        place[key, -1] = poison
    return run(kind, tensors, backend, **EXTRAS[extra]), clean


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("target", ["k", "v"])
@pytest.mark.parametrize("name", KINDS)
def test_nan_in_a_key_reaches_the_rows_that_see_it_and_no_other(
    name: str, target: str, backend: str, device: str, poisoned_memory: None
) -> None:
    # The interpreter is slow: there, one key for each mask, and another one for the values than for the keys.
    place = list(KINDS).index(name) + (target == "v")
    for key in KEYS if backend != "triton" or device == "cuda" else [KEYS[place % len(KEYS)]]:
        dirty, clean = with_and_without(KINDS[name], key, target, NAN, backend, device, torch.float32)
        assert_only_those_that_see(KINDS[name], backend, dirty, clean, key, target, NAN)


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("target", ["k", "v"])
@pytest.mark.parametrize("name", ["causal", "window", "bias", "packed"])
def test_so_does_infinity(name: str, target: str, backend: str, device: str) -> None:
    poison = INF if len(name) % 2 else -INF
    dirty, clean = with_and_without(KINDS[name], 18, target, poison, backend, device, torch.float32)
    assert_only_those_that_see(KINDS[name], backend, dirty, clean, 18, target, poison)


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("target", ["k", "v"])
@pytest.mark.parametrize("extra", [extra for extra in EXTRAS if extra != "plain"])
@pytest.mark.parametrize("name", ["causal", "packed documents"])
def test_whatever_else_is_asked_for(name: str, extra: str, target: str, backend: str, device: str) -> None:
    dirty, clean = with_and_without(KINDS[name], 18, target, NAN, backend, device, torch.float32, extra)
    if (
        extra == "alibi"
    ):  # a slope's gradient is a sum over all rows of its head: only the other head's can be looked at
        assert dirty.others["alibi_slopes"][1].isnan() or (backend == "reference" and target == "v")
    assert_only_those_that_see(KINDS[name], backend, dirty, clean, 18, target, NAN)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("name", "target"), [("causal", "v"), ("window", "k"), ("bias", "v"), ("packed", "k")])
def test_in_half_precision(name: str, target: str, dtype: torch.dtype, device: str) -> None:
    for backend in ("triton", "tiled"):
        dirty, clean = with_and_without(KINDS[name], 33, target, NAN, backend, device, dtype)
        assert_only_those_that_see(KINDS[name], backend, dirty, clean, 33, target, NAN)


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)], ids=str)
def test_grouped_heads_share_their_poison(heads: tuple[int, int], backend: str, device: str) -> None:
    kind = KINDS["causal"]
    tensors = draw(kind, device, heads=heads[0], kv_heads=heads[1])
    clean = run(kind, tensors, "tiled")
    tensors[1][20, 0], tensors[2][20, 0] = NAN, NAN
    dirty = run(kind, tensors, backend)
    group = heads[0] // heads[1]
    for name in ("out", "d_q"):
        close(name, getattr(dirty, name)[:17], getattr(clean, name)[:17])
        close(name, getattr(dirty, name)[:, group:], getattr(clean, name)[:, group:])
        assert lost(getattr(dirty, name)[17:, :group].flatten(0, 1), NAN)


WITH_EMPTY_ROWS = [name for name, kind in KINDS.items() if not bool(kind.table().any(1).all())]
EMPTY_ROWS = [pytest.param(name, backend) for name in WITH_EMPTY_ROWS for backend in OURS]


@pytest.mark.parametrize(("name", "backend"), EMPTY_ROWS)
def test_queries_that_see_nothing_may_hold_anything(
    name: str, backend: str, device: str, poisoned_memory: None
) -> None:
    """Their output and gradients are 0, their log-sum-exp is -inf, and nothing of them reaches the keys' gradients."""
    kind, poison = KINDS[name], NAN if len(name) % 2 else INF
    empty = ~kind.table().any(1)
    assert empty.any()
    tensors = draw(kind, device, heads=1, kv_heads=1)
    clean = run(kind, tensors, "tiled")
    tensors[0][empty] = poison
    dirty = run(kind, tensors, backend)
    for rows in (dirty.out[empty], dirty.d_q[empty]):
        assert torch.equal(rows, torch.zeros_like(rows))
    assert bool((dirty.lse[:, empty] == -INF).all())
    for field in ("out", "d_q", "d_k", "d_v"):
        close(field, getattr(dirty, field), getattr(clean, field))


@pytest.mark.parametrize(("name", "backend"), EMPTY_ROWS)
def test_gradients_of_rows_that_see_nothing_go_nowhere(name: str, backend: str, device: str) -> None:
    """A loss of outputs that are 0 and log-sum-exps of -inf easily has NaN there (lse - lse.max()); it must not spread."""
    kind = KINDS[name]
    empty = ~kind.table().any(1)
    tensors = draw(kind, device, heads=1, kv_heads=1)
    d_lse = torch.randn(1, kind.sq, generator=torch.Generator().manual_seed(3)).to(device)
    clean = run(kind, tensors, "tiled", d_lse=d_lse)
    tensors[3][empty], d_lse[:, empty] = NAN, NAN
    dirty = run(kind, tensors, backend, d_lse=d_lse)
    for field in ("d_q", "d_k", "d_v"):
        close(field, getattr(dirty, field), getattr(clean, field))
    for option, gradient in dirty.others.items():
        close(f"d_{option}", gradient, clean.others[option])


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("name", ["causal", "window", "mask", "documents", "prefix", "packed"])
def test_nan_in_a_query_stays_in_its_row(name: str, backend: str, device: str) -> None:
    """Its output is lost, and no other row. `tiled` also keeps it from the d_k and d_v of keys that it does not see."""
    kind = KINDS[name]
    visible = kind.table().to(device)
    row = 30 if bool(visible[30].any()) else 12
    tensors = draw(kind, device)
    tensors[0][row] = 0.0
    clean = run(kind, tensors, "tiled")
    tensors[0][row, 1, 5] = NAN
    dirty = run(kind, tensors, backend)
    others = torch.arange(kind.sq, device=device) != row
    for field in ("out", "d_q"):
        close(field, getattr(dirty, field)[others], getattr(clean, field)[others])
    assert lost(dirty.out[row, 1][None], NAN)
    for field in ("d_k", "d_v"):
        close(field, getattr(dirty, field)[:, 0], getattr(clean, field)[:, 0])
        if backend == "triton":  # docs/semantics.md: not promised
            continue
        close(field, getattr(dirty, field)[~visible[row], 1], getattr(clean, field)[~visible[row], 1])


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("name", ["causal", "documents", "packed"])
def test_nan_in_a_bias_where_another_mask_hides(name: str, backend: str, device: str) -> None:
    kind = KINDS[name]
    more = {"max_seqlen_q": 18, "max_seqlen_k": 20} if kind.packed else {}
    shape = (1, 1, 18, 20) if kind.packed else (1, 1, kind.sq, kind.sk)
    hidden = torch.ones(18, 20).triu(3) > 0 if kind.packed else ~kind.table()
    tensors, bias = draw(kind, device), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    clean = run(kind, tensors, "tiled", bias=bias, **more)
    dirty = run(kind, tensors, backend, bias=bias.masked_fill(hidden, NAN), **more)
    for field in ("out", "lse", "d_q", "d_k", "d_v"):
        close(field, getattr(dirty, field), getattr(clean, field))
    close("d_bias", dirty.others["bias"], clean.others["bias"])
