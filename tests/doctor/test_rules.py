"""What must hold between versions, driver and GPUs: each rule on a machine that breaks it, and silence on machines that do not."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tileflash.doctor.gpu_rules import has_kernels_for
from tileflash.doctor.machine import (
    OLDEST_DRIVER,
    OLDEST_PYTHON,
    OLDEST_TORCH,
    OLDEST_TRITON,
    TORCH_TRITON,
    Machine,
    required_triton,
)
from tileflash.doctor.problem import dotted, version_tuple
from tileflash.doctor.rules import _python_include as python_include
from tileflash.doctor.rules import machine_problems
from tileflash.doctor.steps import Outcome

H200 = {
    "index": 0,
    "name": "NVIDIA H200",
    "capability": "9.0",
    "memory_bytes": 141 * 2**30,
    "free_memory_bytes": 140 * 2**30,
}
V100 = {**H200, "name": "Tesla V100", "capability": "7.0"}
CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
TORCH: dict[str, Any] = {
    "version": "2.11.0+cu130", "cuda": "13.0", "hip": None, "cxx11_abi": True, "architectures": CUDA_13, "gpu_error": "", "gpus": [H200],
}  # fmt: skip
DRIVER: dict[str, Any] = {"version": "580.95.05", "cuda": "13.0", "gpus": [H200]}
NO_DRIVER = Outcome("failed", error="NVMLError_LibraryNotFound: NVML Shared Library Not Found")
CPU = {**TORCH, "version": "2.13.0+cpu", "cuda": None, "architectures": [], "gpus": []}


def ok(**facts: Any) -> Outcome:
    return Outcome("ok", facts)


def failed(error: str) -> Outcome:
    return Outcome("failed", error=error)


GOOD = Machine(
    driver=ok(**DRIVER), numpy=ok(version="2.3.5"), torch=ok(**TORCH), triton=ok(version="3.6.0"),
    environment={"PATH": "/usr/bin:/bin"}, system="Linux", installed={"torch": "2.11.0", "triton": "3.6.0", "numpy": "2.3.5"},
    torch_requires=("filelock", "triton==3.6.0; platform_system == \"Linux\""),
)  # fmt: skip
NO_GPU = replace(GOOD, driver=NO_DRIVER, torch=ok(**CPU), triton=ok(version="3.7.1"), torch_requires=())


@pytest.fixture(autouse=True)
def _compiler_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr("tileflash.doctor.rules._python_include", lambda: str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda name, path=None: f"/usr/bin/{name}" if name == "gcc" and path else None)


def torch(**changes: Any) -> Outcome:
    return ok(**{**TORCH, **changes})


@pytest.mark.parametrize(
    "machine",
    [
        GOOD,
        NO_GPU,
        replace(NO_GPU, triton=failed("ModuleNotFoundError: No module named 'triton'"), system="Darwin", installed={}),
        replace(GOOD, driver=NO_DRIVER),  # a container without NVML: PyTorch's word counts
        replace(GOOD, driver=ok(**{**DRIVER, "cuda": "12.4"}), torch=torch(cuda="12.8", architectures=["sm_90a"])),  # minor versions
        replace(GOOD, driver=NO_DRIVER, torch=torch(cuda=None, hip="7.0", architectures=["gfx942"])),
        replace(NO_GPU, environment={"TRITON_INTERPRET": "1"}),
        replace(NO_GPU, torch=ok(**{**CPU, "version": "2.99.0"})),  # a torch that no table knows
    ],
)  # fmt: skip
def test_no_false_alarm(machine: Machine) -> None:
    assert machine_problems(machine) == []


NO_TRITON = failed("ModuleNotFoundError: No module named 'triton'")


@pytest.mark.parametrize(
    ("machine", "name", "severity", "words", "fix"),
    [
        (replace(GOOD, torch=failed("ModuleNotFoundError: No module named 'torch'")),
         "torch.missing", "error", "not installed", "install 'torch>=2.11'"),
        (replace(GOOD, torch=failed("OSError: libcudart.so.12: cannot open shared object file")),
         "torch.import", "error", "CUDA 12", "--force-reinstall 'torch>=2.11'"),
        (replace(GOOD, torch=Outcome("crashed", error="the process died of SIGSEGV")),
         "torch.crashed", "error", "takes the process down", "--force-reinstall 'torch>=2.11'"),
        (replace(GOOD, torch=Outcome("timeout", error="no answer")),
         "torch.timeout", "error", "does not come to an end", "--force-reinstall 'torch>=2.11'"),
        (replace(GOOD, torch=torch(version="2.4.1+cu124"), torch_requires=("triton==3.6.0",)),
         "torch.too-old", "error", "needs 2.11", "--upgrade 'torch>=2.11'"),
        (replace(GOOD, numpy=failed("ModuleNotFoundError: No module named 'numpy'")),
         "numpy.missing", "error", "not installed", "install numpy"),
        (replace(GOOD, numpy=failed("ImportError: numpy.core.multiarray failed to import")),
         "numpy.import", "error", "NumPy", "--no-cache-dir numpy"),
        (replace(GOOD, torch=ok(**CPU)),
         "torch.no-cuda", "error", "NVIDIA GPU (NVIDIA H200), and torch 2.13.0+cpu", "--index-url https://download.pytorch.org/whl/cu130"),
        (replace(GOOD, torch=torch(cuda=None, hip="7.0", gpus=[])),
         "torch.no-cuda", "error", "ROCm build", "/whl/cu130"),
        (replace(GOOD, driver=ok(**{**DRIVER, "version": "550.54", "cuda": "12.4"}), torch=torch(gpus=[])),
         "driver.too-old", "error",
         "driver 550.54 supports CUDA 12.4, torch 2.11.0+cu130 needs CUDA 13.0 (driver 580 or newer)", "/whl/cu126"),
        (replace(GOOD, driver=ok(**{**DRIVER, "version": "470.1", "cuda": "11.4"}), torch=torch(gpus=[])),
         "driver.too-old", "error", "CUDA 11.4", "https://www.nvidia.com/drivers"),
        (replace(GOOD, driver=failed("NVMLError: Driver/library version mismatch"), torch=torch(gpus=[])),
         "driver.mismatch", "error", "updated", "sudo reboot"),
        (replace(GOOD, driver=Outcome("timeout", error="no answer"), torch=torch(gpus=[])),
         "driver.no-answer", "error", "does not answer", "sudo reboot"),
        (replace(GOOD, torch=torch(gpus=[]), environment={"CUDA_VISIBLE_DEVICES": ""}),
         "cuda.hidden", "error", "hides every GPU", "unset CUDA_VISIBLE_DEVICES"),
        (replace(GOOD, torch=torch(gpus=[]), environment={"CUDA_VISIBLE_DEVICES": "-1"}),
         "cuda.hidden", "error", "'-1'", "unset CUDA_VISIBLE_DEVICES"),
        (replace(GOOD, torch=torch(gpus=[], gpu_error="RuntimeError: Error 802: system not yet initialized")),
         "cuda.fabric-manager", "error", "NVLink", "nvidia-fabricmanager"),
        (replace(GOOD, torch=torch(gpus=[], gpu_error="RuntimeError: Error 803: system has unsupported display driver")),
         "cuda.compat-library", "error", "does not fit", "unset LD_LIBRARY_PATH"),
        (replace(GOOD, torch=torch(gpus=[], gpu_error="RuntimeError: CUDA unknown error")),
         "cuda.kernel-module", "error", "kernel module", "modprobe nvidia_uvm"),
        (replace(GOOD, torch=torch(gpus=[], gpu_error="RuntimeError: what is this")),
         "cuda.init", "error", "cannot use it", "/whl/cu130"),
        (replace(GOOD, torch=torch(gpus=[V100])),
         "torch.no-kernels-for-gpu", "error", "no kernels for Tesla V100 (capability 7.0; it has sm_75", "/whl/cu126"),
        (replace(GOOD, triton=NO_TRITON, installed={}),
         "triton.missing", "error", "not installed", "install triton==3.6.0"),
        (replace(NO_GPU, triton=NO_TRITON, installed={}),
         "triton.missing", "warning", "not installed", "install 'triton==3.7.*'"),
        (replace(GOOD, triton=failed("ImportError: libtriton.so: undefined symbol: PyObject_Foo")),
         "triton.import", "error", "another Python", "install --force-reinstall triton==3.6.0"),
        (replace(GOOD, triton=Outcome("crashed", error="SIGABRT")),
         "triton.crashed", "error", "takes the process down", "install --force-reinstall triton==3.6.0"),
        (replace(GOOD, triton=ok(version="3.2.0")),
         "triton.too-old", "error", "need 3.6", "install triton==3.6.0"),
        (replace(GOOD, triton=ok(version="3.7.1")),
         "triton.mismatch", "warning", "goes with Triton 3.6.0 (torch's own requirement), 3.7.1 is installed", "install triton==3.6.0"),
        (replace(NO_GPU, triton=ok(version="3.6.0")),
         "triton.mismatch", "warning", "goes with Triton 3.7 (PyTorch's releases)", "install 'triton==3.7.*'"),
        (replace(GOOD, installed={"triton": "3.6.0", "pytorch-triton": "3.6.0"}),
         "triton.doubled", "warning", "triton and pytorch-triton", "uninstall -y triton pytorch-triton && "),
        (replace(GOOD, environment={"PATH": ""}),
         "compiler.missing", "error", "no C compiler", "install -y gcc"),
        (replace(GOOD, environment={"PATH": "/bin", "CC": "/no/such/cc"}),
         "compiler.missing", "error", "'/no/such/cc'", "unset CC"),
        (replace(GOOD, environment={"PATH": "/bin", "TRITON_INTERPRET": "1"}),
         "triton.interpreted", "error", "thousands of times slower", "unset TRITON_INTERPRET"),
        (replace(NO_GPU, environment={"TRITON_INTERPRET": "true"}, numpy=ok(version="2.5.2")),
         "triton.interpreter-numpy", "error", "NumPy 2.5.2", "install 'numpy<2.4'"),
    ],
)  # fmt: skip
def test_each_rule(machine: Machine, name: str, severity: str, words: str, fix: str) -> None:
    found = machine_problems(machine)
    assert [(problem.id, problem.severity) for problem in found] == [(name, severity)]
    assert words in found[0].what
    assert fix in found[0].fix


def test_no_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tileflash.doctor.rules._python_include", lambda: "/no/such/directory")
    [problem] = machine_problems(GOOD)
    major, minor = sys.version_info[:2]
    assert (problem.id, problem.fix) == ("compiler.no-headers", f"sudo apt-get install -y python{major}.{minor}-dev")
    elsewhere = {"PATH": "/bin", "CPATH": f"/no/such:{tmp_path}"}  # where the compiler is told to look
    assert machine_problems(replace(GOOD, environment=elsewhere)) == []


@pytest.mark.parametrize("scheme", ["posix_local", "posix_prefix", "venv"])
def test_the_headers_are_looked_for_where_triton_looks(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    monkeypatch.setattr("sysconfig.get_default_scheme", lambda: scheme)
    monkeypatch.setattr("sysconfig.get_path", lambda name, scheme: f"{name} of {scheme}")
    assert python_include() == "include of " + {"posix_local": "posix_prefix"}.get(scheme, scheme)


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ("9.0", CUDA_13, True),
        ("8.9", CUDA_13, True),  # sm_86 runs on 8.9
        ("7.0", CUDA_13, False),
        ("10.3", CUDA_13, True),
        ("11.0", CUDA_13, False),
        ("12.1", CUDA_13, True),
        ("9.0", ["sm_90a"], True),
        ("9.1", ["sm_90a"], False),
        ("12.0", ["sm_80", "compute_90"], True),  # PTX
        ("8.0", ["sm_86"], False),
        ("9.0", ["something"], True),
        ("9.0", [], True),
    ],
)
def test_which_gpus_a_build_runs_on(capability: str, architectures: list[str], runs: bool) -> None:
    assert has_kernels_for(capability, architectures) is runs


def test_the_triton_that_torch_wants() -> None:
    assert required_triton(GOOD) == ("triton", "3.6.0", "torch's own requirement")
    rocm = replace(GOOD, torch_requires=("pytorch-triton-rocm==3.6.0+git1234; platform_system == 'Linux'",))
    assert required_triton(rocm) == ("pytorch-triton-rocm", "3.6.0+git1234", "torch's own requirement")
    assert required_triton(NO_GPU) == ("triton", TORCH_TRITON["2.13"], "PyTorch's releases")
    assert required_triton(replace(NO_GPU, torch=ok(**{**CPU, "version": "2.99.0"}), installed={})) is None


def test_the_oldest_versions_are_those_of_the_project() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert re.search(r'requires-python = ">=(.*)"', text)[1] == dotted(OLDEST_PYTHON)
    assert re.search(r'"torch>=([\d.]+)"', text)[1] == dotted(OLDEST_TORCH)
    assert re.search(r'"triton>=([\d.]+);', text)[1] == dotted(OLDEST_TRITON)
    assert dotted(OLDEST_TORCH) in TORCH_TRITON
    assert sorted(OLDEST_DRIVER.values(), key=int) == [OLDEST_DRIVER[major] for major in sorted(OLDEST_DRIVER)]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("2.11.0+cu130", (2, 11, 0)), ("3.6.0rc1", (3, 6, 0)), ("2.13.0.dev20260101", (2, 13, 0)), ("", ()), (None, ()), ("unknown", ())],
)  # fmt: skip
def test_version_tuple(text: str | None, numbers: tuple[int, ...]) -> None:
    assert version_tuple(text) == numbers
