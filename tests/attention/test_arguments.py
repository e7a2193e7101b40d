"""Wrong arguments: a ValueError that names the argument, what it was and what it must be."""

import math
from typing import Any

import pytest
import torch

import tileflash
from tileflash.attention.dispatch import BACKENDS


def tensors(**changes: Any) -> dict[str, Any]:
    made = {"q": torch.randn(2, 5, 4, 8), "k": torch.randn(2, 6, 2, 8), "v": torch.randn(2, 6, 2, 8)}
    return made | changes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"q": [1.0]}, "q must be a torch.Tensor, got list"),
        ({"k": torch.randn(6, 2, 8)}, r"k must be \[batch, sequence, heads, head dimension\], got shape \[6, 2, 8\]"),
        ({"q": torch.ones(2, 5, 4, 8, dtype=torch.int64)}, "q must be float16, .* got torch.int64"),
        ({"v": torch.randn(2, 6, 2, 8).half()}, "v must have q's dtype torch.float32, got torch.float16"),
        ({"k": torch.randn(2, 6, 2, 8, device="meta")}, "k must be on q's device cpu, got meta"),
        ({"k": torch.randn(3, 6, 2, 8)}, "k must have q's batch size 2, got 3"),
        ({"k": torch.randn(2, 6, 2, 9)}, "k must have q's head dimension 8, got 9"),
        ({"v": torch.randn(2, 7, 2, 8)}, r"v must have k's sequence length and heads \[6, 2\], got \[7, 2\]"),
        (
            {"k": torch.randn(2, 6, 3, 8), "v": torch.randn(2, 6, 3, 8)},
            "q's heads must be a multiple of k's heads, got 4 and 3",
        ),
        (
            {"k": torch.randn(2, 6, 0, 8), "v": torch.randn(2, 6, 0, 8)},
            "q's heads must be a multiple of k's heads, got 4 and 0",
        ),
        ({"v": torch.randn(2, 6, 2, 0)}, "head dimension of at least 1"),
        ({"causal": "left"}, "causal must be False, True .* got 'left'"),
        ({"causal": 1}, "causal must be False, True .* got 1"),
        ({"causal": torch.ones(2, 2)}, "causal must be False, True"),
        ({"scale": float("nan")}, "scale must be a finite number .* got nan"),
        ({"scale": float("inf")}, "scale must be a finite number .* got inf"),
        ({"scale": "big"}, "scale must be a finite number .* got 'big'"),
        ({"window": (-1, 0)}, "window's left bound must be None .* got -1"),
        ({"window": (0, 1.5)}, "window's right bound must be None .* got 1.5"),
        ({"window": 3}, r"window must be a pair \(left, right\), got 3"),
        ({"window": [1, 2]}, r"window must be a pair \(left, right\), got \[1, 2\]"),
        ({"scale": 2**2000}, "scale must be a finite number"),
        ({"q": torch.randn(2, 5, 4, 8).to_sparse()}, "q must be a dense tensor, got layout torch.sparse_coo"),
        ({"backend": ["tiled"]}, r"backend must be one of auto, sdpa, .* got \['tiled'\]"),
        ({"backend": "fast"}, "backend must be one of auto, sdpa, .* got 'fast'"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], said: str) -> None:
    for function in (tileflash.attention, tileflash.explain):
        for _ in range(2):  # also when the same call was seen before
            with pytest.raises(ValueError, match=said):
                function(**tensors(**changes))


OPTIONS_ALL_WRONG = [
    ({"scale": 1e39}, "scale must be a finite number of float32 or None .* got 1e[+]39"),
    ({"softcap": 1e39}, "softcap must be 0 or from 1.18e-38 to 3.4e[+]38, got 1e[+]39"),
    ({"softcap": 1e-46}, "softcap must be 0 or from .* got 1e-46"),
    ({"softcap": math.inf}, "softcap must be a finite number >= 0 .* got inf"),
    ({"dropout_p": 0.1, "generator": 3}, "generator must be a torch.Generator, got int"),
    (
        {"dropout_p": 0.1, "dropout_seed": 1, "generator": torch.Generator()},
        "dropout_seed and generator are both given",
    ),
    ({"bias": torch.ones(5, 6).to_sparse()}, "bias must be a dense tensor, got layout torch.sparse_coo"),
    ({"alibi_slopes": torch.ones(4).to_sparse()}, "alibi_slopes must be a dense tensor"),
    ({"sinks": torch.ones(4).to_sparse()}, "sinks must be a dense tensor"),
    ({"prefix_lengths": torch.ones(2).int().to_sparse()}, "prefix_lengths must be a dense tensor"),
    (
        {"document_ids": (torch.ones(2, 5).int().to_sparse(), torch.ones(2, 6).int())},
        "document_ids of the queries must be a dense",
    ),
]


