"""The Hopper backend: what it refuses without a GPU, and on one the edges that the common tests, in fp32, leave to others."""

import pytest
import torch

import tileflash
from support.exactness import Case, check
from tileflash.attention.backends import base, hopper
from tileflash.attention.dispatch import BACKENDS, choose
from tileflash.attention.problem import make_problem
from tileflash.fuzz import Problem, examine
from tileflash.kernels.options import Options

BACKEND = BACKENDS["hopper"]
BF16, FP16 = torch.bfloat16, torch.float16
ODD = [
    *(Case(*lengths, d, dtype=BF16, causal=causal, heads=4, kv_heads=2)
      for d in (64, 128, 256)
      for lengths in ((129, 129), (513, 1300), (1300, 513), (1, 513), (190, 190), (255, 383))
      for causal in (False, True, "top-left")),
    *(Case(777, 777, d, dtype=BF16, window=window)
      for d in (64, 128, 256)
      for window in ((100, 50), (13, 0), (300, None), (None, 37), (127, 128))),
    *(Case(300, 300, d, dtype=FP16, causal=True, dv=dv)
      for d, dv in ((8, None), (40, 64), (72, None), (80, None), (112, 32), (136, 160), (192, 128), (200, None))),
    Case(1024, 1024, 64, dtype=FP16, window=(256, 0), heads=8, kv_heads=1),
    Case(2048, 2048, 128, dtype=BF16, causal=True, heads=16, kv_heads=4, batch=3),
    Case(300, 300, 64, dtype=BF16, causal=True, scale=1.7),
]  # fmt: skip


def on_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


needs_hopper = pytest.mark.skipif(not on_hopper(), reason="needs a Hopper GPU (compute capability 9.0)")


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


def test_it_refuses_the_cpu_and_says_so() -> None:
    q, k, v = Case(20, 20, 64, dtype=BF16).draw("cpu")
    reasons = BACKEND.reasons(make_problem(q, k, v, True, (None, None), None, False))
    assert reasons == ["runs on cuda, the tensors are on cpu"]


def problem_on(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], d: int = 64) -> list[str]:
    monkeypatch.setattr(base, "device_capability", lambda device: capability)
    monkeypatch.setattr(hopper, "device_capability", lambda device: capability)
    q, k, v = Case(20, 20, d, dtype=BF16).draw("cpu")
    problem = make_problem(q, k, v, True, (None, None), None, False)
    object.__setattr__(problem, "device", torch.device("cuda", 0))
    return BACKEND.reasons(problem)


def test_it_refuses_other_gpus_and_head_dimensions_that_tma_cannot_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "compute capability 9.0" in problem_on(monkeypatch, (8, 0))[0]
    assert "which this GPU does not have" in problem_on(monkeypatch, (10, 0))[0]
    assert problem_on(monkeypatch, (9, 0), d=20) == ["head dimension must be a multiple of 8, is 20"]
    assert problem_on(monkeypatch, (9, 0)) == []


def test_it_refuses_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "device_capability", lambda device: (9, 0))
    monkeypatch.setattr(hopper, "device_capability", lambda device: (9, 0))
    q, k, v = Case(20, 20, 64, dtype=BF16).draw("cpu")
    options = Options(softcap=3.0, sinks=torch.zeros(2), alibi_slopes=torch.zeros(2), bias=torch.zeros(1, 1, 20, 20))
    problem = make_problem(q, k, v, True, (None, None), None, False, options)
    object.__setattr__(problem, "device", torch.device("cuda", 0))
    assert BACKEND.reasons(problem) == ["does not have ALiBi", "does not have bias"]


