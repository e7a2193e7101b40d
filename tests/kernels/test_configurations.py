"""Which tiles a GPU gets, and how they multiply."""

from typing import Any

import pytest
import torch

import tileflash
from tileflash.kernels.options import Options
from tileflash.kernels.triton import attention as launches
from tileflash.kernels.triton.configurations import HOPPER, PORTABLE, select_tile
from tileflash.kernels.triton.sizes import Sizes, tile_capability


def test_an_amd_gpu_never_gets_the_tiles_of_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch says 9.0 of gfx90a (MI200), whose shared memory is less than a third of Hopper's."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "hip", None)
    hopper = select_tile("forward", 128, torch.bfloat16, tile_capability(device), banded=False)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    amd = select_tile("forward", 128, torch.bfloat16, tile_capability(device), banded=False)
    assert (hopper, amd) == (HOPPER["forward", 128][0], PORTABLE["forward", 128])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}], ids=["plain", "options"])
@pytest.mark.parametrize("allow_tf32", [False, True])
def test_fp32_is_multiplied_as_tf32_only_where_asked(
    allow_tf32: bool, options: dict[str, float], dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What every launch of a forward and backward pass is told. `upcast` is the interpreter's way to multiply 16-bit numbers."""
    told = set()
    flags = Sizes.flags

    def spy(sizes: Sizes) -> tuple[Any, ...]:
        told.add(flags(sizes)[-2])
        return flags(sizes)

    monkeypatch.setattr(Sizes, "flags", spy)
    monkeypatch.setattr(launches, "_forward_launches", {})
    monkeypatch.setattr(launches, "_backward_launches", {})
    q = torch.randn(1, 17, 1, 16, device=device, dtype=dtype, requires_grad=True)
    bias = torch.zeros(17, 17, device=device, requires_grad=True)
    given = {"bias": bias, **options} if options else {}
    out = tileflash.attention(q, q, q, allow_tf32=allow_tf32, backend="triton", **given)
    torch.autograd.grad(out.float().sum(), (q, bias) if options else q)
    if dtype == torch.float32:
        assert told == ({"tf32"} if allow_tf32 else {"ieee"})
    else:
        assert told == ({"ieee"} if device == "cuda" else {"upcast"})


def test_wide_heads_with_options_stay_in_fp32(device: str) -> None:
    """There are no tiles for their TF32 products; a permission is not an order."""
    for head_dim, options, precision in ((512, 2, "ieee"), (64, 2, "tf32"), (512, 0, "tf32")):
        q = torch.empty(1, 5, 1, head_dim, device=device)
        sizes = Sizes.of(q, q, q, None, None, options, Options(softcap=1.0, allow_tf32=True))
        assert sizes.flags()[-2] == precision