@pytest.mark.parametrize(("changes", "said"), OPTIONS_ALL_WRONG)
def test_wrong_options_are_named(changes: dict[str, Any], said: str) -> None:
    """What PyTorch would complain of in its own words, or fp32 turn into NaN in silence."""
    functions = [tileflash.attention]
    if "generator" not in changes or "dropout_seed" in changes:  # explain never draws
        functions.append(tileflash.explain)
    for function in functions:
        with pytest.raises(ValueError, match=said):
            function(**tensors(**changes))


def test_a_generator_of_another_device_is_named() -> None:
    on_meta = {name: t.to("meta") for name, t in tensors().items()}
    with pytest.raises(ValueError, match="generator must be on q's device meta, got cpu"):
        tileflash.attention(**on_meta, dropout_p=0.1, generator=torch.Generator(), backend="reference")


@pytest.mark.parametrize("backend", ["triton", "tiled", "reference"])
@pytest.mark.parametrize("scale", [1e-39, -1e-39, 1e-300])
def test_a_scale_that_fp32_does_not_hold_is_0(scale: float, backend: str) -> None:
    """The kernels took it for positive, multiplied -inf by it, and gave NaN."""
    q, k, v = (torch.randn(1, 9, 2, 8) for _ in range(3))
    out = tileflash.attention(q, k, v, causal=True, scale=scale, backend=backend)
    weights = torch.ones(9, 9, dtype=torch.float64).tril()
    want = torch.einsum("ij,bjhd->bihd", weights / weights.sum(1, keepdim=True), v.double())
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["triton", "tiled", "reference"])
def test_numbers_of_64_bits_keep_their_upper_half(backend: str) -> None:
    """Document ids that are hashes, and lengths that a 32-bit number does not hold, lost their upper bits."""
    q, k, v = (torch.randn(1, 9, 2, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))

    def formula(visible: torch.Tensor) -> torch.Tensor:
        logits = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * 8**-0.5
        return torch.einsum("bhij,bjhd->bihd", torch.softmax(logits.masked_fill(~visible, -torch.inf), 3), v.double())

    def same(out: torch.Tensor, visible: torch.Tensor) -> None:
        torch.testing.assert_close(out.double(), formula(visible), rtol=1e-5, atol=1e-5)

    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    for other in (2**32, -(2**32), 2**40, 2**31):
        ids = torch.tensor([[0] * 4 + [other] * 5])
        same(tileflash.attention(q, k, v, document_ids=ids, backend=backend), ids[0][:, None] == ids[0])
        narrow = ids.clamp(-(2**31), 2**31 - 1).int()
        out = tileflash.attention(q[:, :4], k, v, document_ids=(ids[:, :4], narrow), backend=backend)
        visible = (narrow[0] == 0).expand(4, 9)
        logits = torch.einsum("bihd,bjhd->bhij", q[:, :4].double(), k.double()) * 8**-0.5
        weights = torch.softmax(logits.masked_fill(~visible, -torch.inf), 3)
        torch.testing.assert_close(
            out.double(), torch.einsum("bhij,bjhd->bihd", weights, v.double()), rtol=1e-5, atol=1e-5
        )
    for length, seen in ((2**32, 9), (2**31, 9), (2**32 + 2, 9), (-(2**32) + 5, 0), (-(2**31) - 1, 0), (3, 3)):
        lengths = torch.tensor([length])
        visible = causal | (torch.arange(9) < seen)
        same(tileflash.attention(q, k, v, causal=True, prefix_lengths=lengths, backend=backend), visible)


