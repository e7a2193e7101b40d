"""Wrong arguments: a ValueError that names the argument, what it was and what it must be."""

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
