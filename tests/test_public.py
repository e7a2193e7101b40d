"""`import tileflash` loads nothing heavy, and `tileflash.attention` is the function however and whenever it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tileflash


def _run(program: str) -> str:
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_neither_the_import_nor_the_command_loads_pytorch() -> None:
    program = (
        "import sys, tileflash, tileflash.cli; print([m for m in ('torch', 'triton', 'numpy') if m in sys.modules])"
    )
    assert _run(program) == "[]"


@pytest.mark.parametrize(
    "first",
    [
        "import tileflash.attention.band",  # sets the attribute to the package, were it let
        "from tileflash import attention; assert callable(attention)",
    ],
)
def test_attention_is_the_function(first: str) -> None:
    assert _run(f"{first}; import tileflash as tf; print(tf.attention.__module__, tf.attention.__qualname__)") == (
        "tileflash.attention.api attention"
    )


def test_the_first_use_may_be_inside_torch_compile() -> None:
    program = (
        "import torch, tileflash\n"
        "f = torch.compile(lambda q: tileflash.attention(q, q, q, backend='tiled'), fullgraph=True, backend='eager')\n"
        "q = torch.randn(1, 5, 1, 4)\n"
        "print(torch.equal(f(q), tileflash.attention(q, q, q, backend='tiled')))"
    )
    assert _run(program) == "True"


def test_other_names_are_an_attribute_error_and_dir_has_the_public_ones() -> None:
    with pytest.raises(AttributeError, match="module 'tileflash' has no attribute 'attentoin'"):
        tileflash.attentoin  # noqa: B018
    assert set(tileflash.__all__) <= set(dir(tileflash))