def test_explain_takes_what_attention_takes_and_nothing_else() -> None:
    for name in ("foo", "top_left", "cu_seqlens", "max_seqlens"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            tileflash.explain(**tensors(), **{name: 3})


def test_explain_of_packed_sequences() -> None:
    q, k = torch.randn(10, 4, 8, requires_grad=True), torch.randn(12, 2, 8)
    cu_q, cu_k = torch.tensor([0, 4, 10], dtype=torch.int32), torch.tensor([0, 5, 11], dtype=torch.int32)
    explanation = tileflash.explain(q, k, k, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True, sinks=torch.zeros(4))
    assert explanation.choice in ("triton", "tiled")
    assert {"packed sequences", "sinks"} <= explanation.problem.features
    assert "does not have packed sequences" in str(explanation)
    assert explanation.plan
    for changes, said in (
        ({"cu_seqlens_k": None}, "cu_seqlens_k must be an int32 tensor .* got None"),
        ({"cu_seqlens_q": torch.tensor([0, 4, 11])}, "cu_seqlens_q must end at or before the 10 rows"),
        ({"max_seqlen_k": 3}, "max_seqlen_k is 3, and a sequence has 6"),
        ({"q": q[None]}, r"q must be a tensor \[total, heads, head dimension\], got shape \[1, 10, 4, 8\]"),
    ):
        given = {"q": q, "k": k, "v": k, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k} | changes
        with pytest.raises(ValueError, match=said):
            tileflash.explain(**given)


def test_what_equals_a_right_argument_is_still_wrong_after_that_was_seen() -> None:
    """1 == True and True == 1.0, for a dictionary, too."""
    tileflash.attention(**tensors(), causal=True, scale=1.0)
    for wrong in ({"causal": 1, "scale": 1.0}, {"causal": True, "scale": True}):
        with pytest.raises(ValueError, match="must be"):
            tileflash.attention(**tensors(), **wrong)


def test_a_forced_backend_that_cannot_serve_names_every_reason() -> None:
    q = torch.randn(1, 4, 3, 600, dtype=torch.float64)
    with pytest.raises(ValueError, match="triton") as raised:
        tileflash.attention(q, q, q, scale=-1.0, backend="triton")
    message = str(raised.value)
    for part in ("head dimension at most 512, is 600", "float64", "scale -1", "q [1, 4, 3, 600]"):
        assert part in message


def test_the_family_name_names_the_reasons_of_all_members() -> None:
    q, k = torch.randn(1, 4, 2, 8), torch.randn(1, 6, 2, 8)
    with pytest.raises(ValueError, match=r"sdpa-cudnn: (.|\n)*sdpa-flash: (.|\n)*sdpa-cpu: (.|\n)*sdpa-math: "):
        tileflash.attention(q, k, k, causal=True, backend="sdpa")


def test_explain_says_what_runs_and_why_not_the_others() -> None:
    q, k = torch.randn(1, 4, 2, 8), torch.randn(1, 6, 2, 8)
    explanation = tileflash.explain(q, k, k, causal=True)
    text = str(explanation)
    assert explanation.choice in ("tiled", "triton")
    assert f"'auto' -> {explanation.choice}" in text
    assert "sdpa-cpu" in text
    assert "masks only causally and only with as many queries as keys" in text
    assert "reference" in text
    assert "FLOPs" in text
    assert explanation.problem.flops == 2 * 2 * (8 + 8) * (3 + 4 + 5 + 6)
    nobody = tileflash.explain(q.to("meta"), k.to("meta"), k.to("meta"), backend="sdpa")
    assert nobody.choice is None
    assert "none can serve" in str(nobody)


def test_what_was_seen_without_gradients_is_looked_at_again_with_them() -> None:
    """Otherwise a log-sum-exp that has no gradient would be served to one who differentiates it."""
    q = torch.randn(1, 7, 2, 8)
    tileflash.attention(q, q, q, return_lse=True, backend="sdpa-cpu")
    with pytest.raises(ValueError, match="the log-sum-exp it returns has no gradient"):
        tileflash.attention(q.requires_grad_(), q, q, return_lse=True, backend="sdpa-cpu")


@pytest.mark.parametrize("asked", ["deterministic", "second_derivative"])
def test_what_was_seen_is_looked_at_again_when_more_is_asked_for(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the second call would get a backend that does not have it, in silence."""
    monkeypatch.setattr(type(BACKENDS["sdpa-cpu"]), "deterministic", False)
    q = torch.randn(1, 7, 2, 20, requires_grad=True)
    tileflash.attention(q, q, q, backend="sdpa-cpu")
    with pytest.raises(ValueError, match=f"sdpa-cpu: .*{asked.replace('_', ' ')}"):
        tileflash.attention(q, q, q, backend="sdpa-cpu", **{asked: True})


def test_what_was_seen_is_looked_at_again_when_determinism_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 7, 2, 12, requires_grad=True)
    monkeypatch.setattr(type(BACKENDS["sdpa-cpu"]), "deterministic", False)
    tileflash.attention(q, q, q, backend="sdpa-cpu")
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ValueError, match="its backward is not deterministic"):
            tileflash.attention(q, q, q, backend="sdpa-cpu")
    finally:
        torch.use_deterministic_algorithms(False)
