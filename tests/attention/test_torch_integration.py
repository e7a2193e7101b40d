"""torch.compile, FakeTensor, opcheck, autocast, checkpointing, FLOP counting, CUDA graphs."""

import pytest
import torch
import torch._dynamo.testing
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import tileflash
from tileflash.attention import ops

BACKENDS = ["triton", "tiled"]


def leaves(device: str, length: int = 40, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(2, length, 2, 16, generator=generator).to(device, dtype).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("backend", ["auto", "triton", "tiled", "sdpa", "reference"])
def test_compile_without_graph_breaks(backend: str, device: str) -> None:
    torch._dynamo.reset()

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return tileflash.attention(q * 2, k, v, causal=True, backend=backend).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    inputs = leaves(device)
    eager, traced = loss(*inputs), compiled(*inputs)
    torch.testing.assert_close(traced, eager)
    for ours, theirs in zip(torch.autograd.grad(traced, inputs), torch.autograd.grad(eager, inputs), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_compile_with_dynamic_lengths_compiles_once(device: str) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return tileflash.attention(q, k, v, causal=True, backend="tiled")

    for length in (20, 33, 50):
        inputs = leaves(device, length)
        torch.testing.assert_close(attend(*inputs), tileflash.attention(*inputs, causal=True, backend="reference"))
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck(backend: str, device: str) -> None:
    q, k, v = leaves(device, 20)
    torch.library.opcheck(ops.attention_forward, (q, k, v, 0.25, None, 0, backend))
    out, lse = ops.attention_forward(q, k, v, 0.25, None, 0, backend)
    arguments = tuple(t.detach() for t in (out, lse, q, k, v, out, lse))
    torch.library.opcheck(ops.attention_backward, (*arguments, 0.25, None, 0, backend))


def test_fake_tensors_get_shapes_without_a_kernel() -> None:
    with torch._subclasses.FakeTensorMode():
        q = torch.empty(2, 100, 8, 64, dtype=torch.bfloat16)
        k = torch.empty(2, 300, 2, 64, dtype=torch.bfloat16)
        v = torch.empty(2, 300, 2, 32, dtype=torch.bfloat16)
        out, lse = tileflash.attention(q, k, v, return_lse=True, backend="tiled")
    assert out.shape == (2, 100, 8, 32)
    assert out.dtype == torch.bfloat16
    assert lse.shape == (2, 8, 100)
    assert lse.dtype == torch.float32


def test_autocast_casts_to_its_dtype(device: str) -> None:
    q, k, v = leaves(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = tileflash.attention(q, k, v, causal=True)
        double = tileflash.attention(*(t.double() for t in (q, k, v)), backend="reference")
    assert out.dtype == torch.bfloat16
    assert double.dtype == torch.float64
    grads = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert all(grad.dtype == torch.float32 for grad in grads)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(backend: str, reentrant: bool, device: str) -> None:
    inputs = leaves(device)

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return tileflash.attention(q, k, v, causal=True, backend=backend)

    plain = torch.autograd.grad(block(*inputs).square().sum(), inputs)
    for t in inputs:
        t.grad = None
    checkpoint(block, *inputs, use_reentrant=reentrant).square().sum().backward()
    for grad, t in zip(plain, inputs, strict=True):
        assert torch.equal(grad, t.grad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_flops_are_counted_over_visible_pairs(backend: str, device: str) -> None:
    q, k, v = leaves(device)
    with FlopCounterMode(display=False) as counter:
        tileflash.attention(q, k, v, causal=True, backend=backend).sum().backward()
    pairs = 40 * 41 // 2
    counts = counter.get_flop_counts()["Global"]
    assert counts[torch.ops.tileflash.attention_forward] == 2 * 4 * pairs * 32
    assert counts[torch.ops.tileflash.attention_backward] == 2 * 4 * pairs * 80


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_operator_and_the_short_way_past_it_agree(backend: str, device: str) -> None:
    inputs = leaves(device)
    direct = ops.attend_with_kernels(backend, *inputs, 0.25, None, 0)
    operator = ops.attention_forward(*inputs, 0.25, None, 0, backend)
    for ours, theirs in zip(direct, operator, strict=True):
        assert torch.equal(ours, theirs)
    loss = [out.sin().sum() + lse.cos().sum() for out, lse in (direct, operator)]
    for ours, theirs in zip(torch.autograd.grad(loss[0], inputs), torch.autograd.grad(loss[1], inputs), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_through_the_log_sum_exp_alone(backend: str, device: str) -> None:
    """flash-attention#1137: only FA4 and Flex have it."""
    inputs = leaves(device)
    _, lse = tileflash.attention(*inputs, return_lse=True, backend=backend)
    _, expected = tileflash.attention(*inputs, return_lse=True, backend="reference")
    ours = torch.autograd.grad(lse.square().sum(), inputs)
    theirs = torch.autograd.grad(expected.square().sum(), inputs[:2])
    for grad, want in zip(ours[:2], theirs, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-5)
    assert torch.equal(ours[2], torch.zeros_like(ours[2]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_function_transforms(backend: str, device: str) -> None:
    """torch.func: gradients, Jacobians and batches of them are the reference's."""
    q, k, v = (t.detach() for t in leaves(device, 10))

    def loss(name: str, *inputs: torch.Tensor) -> torch.Tensor:
        out, lse = tileflash.attention(*inputs, window=(3, 0), return_lse=True, backend=name)
        return out.square().sum() + lse.sin().sum()

    def gradients(name: str) -> tuple[torch.Tensor, ...]:
        batch = torch.stack([q, 2 * q])
        one = torch.func.grad(lambda *t: loss(name, *t), argnums=(0, 1, 2))
        many = torch.func.vmap(torch.func.grad(lambda t: loss(name, t, k, v)))
        rows = torch.func.jacrev(lambda t: tileflash.attention(t, k, v, backend=name).sum((1, 2, 3)))
        return (*one(q, k, v), many(batch), rows(q))

    for ours, theirs in zip(gradients(backend), gradients("reference"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.func.grad(lambda t: torch.func.grad(lambda u: loss(backend, u, k, v))(t).square().sum())(q)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_forward_mode_is_refused_and_never_zero(backend: str, which: int, device: str) -> None:
    """torch.library passes tangents by in silence, and jvp then gives 0."""
    inputs = [t.detach() for t in leaves(device, 10)]

    def attend(t: torch.Tensor) -> torch.Tensor:
        return tileflash.attention(*inputs[:which], t, *inputs[which + 1 :], backend=backend)

    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(attend, (inputs[which],), (inputs[which],))
    with torch.autograd.forward_ad.dual_level():
        attend(inputs[which])  # a level in which nothing is dual is no reason to refuse
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            attend(torch.autograd.forward_ad.make_dual(inputs[which], inputs[which]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["bias", "alibi_slopes", "sinks"])
def test_forward_mode_through_an_option_is_refused_too(backend: str, name: str, device: str) -> None:
    inputs = [t.detach() for t in leaves(device, 10)]
    heads = inputs[0].shape[2]
    option = torch.zeros((10, 10) if name == "bias" else (heads,), device=device)
    with torch.autograd.forward_ad.dual_level():
        tileflash.attention(*inputs, bias=torch.ones(10, 10, dtype=torch.bool, device=device), backend=backend)
        dual = torch.autograd.forward_ad.make_dual(option, torch.ones_like(option))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            tileflash.attention(*inputs, backend=backend, **{name: dual})


@pytest.mark.gpu
def test_cuda_graph_replays_with_new_data() -> None:
    static = [torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

    def step() -> tuple[torch.Tensor, ...]:
        out = tileflash.attention(*static, causal=True, backend="triton")
        return (out, *torch.autograd.grad(out, static, torch.ones_like(out)))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for tensor in static:
            tensor.normal_()
    graph.replay()
    torch.cuda.synchronize()
    for ours, theirs in zip(captured, step(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.gpu
def test_memory_grows_with_the_length_not_with_its_square() -> None:
    def peak(length: int) -> int:
        inputs = [
            torch.randn(1, length, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        ]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        tileflash.attention(*inputs, causal=True).sum().backward()
        return torch.cuda.max_memory_allocated() - before

    assert peak(16384) < 4.5 * peak(4096)
    assert peak(16384) < 16384 * 4 * 64 * 2 * 8  # eight tensors of the size of q: nothing like 16384 x 16384
