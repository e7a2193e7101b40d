"""The machine that a step is planned for: its peaks, the share of them that is reached, its memory and its links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tileflash.gpu_peaks import Gpu, find_gpu

# Shares of the published peaks and microseconds an operator, fitted to the ten steps with --flash of GPT-2 and LLaMA-3.2 1B on one H200 in
# benchmarks/results/train.jsonl, which they give within 5 %. Other GPUs are taken to reach the same shares; that was not measured.
PRODUCT_SHARE = 0.76
ATTENTION_SHARE = 0.55
MEMORY_SHARE = 0.55
OPERATOR_US = 3.5
# Steps of several ranks are not captured in CUDA graphs: the host launches every operator. An assumption, not measured.
EAGER_OPERATOR_US = 8.0
# Assumptions about messages, not measured.
LINK_SHARE = 0.8
MESSAGE_US = 15.0
CONTEXT_BYTES = 700 * 10**6  # of CUDA and NCCL, in no allocator
USABLE_SHARE = 0.97  # the allocator's cut pieces take the rest

# name of gpu_peaks -> (MiB that the driver shows, GB/s to another GPU of the host and direction: NVLink, or PCIe)
_MEMORY_AND_LINKS: Mapping[str, tuple[int, float]] = MappingProxyType(
    {
        "B200": (183359, 900.0),
        "H200 NVL": (143771, 450.0),
        "H200": (143771, 450.0),
        "H100 PCIe": (81559, 50.0),
        "H100 NVL": (95830, 300.0),
        "H100": (81559, 450.0),
        "A100": (81920, 300.0),
        "A10G": (23028, 25.0),
        "L4": (23034, 25.0),
        "RTX 4090": (24564, 25.0),
    }
)


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind, `gpus_per_host` on a host; `network_gb_per_s` a GPU between hosts."""

    gpu: Gpu
    memory_bytes: int
    link_gb_per_s: float
    gpus_per_host: int = 8
    network_gb_per_s: float = 50.0

    @property
    def usable_bytes(self) -> int:
        """What PyTorch may have in use."""
        return int((self.memory_bytes - CONTEXT_BYTES) * USABLE_SHARE)


def machine(
    name: str, memory_gib: float | None = None, gpus_per_host: int = 8, network_gb_per_s: float = 50.0
) -> Machine:
    """The machine of a GPU's name, such as h200 or a100; ValueError names those there are, and what else does not fit."""
    gpu = find_gpu(name.replace("-", " "))
    if gpu is None:
        known = ", ".join(name.lower().replace(" ", "-") for name in _MEMORY_AND_LINKS)
        raise ValueError(f"`--gpu` was {name!r}; it must be one of {known}")
    for option, value in (
        ("memory-gib", memory_gib),
        ("gpus-per-host", gpus_per_host),
        ("network-gb-per-s", network_gb_per_s),
    ):
        if value is not None and not value > 0:
            raise ValueError(f"`--{option}` was {value}; it must be above 0")
    mebibytes, link = _MEMORY_AND_LINKS[gpu.name]
    memory = mebibytes * 2**20 if memory_gib is None else int(memory_gib * 2**30)
    return Machine(gpu, memory, link, gpus_per_host, network_gb_per_s)


def assumptions(of: Machine, *, ranks: int) -> list[str]:
    """What a predicted time rests on, in sentences."""
    told = [
        f"{of.gpu.name}: {PRODUCT_SHARE:.0%} of {of.gpu.bf16_tflops:g} TFLOP/s in matrix products, {ATTENTION_SHARE:.0%} in attention, "
        f"{MEMORY_SHARE:.0%} of {of.gpu.memory_gb_per_s:g} GB/s elsewhere, and {OPERATOR_US:g} us an operator: fitted to one H200's steps",
        f"memory: {of.memory_bytes / 2**30:.1f} GiB, of which {of.usable_bytes / 2**30:.1f} for tensors",
    ]
    if ranks > 1:
        told += [
            f"at least {EAGER_OPERATOR_US:g} us of host time an operator, for steps of several ranks are not captured (assumed)",
            f"messages: {LINK_SHARE:.0%} of {of.link_gb_per_s:g} GB/s within a host of {of.gpus_per_host} GPUs, of "
            f"{of.network_gb_per_s:g} GB/s a GPU between hosts, and {MESSAGE_US:g} us each and hop of a tree (assumed)",
            "tensor ranks' messages are waited for; data ranks' are hidden behind the passes that they can overlap with, but for one "
            "layer's; a ring's behind its attention (assumed)",
        ]
    return told
