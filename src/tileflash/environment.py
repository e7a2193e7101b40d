"""Where a figure was measured: the GPU, the versions and the commit, as one flat dictionary for logs and reports."""

from __future__ import annotations

import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import tileflash

if TYPE_CHECKING:
    import torch


def environment(device: str | torch.device = "cpu") -> dict[str, str | int | None]:
    """Describe this machine and these packages, for a run on `device`.

    Keys (a value that this machine does not have is None): `gpu` (name), `driver`, `cuda` (the version that torch was
    built for), `compute_capability` ("9.0"), `gpu_memory_bytes`, `torch`, `triton`, `python`, `numpy`, `cpu` (name),
    `commit` (`git describe` of the source tree where it is a checkout, else the version), `tileflash` (version),
    `date` (UTC, ISO 8601).
    """
    import torch

    selected = torch.device(device)
    facts: dict[str, str | int | None] = {
        "gpu": None,
        "driver": None,
        "cuda": torch.version.cuda,
        "compute_capability": None,
        "gpu_memory_bytes": None,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "numpy": _version("numpy"),
        "cpu": _cpu_name(),
        "commit": _commit(),
        "tileflash": tileflash.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    if selected.type == "cuda":
        properties = torch.cuda.get_device_properties(selected)
        facts["gpu"] = properties.name
        facts["driver"] = _driver_version()
        facts["compute_capability"] = f"{properties.major}.{properties.minor}"
        facts["gpu_memory_bytes"] = properties.total_memory
    return facts


def _version(distribution: str) -> str | None:
    """The installed version, read without importing the package (Triton takes seconds)."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.is_file():
        for line in cpu_info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """`git describe` of the tree this file lies in; the version where it is an installed package or git is absent."""
    root = Path(__file__).resolve().parents[2]
    # Without this check a package installed below somebody else's checkout would report their commit.
    if (root / ".git").exists() and (root / "src" / "tileflash").is_dir():
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--tags"]
        try:
            described = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return tileflash.__version__
        if described.returncode == 0 and described.stdout.strip():
            return described.stdout.strip()
    return tileflash.__version__


def _driver_version() -> str | None:
    """The driver's version; None where NVML cannot say (AMD GPUs, containers without the library)."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    return version.decode() if isinstance(version, bytes) else str(version)
