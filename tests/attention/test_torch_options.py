"""PyTorch's machinery with options and packed sequences: compile, export, opcheck, autocast, checkpoint, transforms, CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import tileflash
from tileflash.attention import ops
from tileflash.attention.dispatch import NoBackendError
from tileflash.kernels.options import Options

BACKENDS = ["triton", "tiled"]
OPTIONS = ("bias", "alibi_slopes", "sinks")


def leaves(device: str, length: int = 20, heads: int = 2, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """q, k, v [1, S, H, 16] and every differentiable option."""
    generator = torch.Generator().manual_seed(length)
    shapes = {"q": (1, length, heads, 16), "k": (1, length, heads, 16), "v": (1, length, heads, 16)}
    shapes |= {"bias": (1, heads, length, length), "alibi_slopes": (heads,), "sinks": (heads,)}  # type: ignore[dict-item]
    return {n: torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for n, s in shapes.items()}


def arguments(device: str) -> dict[str, Any]:
    """Options that are not differentiable."""
    return {"causal": True, "softcap": 3.0, "dropout_p": 0.25, "dropout_seed": torch.tensor([5, 6], device=device)}


def packed(device: str, lengths: tuple[int, ...] = (9, 11)) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {name: t for name, t in leaves(device, sum(lengths)).items() if name != "bias"}
    tensors |= {name: tensors[name].detach()[0].requires_grad_() for name in "qkv"}
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)
    return tensors, {"cu_seqlens_q": cu, "cu_seqlens_k": cu, **arguments(device)}


def assert_same(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["padded", "packed"])
def test_compile_with_options_without_graph_breaks(how: str, backend: str, device: str) -> None:
    torch._dynamo.reset()
    tensors, options = packed(device) if how == "packed" else (leaves(device), arguments(device))
    function = tileflash.attention_varlen if how == "packed" else tileflash.attention

    def loss(tensors: dict[str, Tensor]) -> Tensor:
        out, lse = function(**tensors, **options, return_lse=True, backend=backend)
        return out.square().sum() + lse.sin().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    eager, traced = loss(tensors), compiled(tensors)
    torch.testing.assert_close(traced, eager)
    inputs = list(tensors.values())
    assert_same(torch.autograd.grad(traced, inputs), torch.autograd.grad(eager, inputs))


@pytest.mark.parametrize("backend", BACKENDS)
def test_new_lengths_do_not_recompile(backend: str, device: str) -> None:
    """pytorch#134560, #136196, #141486."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def attend(tensors: dict[str, Tensor], **options: Any) -> Tensor:
        return tileflash.attention(**tensors, **options, backend=backend)

    counts = []
    for length in (18, 33, 36):
        tensors = leaves(device, length)
        out = attend(tensors, **arguments(device))
        assert_same([out], [tileflash.attention(**tensors, **arguments(device), backend="tiled")])
        out.sum().backward()
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_new_packings_do_not_recompile(backend: str, device: str) -> None:
    """Automodel#3733: FA4 recompiled with every call. cu_seqlens is data: other lengths, other totals, one graph."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def attend(tensors: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
        return tileflash.attention_varlen(**tensors, **options, backend=backend)

    counts = []
    for lengths in ((9, 11), (3, 17), (20, 15), (4, 3, 30)):
        tensors, options = packed(device, lengths)
        out = attend(tensors, options)
        assert_same([out], [tileflash.attention_varlen(**tensors, **options, backend="tiled")])
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1


class Block(torch.nn.Module):
    def __init__(self, backend: str, packed: bool) -> None:
        super().__init__()
        self.backend, self.packed = backend, packed
        self.sinks = torch.nn.Parameter(torch.tensor([0.5, -0.5]))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        options = {"causal": True, "sinks": self.sinks, "softcap": 2.0, "backend": self.backend}
        if self.packed:
            return tileflash.attention_varlen(q, k, v, cu, cu, **options)
        return tileflash.attention(q, k, v, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_packed", [False, True])
def test_export(is_packed: bool, backend: str, device: str) -> None:
    """torch.export of a module that attends, run with another length than it was exported with."""
    block = Block(backend, is_packed).to(device)

    def inputs(length: int) -> tuple[Tensor, ...]:
        tensors = (leaves(device, length)[name].detach() for name in "qkv")
        cu = torch.tensor([0, length // 2, length], dtype=torch.int32, device=device)
        return (*(t[0] if is_packed else t for t in tensors), cu)

    length = torch.export.Dim("length", min=2, max=4096)
    dynamic = {0: length} if is_packed else {1: length}
    program = torch.export.export(block, inputs(20), dynamic_shapes=(dynamic, dynamic, dynamic, None))
    for size in (20, 27):
        assert_same([program.module()(*inputs(size))], [block(*inputs(size))])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["padded", "packed", "mask"])
def test_opcheck_with_options(how: str, backend: str, device: str) -> None:
    tensors = leaves(device, 18, heads=1)
    q, k, v = (tensors[name] for name in "qkv")
    options = Options(
        bias=tensors["bias"], alibi_slopes=tensors["alibi_slopes"], sinks=tensors["sinks"],
        rng=torch.tensor([5, 6], device=device), softcap=3.0, dropout_p=0.25, bias_gradient=True,
    )  # fmt: skip
    if how == "packed":
        cu = torch.tensor([0, 7, 18], dtype=torch.int32, device=device)
        options = options._replace(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=18, max_seqlen_k=18)
    if how == "mask":
        options = options._replace(bias=torch.ones(1, 1, 18, 18, device=device).tril().bool(), bias_gradient=False)
    torch.library.opcheck(ops.attention_forward, (q, k, v, 0.25, None, 0, backend, *options))
    out, lse = ops.attention_forward(q, k, v, 0.25, None, 0, backend, *options)
    saved = tuple(t.detach() for t in (out, lse, q, k, v, out, lse))
    given = tuple(value.detach() if isinstance(value, Tensor) else value for value in options)
    torch.library.opcheck(ops.attention_backward, (*saved, 0.25, None, 0, backend, *given))


def test_fake_tensors_with_options() -> None:
    with torch._subclasses.FakeTensorMode():
        tensors = {n: t.to(torch.bfloat16) for n, t in leaves("cpu", 40).items()}
        out, lse = tileflash.attention(**tensors, softcap=2.0, dropout_p=0.1, return_lse=True, backend="tiled")
        cu = torch.empty(3, dtype=torch.int32)
        three = (tensors[name][0] for name in "qkv")
        own, own_lse = tileflash.attention_varlen(*three, cu, cu, return_lse=True, validate=False, backend="tiled")
    assert (out.shape, out.dtype) == ((1, 40, 2, 16), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((1, 2, 40), torch.float32)
    assert (own.shape, own_lse.shape) == ((40, 2, 16), (2, 40))


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_with_options(backend: str, device: str) -> None:
    """q, k and v go to autocast's dtype; options stay as they are; gradients come back in the dtypes of the inputs."""
    tensors, options = packed(device)
    for given, function, more in (
        (leaves(device), tileflash.attention, arguments(device)),
        (tensors, tileflash.attention_varlen, options),
    ):
        with torch.autocast(device, dtype=torch.bfloat16):
            out = function(**given, **more, backend=backend)
        assert out.dtype == torch.bfloat16
        gradients = torch.autograd.grad(out.float().square().sum(), list(given.values()))
        assert all(grad.dtype == torch.float32 and bool(grad.isfinite().all()) for grad in gradients)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("seed", ["drawn", "given"])
