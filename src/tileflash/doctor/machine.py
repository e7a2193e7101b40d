"""The facts of a machine that the rules are about: what the steps found, the environment, the installed packages."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata

from tileflash.doctor.problem import version_tuple
from tileflash.doctor.steps import Outcome

# As in pyproject.toml; a test compares.
OLDEST_PYTHON, OLDEST_TORCH, OLDEST_TRITON = (3, 10), (2, 11), (3, 6)

# The Triton that a release of PyTorch is built and tested with. Source: `Requires-Dist: triton==...` of its CUDA wheels
# (pypi.org/project/torch), which is `.ci/docker/triton_version.txt` of its release branch. CPU wheels require none, so for them,
# and only for them, this table is asked; otherwise the metadata of the torch that is installed.
TORCH_TRITON = {"2.10": "3.6", "2.11": "3.6", "2.12": "3.7", "2.13": "3.7", "2.14": "3.8"}

# The driver that the first release of a CUDA major version needs; later minor releases run on it, too. Source: NVIDIA, CUDA
# Compatibility, "Minor Version Compatibility", table 1.
OLDEST_DRIVER = {11: "450", 12: "525", 13: "580"}

# Distributions that install the module `triton`.
TRITON_DISTRIBUTIONS = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm", "triton-windows")


@dataclass(frozen=True)
class Machine:
    """What was found: the outcomes of the steps driver, numpy, torch and triton, the environment, the installed packages."""

    driver: Outcome
    numpy: Outcome
    torch: Outcome
    triton: Outcome
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    system: str = field(default_factory=platform.system)
    installed: Mapping[str, str] = field(default_factory=lambda: installed_versions())
    torch_requires: tuple[str, ...] = field(default_factory=lambda: _requirements("torch"))

    @property
    def gpu_seen(self) -> bool:
        """Whether the NVIDIA driver or PyTorch knows of a GPU."""
        return bool(self.driver.facts.get("gpus") or self.torch.facts.get("gpus"))

    @property
    def interpreted(self) -> bool:
        """Whether TRITON_INTERPRET is on, by what Triton takes for yes."""
        return self.environment.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "y", "yes")

    def version(self, name: str, outcome: Outcome) -> str | None:
        """What the module says, else what the metadata of the package says."""
        return outcome.facts.get("version") or self.installed.get(name)

    @property
    def triton_version(self) -> str | None:
        """Triton's version under whichever distribution it came."""
        names = [name for name in TRITON_DISTRIBUTIONS if name in self.installed]
        return self.version(names[0] if names else "triton", self.triton)


def installed_versions() -> dict[str, str]:
    """Versions by the metadata, of the packages that matter here."""
    found = {}
    for name in ("torch", "numpy", *TRITON_DISTRIBUTIONS):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _requirements(name: str) -> tuple[str, ...]:
    try:
        return tuple(metadata.requires(name) or ())
    except metadata.PackageNotFoundError:
        return ()


def required_triton(machine: Machine) -> tuple[str, str, str] | None:
    """(distribution, version, who says so) of the Triton that the installed PyTorch wants; None where it is not known."""
    for requirement in machine.torch_requires:
        if found := re.match(r"([a-z-]*triton[a-z-]*)\s*\(?==\s*([\w.+]+)", requirement):
            return found[1], found[2], "torch's own requirement"
    release = ".".join(map(str, version_tuple(machine.version("torch", machine.torch))[:2]))
    if release in TORCH_TRITON:
        return "triton", TORCH_TRITON[release], "PyTorch's releases"
    return None
