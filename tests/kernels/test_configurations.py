"""Which tiles a GPU gets."""

import pytest
import torch

from tileflash.kernels.triton.configurations import HOPPER, PORTABLE, select_tile
from tileflash.kernels.triton.sizes import tile_capability


def test_an_amd_gpu_never_gets_the_tiles_of_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch says 9.0 of gfx90a (MI200), whose shared memory is less than a third of Hopper's."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "hip", None)
    hopper = select_tile("forward", 128, torch.bfloat16, tile_capability(device), banded=False)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    amd = select_tile("forward", 128, torch.bfloat16, tile_capability(device), banded=False)
    assert (hopper, amd) == (HOPPER["forward", 128][0], PORTABLE["forward", 128])