@pytest.mark.parametrize("asked", ["nothing", "softcap", "sinks", "packed", "determinism", "determinism everywhere"])
def test_what_auto_takes_on_hopper(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The options' kernels serve, but have not been measured against the portable ones."""
    monkeypatch.setattr(base, "device_capability", lambda device: (9, 0))
    monkeypatch.setattr(hopper, "device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: asked == "determinism everywhere")
    q, k, v = (t.requires_grad_() for t in Case(600, 600, 64, dtype=BF16, batch=1).draw("cpu"))
    lengths = torch.tensor([0, 600], dtype=torch.int32)
    options = {
        "softcap": Options(softcap=3.0),
        "sinks": Options(sinks=torch.zeros(2)),
        "packed": Options(cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=600, max_seqlen_k=600),
    }.get(asked, Options())
    problem = make_problem(q, k, v, True, (None, None), None, False, options, deterministic=asked == "determinism")
    object.__setattr__(problem, "device", torch.device("cuda", 0))
    assert BACKEND.reasons(problem) == []
    assert choose(problem, "hopper").name == "hopper"
    assert choose(problem, "auto").name == ("hopper" if asked == "nothing" else "triton")
    expected = {"nothing": [], "softcap": ["soft cap"], "sinks": ["sinks"], "packed": ["packed sequences"]}
    for feature in expected.get(asked, ["deterministic"]):
        assert feature in (BACKEND.stands_back(problem) or "")


def test_determinism_is_served_by_other_kernels_and_not_under_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (t.requires_grad_() for t in Case(600, 600, 80, dtype=BF16).draw("cpu"))
    plain, same_bits, no_gradient = (
        make_problem(*tensors, True, (None, None), None, False, deterministic=deterministic)
        for tensors, deterministic in (
            ((q, k, v), False),
            ((q, k, v), True),
            ((q.detach(), k.detach(), v.detach()), True),
        )
    )
    assert BACKEND.serving(plain) is BACKEND.serving(no_gradient) is BACKEND
    assert BACKEND.serving(same_bits).kernels == "hopper deterministic"
    assert BACKEND.stands_back(plain) is None
    assert "deterministic" in (BACKEND.stands_back(same_bits) or "")
    assert len(BACKEND.plan(same_bits)) == 5
    assert "dQ in fp32, 128 queries against tiles of 64 keys" in BACKEND.plan(same_bits)[3]
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert BACKEND.serving(plain).kernels == "hopper deterministic"


def test_its_plan_names_what_is_launched() -> None:
    q, k, v = Case(20, 20, 80, dtype=BF16).draw("cpu")
    plan = BACKEND.plan(make_problem(q, k, v, True, (None, None), None, False))
    assert len(plan) == 4
    assert plan[0].startswith("forward: tiles of 128 queries and 128 keys, head dimension padded to 128")
    assert "dQ by atomic additions" in plan[2]


def test_a_triton_without_its_gluon_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "_look_at_gluon", lambda: "Gluon in Triton 9.9 is not the one")
    assert problem_on(monkeypatch, (9, 0)) == ["Gluon in Triton 9.9 is not the one"]


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("case", ODD, ids=str)
def test_odd_shapes(case: Case, poisoned_memory: None) -> None:
    check(case, "hopper", "cuda", with_lse=True)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("d", [64, 128, 256])
def test_any_strides_give_what_contiguous_tensors_give(d: int) -> None:
    batch, length, heads = 2, 333, 4
    sliced = normal(batch, length, 3, heads, d).unbind(2)
    layouts = {
        "sliced": sliced,
        "transposed": [t.transpose(1, 2).contiguous().transpose(1, 2) for t in sliced],
        "sequence first": [t.transpose(0, 1).contiguous().transpose(0, 1) for t in sliced],
        "last dimension apart": [t.transpose(2, 3).contiguous().transpose(2, 3) for t in sliced],
        "odd address": [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in sliced],
    }
    d_out = normal(batch, length, heads, d)

    def run(inputs: list[torch.Tensor], grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in inputs]
        out = tileflash.attention(*leaves, causal=True, backend="hopper")
        return (out.detach(), *torch.autograd.grad(out, leaves, grad))

    expected = run([t.contiguous() for t in sliced], d_out)
    for name, inputs in layouts.items():
        for grad in (d_out, d_out.transpose(1, 2).contiguous().transpose(1, 2)):
            for ours, theirs in zip(run(list(inputs), grad), expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2, msg=name)


@pytest.mark.gpu
@needs_hopper
def test_rows_and_keys_that_see_nothing_may_hold_anything(poisoned_memory: None) -> None:
    k, v = normal(1, 50, 2, 64), normal(1, 50, 2, 64)
    k[:, 20:], v[:, 20:] = float("nan"), float("inf")
    leaves = [t.requires_grad_() for t in (normal(1, 20, 2, 64), k, v)]
    out = tileflash.attention(*leaves, causal="top-left", backend="hopper")
    grads = torch.autograd.grad(out.float().sum(), leaves)
    assert all(bool(torch.isfinite(t).all()) for t in (out, *grads))
    assert bool((grads[1][:, 20:] == 0).all())
    assert bool((grads[2][:, 20:] == 0).all())

    q = normal(1, 50, 2, 64)
    q[:, :30] = float("nan")
    leaves = [t.detach().requires_grad_() for t in (q, normal(1, 20, 2, 64), normal(1, 20, 2, 64))]
    out, lse = tileflash.attention(*leaves, causal=True, return_lse=True, backend="hopper")
    grads = torch.autograd.grad(out.float().sum() + lse[:, :, 30:].sum(), leaves)
    assert bool((out[:, :30] == 0).all())
    assert bool((lse[:, :, :30] == -torch.inf).all())
    assert bool((grads[0][:, :30] == 0).all())
    assert all(bool(torch.isfinite(t).all()) for t in (out, *grads))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("poison", ["hidden-nan", "hidden-inf", "unseen-nan"])
@pytest.mark.parametrize("d", [64, 80, 128, 256])
@pytest.mark.parametrize(("sq", "sk", "causal", "window"), [
    (300, 300, True, (None, None)), (150, 700, True, (None, None)), (700, 150, "top-left", (None, None)), (500, 520, False, (70, 40)),
])  # fmt: skip
def test_what_is_hidden_may_be_anything(
    poison: str, d: int, sq: int, sk: int, causal: bool | str, window: tuple[int | None, int | None]
) -> None:
    """Rows that do not see a key have the output, log-sum-exp and d_q of fp64 whatever the key and its value hold."""
    problem = Problem(
        sq=sq, sk=sk, d=d, dv=64 if d == 80 else d, heads=2, kv_heads=1, batch=2, causal=causal, window=window, dtype=BF16,
        poison=poison, seed=d,
    )  # fmt: skip
    assert examine(problem, "hopper", "cuda") == []


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("d", [64, 128])
def test_what_is_hidden_may_be_anything_where_a_program_makes_several_tiles(d: int) -> None:
    problem = Problem(
        sq=600, sk=600, d=d, dv=d, heads=8, kv_heads=2, batch=8, causal=True, dtype=BF16, poison="hidden-nan"
    )
    assert examine(problem, "hopper", "cuda") == []


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("offset", [-3.0e4, 3.0e4])
def test_logits_far_from_0(offset: float) -> None:
    """The keys that fill up a tile have the logit 0, which is far from these: they must not overflow into the gradients."""
    q, k, v = normal(1, 3, 1, 64), normal(1, 100, 1, 64), normal(1, 100, 1, 64)
    q[..., 0], k[..., 0] = 1.0, 0.0
    plain = tileflash.attention(q, k, v, scale=1.0, backend="reference")
    k[..., 0] = offset
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = tileflash.attention(*leaves, scale=1.0, return_lse=True, backend="hopper")
    torch.testing.assert_close(out, plain, rtol=2e-2, atol=2e-2)
    grads = torch.autograd.grad(out.float().sum() + lse.sum(), leaves)
    assert all(bool(torch.isfinite(grad).all()) for grad in grads)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_forward_is_equal_bit_for_bit(d: int, causal: bool) -> None:
    q, k, v = (normal(2, 1000, 4, d) for _ in range(3))
    first = tileflash.attention(q, k, v, causal=causal, return_lse=True, backend="hopper")
    for _ in range(100):
        again = tileflash.attention(q, k, v, causal=causal, return_lse=True, backend="hopper")
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
@needs_hopper
def test_more_than_65535_batch_heads() -> None:
    q, k, v = (normal(40_000, 3, 2, 64).requires_grad_() for _ in range(3))
    out = tileflash.attention(q, k, v, causal=True, backend="hopper")
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    tail = [t[-5:].detach().requires_grad_() for t in (q, k, v)]
    expected = tileflash.attention(*tail, causal=True, backend="reference")
    torch.testing.assert_close(out[-5:], expected, rtol=2e-2, atol=2e-2)
    for grad, want in zip(grads, torch.autograd.grad(expected.float().square().sum(), tail), strict=True):
        torch.testing.assert_close(grad[-5:], want, rtol=5e-2, atol=7e-2)


@pytest.mark.gpu
@needs_hopper
def test_a_captured_graph_replays() -> None:
    q, k, v = (normal(2, 500, 4, 128) for _ in range(3))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            tileflash.attention(q, k, v, causal=True, backend="hopper")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tileflash.attention(q, k, v, causal=True, backend="hopper")
    q.normal_()
    graph.replay()
    assert torch.equal(out, tileflash.attention(q, k, v, causal=True, backend="hopper"))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("d", [64, 128, 256])
def test_compiled_gives_what_eager_gives(d: int) -> None:
    leaves = [normal(2, 300, 4, d).requires_grad_() for _ in range(3)]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return tileflash.attention(q, k, v, causal=True, backend="hopper")

    out, expected = torch.compile(attend, fullgraph=True)(*leaves), attend(*leaves)
    assert torch.equal(out, expected)
    d_out = torch.randn_like(out)
    grads, expected_grads = (torch.autograd.grad(t, leaves, d_out) for t in (out, expected))
    for grad, want in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, want, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_many_backward_passes_agree(d: int, causal: bool) -> None:
    """Only the last bits of d_q may differ from run to run: an error that moves would be a race. d_k and d_v are equal bit for bit."""
    leaves = [normal(2, 1000, 8, d).requires_grad_() for _ in range(3)]
    d_out = normal(2, 1000, 8, d)
    out = tileflash.attention(*leaves, causal=causal, backend="hopper")
    first = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
    for _ in range(100):
        again = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
        torch.testing.assert_close(again[0], first[0], rtol=2e-2, atol=2e-3)
        assert torch.equal(again[1], first[1])
        assert torch.equal(again[2], first[2])


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("case", ODD, ids=str)
def test_odd_shapes_with_deterministic_gradients(
    case: Case, poisoned_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that `test_odd_shapes` looks at, by the kernels that make d_q alone."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    check(case, "hopper", "cuda", with_lse=True)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize(("causal", "kv_heads"), [(False, 8), (True, 8), (True, 2)])
def test_deterministic_gradients_are_equal_bit_for_bit(d: int, causal: bool, kv_heads: int) -> None:
    leaves = [normal(2, 1000, heads, d).requires_grad_() for heads in (8, kv_heads, kv_heads)]
    d_out = normal(2, 1000, 8, d)
    plain = torch.autograd.grad(tileflash.attention(*leaves, causal=causal, backend="hopper"), leaves, d_out)
    out = tileflash.attention(*leaves, causal=causal, deterministic=True, backend="hopper")
    first = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
    for ours, theirs in zip(first, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-3)
    for _ in range(100):
        again = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("options", [("softcap",), ("sinks",), ("softcap", "sinks")], ids="+".join)
@pytest.mark.parametrize("d", [64, 80, 128, 256])
@pytest.mark.parametrize(("sq", "sk", "causal", "window"), [
    (300, 300, True, (None, None)), (256, 384, False, (None, None)), (150, 700, True, (None, None)),
    (700, 150, True, (None, None)), (500, 520, False, (70, 40)),
])  # fmt: skip
def test_options(
    options: tuple[str, ...], d: int, sq: int, sk: int, causal: bool, window: tuple[int | None, int | None], deterministic: bool,
    monkeypatch: pytest.MonkeyPatch, poisoned_memory: None,
) -> None:  # fmt: skip
    """Among them queries that see no key: their log-sum-exp is the sink."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    problem = Problem(
        options=options, sq=sq, sk=sk, d=d, dv=64 if d == 80 else d, heads=4, kv_heads=2, batch=2, causal=causal, window=window,
        dtype=BF16 if sq % 3 else FP16, seed=d,
    )  # fmt: skip
    assert examine(problem, "hopper", "cuda") == []


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("poison", ["hidden-nan", "hidden-inf", "unseen-nan"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_what_is_hidden_may_be_anything_with_options(poison: str, d: int) -> None:
    problem = Problem(
        options=("softcap", "sinks"), sq=300, sk=300, d=d, dv=d, heads=2, kv_heads=1, batch=2, causal=True, dtype=BF16,
        poison=poison, seed=d,
    )  # fmt: skip
    assert examine(problem, "hopper", "cuda") == []


PACKED = {
    "even": ((256, 256), (128, 128), (384, 384)),
    "uneven": ((1, 1), (190, 190), (64, 64), (65, 65), (300, 300), (7, 7)),
    "zeros": ((0, 0), (150, 150), (0, 70), (0, 0), (90, 0), (33, 33), (0, 0)),
    "more keys": ((3, 500), (129, 400), (1, 1)),
    "more queries": ((500, 3), (400, 129), (70, 0)),
    "short": tuple((1 + i % 17, 1 + i % 17) for i in range(90)),
}


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("lengths", PACKED)
@pytest.mark.parametrize("d", [64, 80, 128, 256])
@pytest.mark.parametrize(("causal", "window"), [
    (False, (None, None)), (True, (None, None)), ("top-left", (None, None)), (True, (40, 0)), (False, (13, 70)),
])  # fmt: skip
def test_packed_sequences(
    lengths: str, d: int, causal: bool | str, window: tuple[int | None, int | None], deterministic: bool,
    monkeypatch: pytest.MonkeyPatch, poisoned_memory: None,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    problem = Problem(
        lengths=PACKED[lengths], slack=0 if d == 128 else 75, d=d, dv=64 if d == 80 else d, heads=4, kv_heads=1 if d == 64 else 4,
        causal=causal, window=window, dtype=FP16 if causal is True else BF16, seed=d,
    )  # fmt: skip
    assert examine(problem, "hopper", "cuda") == []


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("options", [("softcap",), ("sinks",), ("softcap", "sinks")], ids="+".join)
@pytest.mark.parametrize("lengths", ["uneven", "zeros", "more queries"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_packed_sequences_with_options(options: tuple[str, ...], lengths: str, d: int, poisoned_memory: None) -> None:
    problem = Problem(
        options=options,
        lengths=PACKED[lengths],
        slack=9,
        d=d,
        dv=d,
        heads=4,
        kv_heads=2,
        causal=True,
        dtype=BF16,
        seed=d,
    )
    assert examine(problem, "hopper", "cuda") == []


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("poison", ["hidden-nan", "hidden-inf", "unseen-nan"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_packed_sequences_do_not_see_what_others_hold(poison: str, d: int) -> None:
    problem = Problem(
        lengths=PACKED["uneven"],
        slack=20,
        d=d,
        dv=d,
        heads=2,
        kv_heads=1,
        causal=True,
        dtype=BF16,
        poison=poison,
        seed=d,
    )
    assert examine(problem, "hopper", "cuda") == []


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("layout", ["heads_first", "gapped", "misaligned", "last", "packed"])
def test_packed_sequences_in_any_strides(layout: str) -> None:
    problem = Problem(
        lengths=PACKED["uneven"], slack=20, d=64, dv=64, heads=4, kv_heads=2, causal=True, dtype=BF16, layout=layout,
        gradient_layout="heads_first",
    )  # fmt: skip
    assert examine(problem, "hopper", "cuda") == []


@pytest.mark.gpu
@needs_hopper
def test_80000_packed_sequences() -> None:
    count, length, heads = 80_000, 16, 2
    leaves = [normal(count * length, heads, 64).requires_grad_() for _ in range(3)]
    cu = torch.arange(count + 1, device="cuda", dtype=torch.int32) * length
    out = tileflash.attention_varlen(*leaves, cu, cu, causal=True, backend="hopper")
    d_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, d_out)
    batched = [t.detach().unflatten(0, (count, length)).requires_grad_() for t in leaves]
    expected = tileflash.attention(*batched, causal=True, backend="triton")
    torch.testing.assert_close(out, expected.flatten(0, 1), rtol=2e-2, atol=2e-2)
    for mine, theirs in zip(grads, torch.autograd.grad(expected, batched, d_out.view_as(expected)), strict=True):
        torch.testing.assert_close(mine, theirs.flatten(0, 1), rtol=5e-2, atol=5e-2)


@pytest.mark.gpu
@needs_hopper
def test_packed_sequences_of_other_lengths_need_no_preparation_and_replay_in_a_graph() -> None:
    """The host never looks into cu_seqlens: a captured graph goes by what it holds when it is replayed."""
    q, k, v = (normal(1024, 4, 128) for _ in range(3))
    cu = torch.tensor([0, 100, 600, 1024], device="cuda", dtype=torch.int32)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            tileflash.attention_varlen(q, k, v, cu, cu, causal=True, backend="hopper")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tileflash.attention_varlen(q, k, v, cu, cu, causal=True, backend="hopper")
    for bounds in ([0, 100, 600, 1024], [0, 0, 1, 900], [0, 512, 512, 1024]):
        cu.copy_(torch.tensor(bounds, dtype=torch.int32))
        graph.replay()
        expected = tileflash.attention_varlen(q, k, v, cu, cu, causal=True, backend="triton")
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("softcap", [1e-3, 5.0, 50.0, 1e6])
def test_soft_caps_small_and_large(softcap: float) -> None:
    """A large cap multiplies what is lost of tanh near 0; a small one puts nearly all logits where its derivative vanishes."""
    q, k, v = (normal(1, 300, 2, 128).requires_grad_() for _ in range(3))
    for backend in ("hopper", "triton"):
        out, lse = tileflash.attention(q, k, v, causal=True, softcap=softcap, return_lse=True, backend=backend)
        grads = torch.autograd.grad(out.float().square().sum() + lse.sum(), (q, k, v))
        if backend == "hopper":
            ours = (out, lse, *grads)
    for mine, theirs in zip(ours, (out, lse, *grads), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("sink", [-500.0, 0.0, 500.0])
def test_sinks_far_from_the_logits(sink: float) -> None:
    q, k, v = (normal(1, 200, 2, 64).requires_grad_() for _ in range(3))
    sinks = torch.full((2,), sink, device="cuda", requires_grad=True)
    runs = []
    for backend in ("hopper", "triton"):
        out, lse = tileflash.attention(q, k, v, causal=True, sinks=sinks, return_lse=True, backend=backend)
        runs.append((out, lse, *torch.autograd.grad(out.float().square().sum() + lse.sum(), (q, k, v, sinks))))
    for mine, theirs in zip(*runs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("d", [64, 128, 256])
def test_what_is_hidden_may_be_anything_with_deterministic_gradients(d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    problem = Problem(
        sq=300, sk=330, d=d, dv=d, heads=2, kv_heads=1, batch=2, causal=True, dtype=BF16, poison="hidden-nan", seed=d
    )
    assert examine(problem, "hopper", "cuda") == []


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("shape", [(0, 5, 5, 2), (2, 0, 5, 2), (2, 5, 0, 2), (2, 0, 0, 2), (2, 5, 5, 0)], ids=str)
def test_zero_sizes(shape: tuple[int, int, int, int], poisoned_memory: None) -> None:
    batch, sq, sk, heads = shape
    q = normal(batch, sq, heads, 64).requires_grad_()
    k, v = (normal(batch, sk, max(1, heads), 64).requires_grad_() for _ in range(2))
    out, lse = tileflash.attention(q, k, v, return_lse=True, causal=True, backend="hopper")
    assert (out.shape, lse.shape) == ((batch, sq, heads, 64), (batch, heads, sq))
    assert torch.equal(out, torch.zeros_like(out))
    for grad, tensor in zip(torch.autograd.grad(out.float().sum(), (q, k, v)), (q, k, v), strict=True):
        assert torch.equal(grad, torch.zeros_like(tensor))
