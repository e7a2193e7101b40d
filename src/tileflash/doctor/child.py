"""The child process of the doctor: does one step after the other and writes what it found, a JSON line at a time.

Run by `steps.run_steps` with a file for the lines, modules to hide, and the steps. A step that takes the process down leaves
a "started" line behind. Steps: driver, numpy, torch, triton, backends, self-test:BACKEND, import:MODULE.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


def main(arguments: list[str]) -> None:
    """`EVENTS_FILE HIDDEN,MODULES STEP...`"""
    events_path, hidden, *steps = arguments
    for name in filter(None, hidden.split(",")):
        sys.modules[name] = None  # type: ignore[assignment]  # an import of it now is an ImportError
    with open(events_path, "a", encoding="utf-8") as events:

        def tell(step: str, state: str, facts: dict[str, Any], error: str = "") -> None:
            events.write(json.dumps({"step": step, "state": state, "facts": facts, "error": error}) + "\n")
            events.flush()

        for step in steps:
            tell(step, "started", {})
            kind, _, name = step.partition(":")
            try:
                facts = _STEPS[kind](name)
            except BaseException as error:  # a module may raise anything, SystemExit included
                tell(step, "failed", {}, f"{type(error).__name__}: {error}")
            else:
                tell(step, "ok", facts)


def _driver(_: str) -> dict[str, Any]:
    """What the NVIDIA driver says, without PyTorch: its version, the CUDA version it supports, the GPUs."""
    import pynvml

    pynvml.nvmlInit()
    version = pynvml.nvmlSystemGetDriverVersion()
    cuda = pynvml.nvmlSystemGetCudaDriverVersion()
    gpus = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        name = pynvml.nvmlDeviceGetName(handle)
        total: int | None = None
        free: int | None = None
        with suppress(pynvml.NVMLError):  # GPUs that share the host's memory have none of their own
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            total, free = int(memory.total), int(memory.free)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        gpus.append(
            {
                "index": index,
                "name": name.decode() if isinstance(name, bytes) else str(name),
                "capability": f"{major}.{minor}",
                "memory_bytes": total,
                "free_memory_bytes": free,
            }
        )
    return {
        "version": version.decode() if isinstance(version, bytes) else str(version),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
        "gpus": gpus,
    }


def _numpy(_: str) -> dict[str, Any]:
    import numpy

    return {"version": numpy.__version__, "file": numpy.__file__, "sum": int(numpy.arange(3).sum())}


def _torch(_: str) -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {
        "version": torch.__version__,
        "file": torch.__file__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cxx11_abi": torch.compiled_with_cxx11_abi(),
        "architectures": [],
        "gpu_error": "",
        "gpus": [],
    }
    if torch.version.cuda is None and torch.version.hip is None:
        return facts
    facts["architectures"] = torch.cuda.get_arch_list()
    try:
        torch.cuda.init()
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            facts["gpus"].append(
                {
                    "index": index,
                    "name": properties.name,
                    "capability": f"{properties.major}.{properties.minor}",
                    "memory_bytes": total,
                    "free_memory_bytes": free,
                }
            )
    except Exception as error:
        facts["gpu_error"] = f"{type(error).__name__}: {error}"
    return facts


def _triton(_: str) -> dict[str, Any]:
    import triton

    return {"version": triton.__version__, "file": triton.__file__}


def _backends(_: str) -> dict[str, Any]:
    from tileflash.doctor.self_test import survey

    return {"backends": survey()}


def _self_test(name: str) -> dict[str, Any]:
    from tileflash.doctor.self_test import run_self_test

    return run_self_test(name)


def _import(name: str) -> dict[str, Any]:
    """Import another library; xformers is asked for the error that it only logs."""
    module = importlib.import_module(name)
    library = sys.modules.get("xformers._cpp_lib")
    if library is not None and (swallowed := getattr(library, "_cpp_library_load_exception", None)) is not None:
        cause = f" ({type(swallowed.__cause__).__name__}: {swallowed.__cause__})" if swallowed.__cause__ else ""
        raise ImportError(re.sub(r"\s+", " ", str(swallowed)).strip() + cause)
    version = getattr(module, "__version__", None)
    file = getattr(module, "__file__", None)
    return {"version": None if version is None else str(version), "file": None if file is None else str(Path(file))}


_STEPS: dict[str, Callable[[str], dict[str, Any]]] = {
    "driver": _driver,
    "numpy": _numpy,
    "torch": _torch,
    "triton": _triton,
    "backends": _backends,
    "self-test": _self_test,
    "import": _import,
}