def test_checkpointing_drops_the_same_again(seed: str, reentrant: bool, backend: str, device: str) -> None:
    """pytorch#190717, #149726, #198333: the recomputation must draw what the forward pass drew."""
    tensors = leaves(device)
    inputs = list(tensors.values())
    options = arguments(device)
    if seed == "drawn":
        options.pop("dropout_seed")

    def block(*given: Tensor) -> Tensor:
        named = dict(zip(tensors, given, strict=True))
        return tileflash.attention(**named, **options, backend=backend)

    torch.manual_seed(3)
    plain = block(*inputs)
    expected = torch.autograd.grad(plain.square().sum(), inputs)
    torch.manual_seed(3)
    again = checkpoint(block, *inputs, use_reentrant=reentrant)
    torch.rand(7, device=device)  # the generator moves on between the passes
    again.square().sum().backward()
    assert torch.equal(again, plain)
    for grad, tensor in zip(expected, inputs, strict=True):
        assert torch.equal(grad, tensor.grad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_function_transforms_with_options(backend: str, device: str) -> None:
    tensors = {name: t.detach() for name, t in leaves(device, 10).items()}
    inputs = tuple(tensors.values())

    def loss(name: str, *given: Tensor) -> Tensor:
        named = dict(zip(tensors, given, strict=True))
        return tileflash.attention(**named, **arguments(device), backend=name).square().sum()

    def gradients(name: str) -> tuple[Tensor, ...]:
        one = torch.func.grad(lambda *t: loss(name, *t), argnums=tuple(range(6)))(*inputs)
        many = torch.func.vmap(torch.func.grad(lambda t: loss(name, t, *inputs[1:])))
        return (*one, many(torch.stack([inputs[0], 2 * inputs[0]])))

    assert_same(gradients(backend), gradients("reference"), 1e-4)
    for which in (3, 4, 5):  # bias, slopes, sinks: never a derivative of 0 in silence

        def of_one(t: Tensor, at: int = which) -> Tensor:
            return loss(backend, *inputs[:at], t, *inputs[at + 1 :])

        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            torch.func.jvp(of_one, (inputs[which],), (inputs[which],))
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(inputs[which], inputs[which])
            with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
                of_one(dual)


def _double(length: int) -> dict[str, Tensor]:
    return {n: t.detach().double().requires_grad_() for n, t in leaves("cpu", length, heads=1).items()}


def test_second_derivatives_with_options() -> None:
    """flash-attention#699, pytorch#116350, #116348: `second_derivative` finds a backend that has them, and they are right."""
    tensors = _double(3)

    def attend(*given: Tensor) -> Tensor:
        named = dict(zip(tensors, given, strict=True))
        return tileflash.attention(**named, **arguments("cpu"), second_derivative=True, backend="reference")

    inputs = tuple(tensors.values())
    assert torch.autograd.gradcheck(attend, inputs, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(attend, inputs, fast_mode=True)


def test_second_derivatives_of_packed_sequences() -> None:
    q, k, v = (torch.randn(5, 1, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)

    def attend(*given: Tensor) -> Tensor:
        return tileflash.attention_varlen(*given, cu, cu, causal=True, second_derivative=True, backend="reference")

    assert torch.autograd.gradgradcheck(attend, (q, k, v), fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_second_derivatives_are_refused_where_there_are_none(backend: str, device: str) -> None:
    tensors = leaves(device, 8)
    with pytest.raises(NoBackendError, match=f"{backend}: has no second derivative"):
        tileflash.attention(**tensors, second_derivative=True, backend=backend)
    out = tileflash.attention(**tensors, **arguments(device), backend=backend)
    (grad,) = torch.autograd.grad(out.sin().sum(), tensors["q"], create_graph=True)
    for target in tensors.values():
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(grad.sum(), target, retain_graph=True, allow_unused=True)
    # Whoever asks "auto" for them gets the reference, which has them.
    assert tileflash.explain(**tensors, second_derivative=True).choice == "reference"
    twice = tileflash.attention(**tensors, **arguments(device), second_derivative=True)
    (grad,) = torch.autograd.grad(twice.sin().sum(), tensors["q"], create_graph=True)
    torch.autograd.grad(grad.sum(), list(tensors.values()), allow_unused=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["padded", "packed"])
def test_deterministic_means_the_same_bits(how: str, backend: str, device: str) -> None:
    """flash-attention#414, #429, #746, #1596: every gradient, those of options too."""
    tensors, options = packed(device, (15, 20)) if how == "packed" else (leaves(device, 35), arguments(device))
    function = tileflash.attention_varlen if how == "packed" else tileflash.attention
    runs = []
    for _ in range(3 if device == "cuda" else 2):
        out = function(**tensors, **options, deterministic=True, backend=backend)
        runs.append((out, *torch.autograd.grad(out.square().sum(), list(tensors.values()))))
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_flops_are_counted_with_options(backend: str, device: str) -> None:
    """Over the pairs that the band lets through: what other masks hide depends on data that are not looked at."""
    tensors = leaves(device, 20)
    with FlopCounterMode(display=False) as counter:
        tileflash.attention(**tensors, **arguments(device), backend=backend).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    assert counts[torch.ops.tileflash.attention_forward] == 2 * 2 * (20 * 21 // 2) * 32
    assert counts[torch.ops.tileflash.attention_backward] == 2 * 2 * (20 * 21 // 2) * 80


def _capture(step: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return graph, captured


@pytest.mark.gpu
@pytest.mark.parametrize("seed", ["drawn", "given"])
def test_a_replay_drops_anew(seed: str) -> None:
    """A captured draw gives a new seed with each replay; a seed tensor is the caller's, changed in place between replays."""
    q = torch.zeros(1, 64, 1, 64, device="cuda", dtype=torch.bfloat16)
    v = torch.eye(64, device="cuda", dtype=torch.bfloat16)[None, :, None].contiguous().requires_grad_()
    rng = torch.tensor([1, 2], device="cuda") if seed == "given" else None

    def step() -> tuple[Tensor, Tensor]:
        out = tileflash.attention(q, q, v, dropout_p=0.5, dropout_seed=rng, backend="triton")
        return out, torch.autograd.grad(out, v, torch.ones_like(out))[0]

    graph, (out, d_v) = _capture(step)
    seen = []
    for number in range(3):
        if rng is not None:
            rng.copy_(torch.tensor([number, 7]))
        graph.replay()
        torch.cuda.synchronize()
        keep = out[0, :, 0] != 0
        seen.append(keep.clone())
        # The backward pass drops what the forward pass dropped: a column's gradient counts what was kept of it.
        torch.testing.assert_close(d_v[0, :, 0, 0].float(), keep.sum(0) / 32, rtol=2e-2, atol=1e-2)
        if rng is not None:
            assert torch.equal(out, step()[0])
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


@pytest.mark.gpu
def test_a_replay_takes_other_cu_seqlens() -> None:
    """torchtitan#3893, #4158, diffusers#11957: nothing of the lengths is on the host. Empty sequences and slack among them."""
    q, k, v = (torch.randn(600, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    cu = torch.tensor([0, 200, 400, 600], dtype=torch.int32, device="cuda")

    def step() -> tuple[Tensor, ...]:
        out = tileflash.attention_varlen(q, k, v, cu, cu, causal=True, backend="triton")
        return (out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))

    graph, captured = _capture(step)
    for ends in ([0, 1, 2, 600], [0, 0, 333, 333], [0, 600, 600, 600], [0, 129, 300, 555]):
        cu.copy_(torch.tensor(ends))
        with torch.no_grad():
            q.normal_()
        graph.replay()
        torch.cuda.synchronize()
        for ours, theirs in zip(captured, step(), strict=True):
            assert torch.equal(ours, theirs)
        want = tileflash.attention_varlen(q, k, v, cu, cu, causal=True, backend="reference")
        torch.testing.assert_close(captured[0], want, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_inductor_with_new_lengths_and_packings() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def attend(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        return tileflash.attention(q * 2, k, v, causal=True, alibi_slopes=slopes, backend="triton").square().sum()

    slopes = torch.rand(4, device="cuda", requires_grad=True)
    counts = []
    for length in (100, 333, 512):
        inputs = [torch.randn(2, length, 4, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
        loss = attend(*inputs, slopes)
        want = tileflash.attention(inputs[0] * 2, *inputs[1:], causal=True, alibi_slopes=slopes, backend="triton")
        torch.testing.assert_close(loss, want.square().sum(), rtol=2e-2, atol=0)
        ours, theirs = (torch.autograd.grad(x, [*inputs, slopes]) for x in (loss, want.square().sum()))
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-2 * float(other.abs().max()))
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1
