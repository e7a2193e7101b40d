"""Peers beside PyTorch: each is called as its package wants it, and one that is not here says what was looked for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tileflash.bench.attention_peers import LOADERS
from tileflash.bench.attention_variants import attempt, attention_variant
from tileflash.bench.flags import FAILED, UNSUPPORTED


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=causal).transpose(1, 2)


def leaves() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 20, 3, 16, generator=generator).requires_grad_() for _ in range(3)]


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface", "flash_attn_3", "flash_attn_3._C"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("name", LOADERS.keys() - {"flex"})
@pytest.mark.usefixtures("without_packages")
def test_a_peer_that_is_not_here_is_a_reason(name: str) -> None:
    trial = attempt(lambda: (attention_variant(name)(*leaves(), True),))
    assert trial.flag == UNSUPPORTED
    assert "is not here" in trial.reason
    assert "flash" in trial.reason


@pytest.mark.usefixtures("without_packages")
def test_a_library_that_is_no_file_is_named(tmp_path: Path) -> None:
    library = tmp_path / "fa3.so"
    reason = attempt(lambda: (attention_variant("fa3", library)(*leaves(), True),)).reason
    assert f"`--fa3-library` was {str(library)!r}, which is no file" in reason


@pytest.mark.usefixtures("operators")
def test_operators_from_a_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = tmp_path / "fa3.so"
    library.touch()
    loaded: list[str] = []
    monkeypatch.setitem(sys.modules, "flash_attn_3", None)
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    assert attention_variant("fa3", library)(*leaves(), True).shape == (2, 20, 3, 16)
    assert loaded == [str(library)]


@pytest.mark.parametrize(("name", "module", "with_lse"), [
    ("fa4", "flash_attn.cute.interface", True), ("fa4", "flash_attn.cute.interface", False), ("flash-attn", "flash_attn", False),
])  # fmt: skip
@pytest.mark.parametrize("causal", [False, True])
def test_functions_of_packages(
    name: str, module: str, with_lse: bool, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flash_attn_func(q: Any, k: Any, v: Any, causal: bool) -> Any:
        out = exact(q, k, v, causal)
        return (out, None) if with_lse else out

    path = module.split(".")
    for depth in range(1, len(path) + 1):
        monkeypatch.setitem(sys.modules, ".".join(path[:depth]), ModuleType(".".join(path[:depth])))
    sys.modules[module].flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    q, k, v = leaves()
    assert torch.equal(attention_variant(name)(q, k, v, causal), exact(q, k, v, causal))


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.ops.flash_attn_3 on the CPU, with the parameters that the true ones have."""
    library = torch.library.Library("flash_attn_3", "DEF")
    library.define(
        "fwd(Tensor q, Tensor k, Tensor v, *, int? max_seqlen_q, float softmax_scale, bool is_causal, int num_splits) -> Tensor[]"
    )
    library.define(
        "bwd(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor(a!) d_q, Tensor(b!) d_k, Tensor(c!) d_v, "
        "*, float softmax_scale, bool is_causal) -> ()"
    )

    def forward(q: Any, k: Any, v: Any, **options: Any) -> list[torch.Tensor]:
        assert options == {
            "max_seqlen_q": None, "softmax_scale": 0.25, "is_causal": options["is_causal"], "num_splits": 1
        }  # fmt: skip
        return [exact(q, k, v, options["is_causal"]), torch.zeros(1)]

    def backward(
        d_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, d_q: Any, d_k: Any, d_v: Any, **options: Any
    ) -> None:
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in (q, k, v)]
            result = exact(*inputs, options["is_causal"])
        for into, gradient in zip((d_q, d_k, d_v), torch.autograd.grad(result, inputs, d_out), strict=True):
            into.copy_(gradient)

    library.impl("fwd", forward, "CPU")
    library.impl("bwd", backward, "CPU")
    package = ModuleType("flash_attn_3")
    monkeypatch.setitem(sys.modules, "flash_attn_3", package)
    monkeypatch.setitem(sys.modules, "flash_attn_3._C", ModuleType("flash_attn_3._C"))
    yield
    library._destroy()


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_3_forward_and_backward(causal: bool) -> None:
    ours, theirs = leaves(), leaves()
    d_out = torch.randn(2, 20, 3, 16)
    out = attention_variant("fa3")(ours[0], ours[1], ours[2], causal)
    expected = exact(theirs[0], theirs[1], theirs[2], causal)
    assert torch.equal(out, expected)
    for a, b in zip(torch.autograd.grad(out, ours, d_out), torch.autograd.grad(expected, theirs, d_out), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled, which takes a compiler less and gives the same."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: made.append(options) or function)
    flex = attention_variant("flex")
    for _ in range(2):
        q, k, v = (leaf.detach() for leaf in leaves())  # on a CPU it has no backward pass
        torch.testing.assert_close(flex(q, k, v, causal), exact(q, k, v, causal))
    ours = [options for options in made if "dynamic" in options]  # uncompiled, it compiles a part by itself
    assert ours == [{"dynamic": False, "fullgraph": True}]  # once, and never in pieces


def test_flex_attention_that_is_no_longer_compiled_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo's silent fallback, made loud: what runs inside sees the setting that turns it into an error."""
    from torch._dynamo import config

    def compiled(*_: Any, **__: Any) -> torch.Tensor:
        assert config.fail_on_recompile_limit_hit
        raise RuntimeError("Hard failure due to recompile_limit")

    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled)
    trial = attempt(lambda: (attention_variant("flex")(*leaves(), True),))
    assert (trial.flag, trial.reason) == (FAILED, "Hard failure due to recompile_limit")
    assert not config.fail_on_recompile_limit_hit


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_flex_attention_compiled_on_a_gpu(causal: bool) -> None:
    for length in (128, 256, 384, 512, 640, 768, 896, 1024, 1152):  # more shapes than Dynamo recompiles for by default
        results = []
        for name in ("flex", "math"):
            generator = torch.Generator("cuda").manual_seed(0)
            q, k, v, d_out = (
                torch.randn(1, length, 2, 64, device="cuda", dtype=torch.bfloat16, generator=generator)
                for _ in range(4)
            )
            inputs = [t.requires_grad_() for t in (q, k, v)]
            out = attention_variant(name)(q, k, v, causal)
            results.append([out, *torch.autograd.grad(out, inputs, d_out)])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, atol=3e-2, rtol=3e-2)
