"""What loaders say when a package cannot be imported, and what it means: the ABI mismatch behind an undefined symbol, and the like.

Patterns are from the issue lists of flash-attention, xformers, PyTorch and Triton.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass

from tileflash.doctor.problem import pip_install, version_tuple


@dataclass(frozen=True)
class BuiltFor:
    """What a binary package was built for, as far as its metadata says."""

    torch: str | None = None
    cuda: str | None = None
    cxx11_abi: bool | None = None

    def __str__(self) -> str:
        abi = {True: "the new C++ ABI", False: "the old C++ ABI", None: ""}[self.cxx11_abi]
        parts = [f"torch {self.torch}" if self.torch else "", f"CUDA {self.cuda}" if self.cuda else "", abi]
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True)
class Surroundings:
    """What the package that failed was loaded into; `reinstall` is the command that makes it fit. With a `distribution` it can be
    built from source."""

    package: str
    reinstall: str
    torch: str | None = None
    torch_cuda: str | None = None
    torch_cxx11_abi: bool | None = None
    built_for: BuiltFor = BuiltFor()
    distribution: str = ""


@dataclass(frozen=True)
class Meaning:
    """`kind` is stable: abi-mismatch, missing-library, old-system-library, ...; "unknown" where no pattern fits."""

    kind: str
    what: str
    fix: str


def explain_loader_error(error: str, around: Surroundings) -> Meaning:
    """What an import error's words mean. The first pattern that fits counts."""
    for pattern, meaning in _PATTERNS:
        if found := re.search(pattern, error, re.IGNORECASE):
            return meaning(found, around)
    return Meaning("unknown", f"{around.package} cannot be loaded", around.reinstall)


def _torch_here(around: Surroundings) -> str:
    return f"torch {around.torch}" if around.torch else "the installed torch"


def _undefined_symbol(found: re.Match[str], around: Surroundings) -> Meaning:
    symbol = found[1].rstrip(",)")
    if re.match(r"_?Py[A-Z_]", symbol):
        what = f"{around.package} was built for another Python than {platform.python_version()}: {symbol} is not in it"
        return Meaning("python-abi-mismatch", what, around.reinstall)
    if re.match(r"(cu[A-Z]|cuda|cublas|cudnn|cusparse|nvrtc|nvml|nccl|__cuda)", symbol):
        what = f"{around.package} needs a CUDA library of another version than the one that is loaded: {symbol} is not in it"
        return Meaning("cuda-mismatch", what, around.reinstall)
    # In mangled names N begins a path of names, each after its length. PyTorch's outermost are c10, at and torch.
    if not re.search(r"N[KVR]?(3c10|2at(?=\d)|5torch)|^_?(aoti_)?torch_|^THP", symbol):
        what = f"a library that {around.package} is linked to is of another version than it was built with: {symbol} is missing"
        return Meaning("library-mismatch", what, around.reinstall)
    what = f"ABI mismatch: {around.package} was built against another PyTorch than {_torch_here(around)}, which has no {symbol}"
    if str(around.built_for):
        what += f"; it was built for {around.built_for}"
    # std::string is __cxx11::basic_string in the new C++ ABI, and Ss in mangled names of the old.
    elif "__cxx11" in symbol and around.torch_cxx11_abi is False:
        what += "; it was built with the new C++ ABI, this torch with the old"
    elif re.search(r"Ss($|[^a-z])", symbol) and around.torch_cxx11_abi:
        what += "; it was built with the old C++ ABI, this torch with the new"
    return Meaning("abi-mismatch", what, around.reinstall)


def _built_for_another_torch(found: re.Match[str], around: Surroundings) -> Meaning:
    built = f"it was built for torch {found[1]}" if found.lastindex and found[1] else "it does not say for which"
    what = f"ABI mismatch: {around.package} was built against another PyTorch than {_torch_here(around)}; {built}"
    return Meaning("abi-mismatch", what, around.reinstall)


