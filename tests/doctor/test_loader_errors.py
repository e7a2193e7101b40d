"""What loaders say, as people have reported it, and what the doctor makes of it."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tileflash.doctor.loader_errors import BuiltFor, Surroundings, explain_loader_error

REINSTALL = "python -m pip install --force-reinstall x"


def _around(**changes: object) -> Surroundings:
    facts: dict = {"torch": "2.11.0+cu130", "torch_cuda": "13.0", "torch_cxx11_abi": True, "distribution": "flash-attn"}
    return Surroundings("FlashAttention 2", REINSTALL, **(facts | changes))


NEW_ABI = "_ZN3c105ErrorC2ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
SO = "/usr/lib/python3/dist-packages/flash_attn_2_cuda.cpython-310-x86_64-linux-gnu.so"


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        # flash-attention issues 836, 853, 919, 1644, 1832, 2219
        (f"ImportError: {SO}: undefined symbol: {NEW_ABI}",
         "abi-mismatch", ["another PyTorch than torch 2.11.0+cu130", NEW_ABI]),
        (f"ImportError: {SO}: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationESs",
         "abi-mismatch", ["old C++ ABI, this torch"]),
        (f"ImportError: {SO}: undefined symbol: _ZN3c104cuda9SetDeviceEi",
         "abi-mismatch", ["_ZN3c104cuda9SetDeviceEi"]),
        (f"ImportError: {SO}: undefined symbol: _ZN2at4_ops5zeros4callEN3c108ArrayRefINS2_6SymIntEEE",
         "abi-mismatch", []),
        (f"ImportError: {SO}: undefined symbol: _ZNK5torch8autograd4Node4nameEv", "abi-mismatch", []),
        ("OSError: x.so: undefined symbol: aoti_torch_abi_version", "abi-mismatch", []),
        ("ImportError: x.so: undefined symbol: PyUnicode_InternFromString_",
         "python-abi-mismatch", [platform.python_version()]),
        ("ImportError: x.so: undefined symbol: cudaLaunchKernelExC", "cuda-mismatch", ["cudaLaunchKernelExC"]),
        ("ImportError: x.so: undefined symbol: __nvJitLinkAddData_12_1, version libnvJitLink.so.12",
         "library-mismatch", []),
        ("ImportError: x.so: undefined symbol: _ZN4llvm2at5thingEv", "library-mismatch", ["_ZN4llvm2at5thingEv"]),
        ("ImportError: libc10.so: cannot open shared object file: No such file or directory",
         "abi-mismatch", ["libc10.so"]),
        ("ImportError: libcudart.so.12: cannot open shared object file: No such file",
         "cuda-mismatch", ["CUDA 12", "brings CUDA 13.0"]),
        ("ImportError: libcudnn.so.8: cannot open shared object file", "cuda-mismatch", ["libcudnn.so.8"]),
        ("OSError: libcuda.so.1: cannot open shared object file", "driver-missing", ["container"]),
        ("ImportError: libGL.so.1: cannot open shared object file", "missing-library", ["libGL.so.1"]),
        ("ImportError: libfoo.so.3: cannot open shared object file", "missing-library", ["libfoo.so.3"]),
        ("ImportError: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.32' not found (required by x.so)",
         "old-system-library", ["GLIBC_2.32"]),
        ("ImportError: libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by x.so)",
         "old-system-library", ["GLIBCXX_3.4.32"]),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device",
         "gpu-not-supported", ["compute capability"]),
        ("RuntimeError: The NVIDIA driver on your system is too old (found version 11040).", "driver-too-old", []),
        ("ImportError: DLL load failed while importing flash_attn_2_cuda: The specified module could not be found.",
         "missing-library", ["DLL"]),
        ("ImportError: A module that was compiled using NumPy 1.x cannot be run in NumPy 2.0",
         "numpy-mismatch", ["NumPy"]),
        ("AttributeError: partially initialized module 'torch' has no attribute 'nn' (most likely due to a circular import)",
         "shadowed", ["named torch"]),
        ("ModuleNotFoundError: No module named 'einops'", "missing-module", ["einops"]),
        ("ModuleNotFoundError: No module named 'flash_attn.ops'", "incomplete", ["flash_attn.ops"]),
        ("ImportError: cannot import name 'custom_fwd' from 'torch.cuda.amp' (/x.py)",
         "version-mismatch", ["torch.cuda.amp", "custom_fwd"]),
        ("ImportError: x.so: invalid ELF header", "damaged", []),
        ("ImportError: /opt/libgomp-d22c30c5.so.1: cannot allocate memory in static TLS block",
         "static-tls", ["/opt/libgomp-d22c30c5.so.1"]),
        ("RuntimeError: Failed to find C compiler. Please specify via CC environment variable",
         "compiler-missing", ["compiler"]),
        ("CalledProcessError: main.c:6: fatal error: Python.h: No such file or directory",
         "headers-missing", ["Python.h"]),
        ("PTXASError: ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'",
         "gpu-not-supported", ["sm_121a"]),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 MiB", "out-of-memory", ["other processes"]),
        ("ImportError: xFormers can't load C++/CUDA extensions. xFormers was built for: PyTorch 2.9.0+cu128 with CUDA 1208",
         "abi-mismatch", ["built for torch 2.9.0+cu128"]),
        ("ImportError: xFormers was built for a different version of PyTorch or Python.",
         "abi-mismatch", ["does not say for which"]),
        ("ValueError: something else", "unknown", ["FlashAttention 2"]),
    ],
)  # fmt: skip
def test_meaning(said: str, kind: str, words: list[str]) -> None:
    meaning = explain_loader_error(said, _around())
    assert meaning.kind == kind
    for word in words:
        assert word in meaning.what
    assert meaning.fix


def test_what_it_was_built_for_is_told_and_before_that_guessed_from_the_symbol() -> None:
    said = f"ImportError: undefined symbol: {NEW_ABI}"
    known = explain_loader_error(said, _around(built_for=BuiltFor("2.6", "12", False)))
    assert known.what.endswith("; it was built for torch 2.6, CUDA 12, the old C++ ABI")
    assert explain_loader_error(said, _around(torch_cxx11_abi=False)).what.endswith(
        "the new C++ ABI, this torch with the old"
    )
    assert (
        "ABI, this torch" not in explain_loader_error(said, _around()).what
    )  # new and new: it is not the ABI of strings


@pytest.mark.skipif(shutil.which("gcc") is None or sys.platform != "linux", reason="needs gcc, and an ELF loader")
def test_the_real_loaders_words(tmp_path: Path) -> None:
    """Of a library that is built here against a PyTorch that there is not."""
    (tmp_path / "x.c").write_text(
        "void _ZN3c105ErrorC2ENS_14SourceLocationESs(void);\n"
        "void *PyInit_built_for_another(void) { _ZN3c105ErrorC2ENS_14SourceLocationESs(); return 0; }\n"
    )
    library = tmp_path / "built_for_another.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "x.c")], check=True, timeout=60)
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import built_for_another"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert explain_loader_error(run.stderr, _around()).kind == "abi-mismatch", run.stderr


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        ("undefined symbol: _ZN3c104cuda9SetDeviceEi", REINSTALL),
        ("libc.so.6: version `GLIBC_2.34' not found", f"{REINSTALL} --no-binary flash-attn"),
        ("libgomp.so.1: cannot open shared object file", "sudo apt-get install -y libgomp1"),
        ("/x/libgomp.so.1: cannot allocate memory in static TLS block", "export LD_PRELOAD=/x/libgomp.so.1"),
        ("No module named 'cutlass'", "install nvidia-cutlass-dsl"),
    ],
)
def test_the_remedy_is_a_command(said: str, fix: str) -> None:
    assert explain_loader_error(said, _around()).fix.endswith(fix)
