"""GPUs are recognised by whole words of the name that the driver gives them."""

from __future__ import annotations

import pytest

from tileflash.gpu_peaks import find_gpu


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", None),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", None),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", None),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("CPU AMD EPYC", None),
        ("", None),
        (None, None),
    ],
)
def test_gpu_names(name: str | None, found: str | None) -> None:
    gpu = find_gpu(name)
    assert (None if gpu is None else gpu.name) == found