def _missing_library(found: re.Match[str], around: Surroundings) -> Meaning:
    library = found[1].rsplit("/", 1)[-1]
    stem, _, number = library.partition(".so")
    number = number.lstrip(".")
    if stem in ("libcuda", "libnvidia-ml"):
        what = f"{library} is part of the NVIDIA driver, which is not installed or not visible here (in a container?)"
        return Meaning("driver-missing", what, "install the NVIDIA driver, or start the container with: --gpus all")
    if re.match(r"lib(c10|torch)", stem):
        what = f"{around.package} looks for PyTorch's {library}, which {_torch_here(around)} does not have"
        return Meaning("abi-mismatch", what, around.reinstall)
    if re.match(
        r"lib(cudart|cublas|cublasLt|cudnn|cufft|curand|cusolver|cusparse|cupti|nvrtc|nvJitLink|nvToolsExt|nccl)", stem
    ):
        what = f"{around.package} needs {library}, which is not there"
        if number and stem in ("libcudart", "libcublas", "libcublasLt", "libnvrtc", "libnvJitLink"):
            what = f"{around.package} was built for CUDA {number.split('.')[0]} and finds no {library}"
            if around.torch_cuda:
                what += f"; torch brings CUDA {around.torch_cuda}"
        return Meaning("cuda-mismatch", what, around.reinstall)
    fix = f"sudo apt-get install -y apt-file && sudo apt-file update && apt-file search {library}"
    known = {"libgomp.so.1": "libgomp1", "libGL.so.1": "libgl1", "libnuma.so.1": "libnuma1", "libz.so.1": "zlib1g"}
    if library in known:
        fix = f"sudo apt-get install -y {known[library]}"
    return Meaning("missing-library", f"{around.package} needs the system library {library}, which is not there", fix)


def _old_system_library(found: re.Match[str], around: Surroundings) -> Meaning:
    wanted = found[1]
    if wanted.startswith("GLIBC_"):
        have = platform.libc_ver()[1]
        what = f"{around.package} was built for a newer Linux: it needs {wanted}" + (
            f", here is glibc {have}" if have else ""
        )
        from_source = f" --no-binary {around.distribution}" if around.distribution else ""
        return Meaning("old-system-library", what, around.reinstall + from_source)
    what = f"{around.package} needs a newer C++ runtime library: {wanted} is not in the libstdc++.so.6 that is loaded"
    conda = "conda install -c conda-forge libstdcxx-ng"
    return Meaning(
        "old-system-library", what, conda if os.environ.get("CONDA_PREFIX") else "sudo apt-get install -y libstdc++6"
    )


def _no_kernels_for_gpu(found: re.Match[str], around: Surroundings) -> Meaning:
    what = f"{around.package} was not built for this GPU's compute capability"
    return Meaning("gpu-not-supported", what, around.reinstall)


def _driver_too_old(found: re.Match[str], around: Surroundings) -> Meaning:
    what = f"the NVIDIA driver is too old for the CUDA version of {around.package}"
    return Meaning("driver-too-old", what, "install a newer NVIDIA driver: https://www.nvidia.com/drivers")


def _dll(found: re.Match[str], around: Surroundings) -> Meaning:
    what = (
        f"a DLL that {around.package} needs is missing: the Visual C++ runtime, or CUDA's libraries of another version"
    )
    return Meaning("missing-library", what, "winget install Microsoft.VCRedist.2015+.x64")


def _numpy(found: re.Match[str], around: Surroundings) -> Meaning:
    what = f"{around.package} was built for another major version of NumPy"
    return Meaning("numpy-mismatch", what, around.reinstall)


def _shadowed(found: re.Match[str], around: Surroundings) -> Meaning:
    name = found[1].split(".")[0]
    what = f"a file or directory named {name} on the path hides the package {name}, or the package imports itself in a circle"
    return Meaning(
        "shadowed", what, f"rename your {name}.py (or {name}/) and leave the directory that holds it, then try again"
    )


