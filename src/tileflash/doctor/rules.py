"""What must hold between the versions of a machine, and what to do where it does not."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import sysconfig
from pathlib import Path

from tileflash.doctor.gpu_rules import driver_problems, gpu_problems
from tileflash.doctor.loader_errors import Surroundings, explain_loader_error
from tileflash.doctor.machine import (
    OLDEST_PYTHON,
    OLDEST_TORCH,
    OLDEST_TRITON,
    TRITON_DISTRIBUTIONS,
    Machine,
    required_triton,
)
from tileflash.doctor.problem import Problem, dotted, pip_install, version_tuple
from tileflash.doctor.steps import Outcome


def machine_problems(machine: Machine) -> list[Problem]:
    """Everything that does not fit, the cause before what follows from it."""
    return [
        *_python(),
        *_torch(machine),
        *_numpy(machine),
        *driver_problems(machine),
        *gpu_problems(machine),
        *_triton(machine),
        *_compiler(machine),
        *_interpreter(machine),
    ]


def _python() -> list[Problem]:
    if sys.version_info[:2] >= OLDEST_PYTHON:
        return []
    what = f"Python {platform.python_version()} is too old: tileflash needs {dotted(OLDEST_PYTHON)}"
    return [Problem("python.too-old", "python", "error", what, "make PYTHON=/path/to/python3.12 test")]


def _not_loaded(machine: Machine, name: str, outcome: Outcome, reinstall: str) -> Problem:
    """A package that is there and cannot be imported."""
    if outcome.status in ("crashed", "timeout"):
        verb = "takes the process down" if outcome.status == "crashed" else "does not come to an end"
        return Problem(f"{name}.{outcome.status}", name, "error", f"importing {name} {verb}", reinstall, outcome.error)
    facts = machine.torch.facts
    around = Surroundings(name, reinstall, facts.get("version"), facts.get("cuda"), facts.get("cxx11_abi"))
    meaning = explain_loader_error(outcome.error, around)
    return Problem(f"{name}.import", name, "error", meaning.what, meaning.fix, outcome.error)


def _is_absent(name: str, outcome: Outcome) -> bool:
    return outcome.status == "failed" and f"No module named '{name}'" in outcome.error


def _torch(machine: Machine) -> list[Problem]:
    newest_needed = f"torch>={dotted(OLDEST_TORCH)}"
    if _is_absent("torch", machine.torch):
        what = "PyTorch is not installed; tileflash computes with it"
        return [Problem("torch.missing", "torch", "error", what, pip_install(newest_needed), machine.torch.error)]
    if not machine.torch.ok:
        return [_not_loaded(machine, "torch", machine.torch, pip_install("--force-reinstall", newest_needed))]
    version = machine.torch.facts["version"]
    if version_tuple(version)[:2] < OLDEST_TORCH:
        what = f"torch {version} is too old: tileflash needs {dotted(OLDEST_TORCH)}"
        return [Problem("torch.too-old", "torch", "error", what, pip_install("--upgrade", newest_needed))]
    return []


def _numpy(machine: Machine) -> list[Problem]:
    if _is_absent("numpy", machine.numpy):
        what = "NumPy is not installed; tileflash's data files are read with it"
        return [Problem("numpy.missing", "numpy", "error", what, pip_install("numpy"), machine.numpy.error)]
    if not machine.numpy.ok:
        return [
            _not_loaded(machine, "numpy", machine.numpy, pip_install("--force-reinstall", "--no-cache-dir", "numpy"))
        ]
    return []


def _triton(machine: Machine) -> list[Problem]:
    wanted = required_triton(machine)
    install = pip_install(f"triton>={dotted(OLDEST_TRITON)}")
    if wanted:
        distribution, release, _ = wanted
        install = pip_install(f"{distribution}=={release}" + (".*" if release.count(".") < 2 else ""))
    if _is_absent("triton", machine.triton):
        if not machine.gpu_seen and machine.system != "Linux":
            return []  # there is none for such machines, and nothing it could do
        what = "Triton is not installed: tileflash's own kernels cannot run, PyTorch's serve instead"
        severity = "error" if machine.gpu_seen else "warning"
        return [Problem("triton.missing", "triton", severity, what, install, machine.triton.error)]  # type: ignore[arg-type]
    if not machine.triton.ok:
        return [
            _not_loaded(
                machine, "triton", machine.triton, install.replace(" install ", " install --force-reinstall ", 1)
            )
        ]
    version = machine.triton_version
    assert version is not None  # it was imported
    if version_tuple(version)[:2] < OLDEST_TRITON:
        what = f"Triton {version} is too old: tileflash's kernels need {dotted(OLDEST_TRITON)}"
        return [Problem("triton.too-old", "triton", "error", what, install)]
    found = []
    doubled = [name for name in TRITON_DISTRIBUTIONS if name in machine.installed]
    if len(doubled) > 1:
        what = f"{' and '.join(doubled)} are both installed and write to the same directory: which files are whose is chance"
        fix = f"{sys.executable} -m pip uninstall -y {' '.join(doubled)} && {install}"
        found.append(Problem("triton.doubled", "triton", "warning", what, fix))
    elif wanted and version_tuple(version)[:2] != version_tuple(wanted[1])[:2]:
        torch = machine.version("torch", machine.torch)
        what = (
            f"torch {torch} goes with Triton {wanted[1]} ({wanted[2]}), {version} is installed: torch.compile may fail"
        )
        found.append(Problem("triton.mismatch", "triton", "warning", what, install))
    return found


def _compiler(machine: Machine) -> list[Problem]:
    """Triton builds a small library that talks to the driver at the first launch of a kernel: it needs a C compiler and Python.h."""
    if machine.system != "Linux" or not machine.torch.facts.get("gpus") or not machine.triton.ok or machine.interpreted:
        return []
    path = machine.environment.get("PATH")
    chosen = machine.environment.get("CC")
    if chosen is not None and shutil.which(chosen.split()[0] if chosen.split() else "", path=path) is None:
        what = f"CC is {chosen!r}, which is no program: Triton builds its launcher with it"
        return [Problem("compiler.missing", "C compiler", "error", what, "unset CC")]
    if chosen is None and not any(shutil.which(name, path=path) for name in ("gcc", "clang")):
        what = "there is no C compiler (gcc, clang), and Triton builds its launcher with one at the first launch"
        return [Problem("compiler.missing", "C compiler", "error", what, "sudo apt-get install -y gcc")]
    places = [_python_include(), *_paths(machine, "CPATH"), *_paths(machine, "C_INCLUDE_PATH")]
    if not any((Path(place) / "Python.h").is_file() for place in places):
        what = f"Python.h is not in {places[0]}, and Triton's launcher is built with it"
        major, minor = sys.version_info[:2]
        fix = f"sudo apt-get install -y python{major}.{minor}-dev"
        return [Problem("compiler.no-headers", "C compiler", "error", what, fix)]
    return []


def _python_include() -> str:
    """Where Triton looks for Python.h: Debian's scheme of its own (posix_local) is passed over."""
    scheme = sysconfig.get_default_scheme()
    return sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)


def _paths(machine: Machine, variable: str) -> list[str]:
    return [place for place in machine.environment.get(variable, "").split(os.pathsep) if place]


def _interpreter(machine: Machine) -> list[Problem]:
    if not machine.interpreted:
        return []
    found = []
    if machine.gpu_seen:
        what = (
            "TRITON_INTERPRET is set: Triton's kernels run in Python, thousands of times slower, instead of on the GPU"
        )
        found.append(Problem("triton.interpreted", "triton", "error", what, "unset TRITON_INTERPRET"))
    numpy = machine.version("numpy", machine.numpy)
    # Triton's interpreter turns a one-element array into an int for range(); NumPy 2.4 no longer allows it.
    if version_tuple(numpy) >= (2, 4):
        what = f"TRITON_INTERPRET is set, and Triton's interpreter does not work with NumPy {numpy}"
        found.append(Problem("triton.interpreter-numpy", "numpy", "error", what, pip_install("numpy<2.4")))
    return found
