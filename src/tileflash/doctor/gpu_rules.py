"""What must hold between the driver, the GPUs and the PyTorch build, and what to do where it does not."""

from __future__ import annotations

import re

from tileflash.doctor.machine import OLDEST_DRIVER, OLDEST_TORCH, Machine
from tileflash.doctor.problem import Problem, dotted, pip_install, version_tuple


def wheel_for_driver(cuda: str | None) -> str:
    """The command for a PyTorch build that the driver can run; `cuda` is the CUDA version that the driver supports."""
    name = "cu130" if version_tuple(cuda) >= (13,) else "cu126"
    index = f"https://download.pytorch.org/whl/{name}"
    return pip_install("--force-reinstall", f"torch>={dotted(OLDEST_TORCH)}", "--index-url", index)


def driver_problems(machine: Machine) -> list[Problem]:
    facts, torch = machine.driver.facts, machine.torch.facts
    if "Driver/library version mismatch" in machine.driver.error:
        what = "the NVIDIA driver was updated while the old one was loaded: library and kernel module differ"
        return [Problem("driver.mismatch", "driver", "error", what, "sudo reboot", machine.driver.error)]
    if machine.driver.status in ("crashed", "timeout"):
        what = "the NVIDIA driver does not answer"
        return [Problem("driver.no-answer", "driver", "error", what, "sudo reboot", machine.driver.error)]
    if not facts.get("gpus") or not torch:
        return []
    names = ", ".join(sorted({gpu["name"] for gpu in facts["gpus"]}))
    if torch["cuda"] is None:
        kind = "the ROCm build" if torch["hip"] else "a build without CUDA"
        what = f"this machine has an NVIDIA GPU ({names}), and torch {torch['version']} is {kind}: everything runs on the CPU"
        return [Problem("torch.no-cuda", "torch", "error", what, wheel_for_driver(facts["cuda"]))]
    needed = version_tuple(torch["cuda"])[:1]
    if version_tuple(facts["cuda"])[:1] < needed:
        least = OLDEST_DRIVER.get(needed[0])
        what = (
            f"driver {facts['version']} supports CUDA {facts['cuda']}, torch {torch['version']} needs CUDA {torch['cuda']}"
            + (f" (driver {least} or newer)" if least else "")
        )
        fix = wheel_for_driver(facts["cuda"])
        if version_tuple(facts["cuda"]) < (12,):
            fix = "install a newer NVIDIA driver: https://www.nvidia.com/drivers"
        return [Problem("driver.too-old", "driver", "error", what, fix)]
    return []


# What CUDA says when it cannot begin -> (id, what it means, remedy).
_CUDA_ERRORS = (
    ("802|not yet initialized", "cuda.fabric-manager", "the GPUs' NVLink switches are not set up: the fabric manager does not run",
     "sudo systemctl start nvidia-fabricmanager"),
    ("803|unsupported display driver", "cuda.compat-library", "a CUDA compatibility library that does not fit the driver is loaded",
     "unset LD_LIBRARY_PATH"),
    ("804|forward compatibility", "cuda.compat-library", "a CUDA compatibility library is loaded that this GPU must not use",
     "unset LD_LIBRARY_PATH"),
    ("999|unknown error", "cuda.kernel-module", "the driver's kernel module hangs (often after suspend)",
     "sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm"),
    ("out of memory", "cuda.out-of-memory", "the GPU's memory is taken by other processes",
     "nvidia-smi (see which processes hold it, and end yours)"),
)  # fmt: skip


def gpu_problems(machine: Machine) -> list[Problem]:
    driver, torch = machine.driver.facts, machine.torch.facts
    if not torch or (torch["cuda"] is None and torch["hip"] is None):
        return []
    if not torch["gpus"]:
        hidden = machine.environment.get("CUDA_VISIBLE_DEVICES")
        if driver.get("gpus") and hidden is not None and not re.match(r"\d|GPU-|MIG-", hidden.strip()):
            what = f"CUDA_VISIBLE_DEVICES is {hidden!r}, which hides every GPU from PyTorch"
            return [Problem("cuda.hidden", "GPU", "error", what, "unset CUDA_VISIBLE_DEVICES")]
        if not driver.get("gpus") or driver_problems(machine):
            return []  # no GPU, or the cause is told
        for pattern, name, what, fix in _CUDA_ERRORS:
            if re.search(pattern, torch["gpu_error"]):
                return [Problem(name, "GPU", "error", what, fix, torch["gpu_error"])]
        what = "the driver has a GPU, and PyTorch cannot use it"
        return [Problem("cuda.init", "GPU", "error", what, wheel_for_driver(driver["cuda"]), torch["gpu_error"])]
    found = []
    for gpu in torch["gpus"] if torch["hip"] is None else []:
        if not has_kernels_for(gpu["capability"], torch["architectures"]):
            what = (
                f"torch {torch['version']} has no kernels for {gpu['name']} (capability {gpu['capability']}; "
                f"it has {' '.join(torch['architectures'])})"
            )
            older = version_tuple(gpu["capability"]) < (9,)
            fix = wheel_for_driver("12.6") if older else pip_install("--upgrade", "torch")
            found.append(Problem("torch.no-kernels-for-gpu", gpu["name"], "error", what, fix))
    return found


def has_kernels_for(capability: str, architectures: list[str]) -> bool:
    """Whether a build with these architectures ("sm_90", "sm_90a", "compute_120") runs on a GPU of this capability ("9.0").

    Machine code runs on its own major version from its minor version on (with a letter: on just that one), PTX on all newer ones.
    """
    wanted = version_tuple(capability)
    for architecture in architectures:
        found = re.match(r"(sm|compute)_(\d+)(\d)([a-z]?)$", architecture)
        if not found:
            return True  # of a kind that is not known here: no false alarm
        have = (int(found[2]), int(found[3]))
        if found[4] == "a":
            if have == wanted:
                return True
        elif (found[1] == "compute" and have <= wanted) or (have[0] == wanted[0] and have <= wanted):
            return True
    return not architectures