def _missing_module(found: re.Match[str], around: Surroundings) -> Meaning:
    module = found[1].split(".")[0]
    distribution = {"cutlass": "nvidia-cutlass-dsl", "cuda": "cuda-python", "yaml": "pyyaml"}.get(
        module, module.replace("_", "-")
    )
    if distribution.replace("-", "_") == around.package.replace("-", "_") or f"{module}." in found[1]:
        return Meaning("incomplete", f"{around.package} is incomplete: it has no module {found[1]}", around.reinstall)
    return Meaning(
        "missing-module",
        f"{around.package} needs the Python package {module}, which is not there",
        pip_install(distribution),
    )


def _missing_name(found: re.Match[str], around: Surroundings) -> Meaning:
    what = f"{around.package} does not fit the version of {found[2]} that is installed, which has no {found[1]}"
    return Meaning("version-mismatch", what, around.reinstall)


def _damaged(found: re.Match[str], around: Surroundings) -> Meaning:
    what = f"a library file of {around.package} is damaged or for another kind of CPU"
    return Meaning("damaged", what, around.reinstall)


def _static_tls(found: re.Match[str], around: Surroundings) -> Meaning:
    library = found[1]
    what = f"{library} must be loaded before all others: no room is left for its thread-local data"
    return Meaning("static-tls", what, f"export LD_PRELOAD={library}")


def _no_compiler(found: re.Match[str], around: Surroundings) -> Meaning:
    return Meaning("compiler-missing", "Triton finds no C compiler for its launcher", "sudo apt-get install -y gcc")


def _no_headers(found: re.Match[str], around: Surroundings) -> Meaning:
    major, minor = version_tuple(platform.python_version())[:2]
    what = "the C compiler finds no Python.h, which Triton's launcher needs"
    return Meaning("headers-missing", what, f"sudo apt-get install -y python{major}.{minor}-dev")


def _ptxas(found: re.Match[str], around: Surroundings) -> Meaning:
    what = f"the ptxas of this Triton is older than the GPU: it does not know {found[1]}"
    return Meaning("gpu-not-supported", what, pip_install("--upgrade", "triton"))


def _out_of_memory(found: re.Match[str], around: Surroundings) -> Meaning:
    return Meaning(
        "out-of-memory",
        "the GPU's memory is taken by other processes",
        "nvidia-smi (see which processes hold it, and end yours)",
    )


_PATTERNS: tuple[tuple[str, Callable[[re.Match[str], Surroundings], Meaning]], ...] = (
    (r"was built for:?\s*PyTorch (\S+)", _built_for_another_torch),
    (r"was built for a different version of PyTorch", _built_for_another_torch),
    (r"undefined symbol:? (\S+)", _undefined_symbol),
    (r"symbol not found in flat namespace '?(\S+?)'?(?:\s|$)", _undefined_symbol),
    (r"(\S+): cannot allocate memory in static TLS block", _static_tls),
    (r"(\S+\.so[.\d]*): cannot open shared object file", _missing_library),
    (r"version [`'\"](GLIBC_[\d.]+|GLIBCXX_[\d.]+|CXXABI_[\d.]+)['\"`] not found", _old_system_library),
    (r"no kernel image is available", _no_kernels_for_gpu),
    (r"CUDA driver version is insufficient|NVIDIA driver on your system is too old", _driver_too_old),
    (r"DLL load failed|WinError 126", _dll),
    (r"compiled using NumPy 1|numpy\.core\.multiarray failed to import|_ARRAY_API not found|numpy\.dtype size changed", _numpy),
    (r"partially initialized module '([\w.]+)'", _shadowed),
    (r"No module named '([\w.]+)'", _missing_module),
    (r"cannot import name '(\w+)' from '([\w.]+)'", _missing_name),
    (r"invalid ELF header|wrong ELF class|file too short|not a mach-o file", _damaged),
    (r"Failed to find C compiler", _no_compiler),
    (r"Python\.h: No such file", _no_headers),
    (r"Value '(sm_\w+)' is not defined", _ptxas),
    (r"CUDA out of memory|OutOfMemoryError", _out_of_memory),
)  # fmt: skip
