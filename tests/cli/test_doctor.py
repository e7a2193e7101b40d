"""`tileflash doctor` as a user types it, on this machine and on machines that are broken in many ways."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tileflash
from tileflash.attention.dispatch import BACKENDS
from tileflash.cli import app
from tileflash.doctor.machine import Machine, installed_versions

SOURCE = str(Path(__file__).parents[2] / "src")
UNDEFINED = (
    "/x/flash_attn_2_cuda.cpython-311-x86_64-linux-gnu.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationESs"
)


def doctor(place: Path, *flags: str, **variables: str) -> tuple[int, str, str]:
    """The command with the packages in `place` before all others."""
    environment = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "TRITON_INTERPRET")}
    path = os.pathsep.join([str(place), SOURCE])
    run = subprocess.run(
        [sys.executable, "-m", "tileflash", "doctor", *flags],
        env={**environment, "PYTHONPATH": path, **variables},
        cwd=place, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return run.returncode, run.stdout, run.stderr


def package(place: Path, name: str, body: str, version: str | None = None) -> None:
    directory = place / name
    directory.mkdir(parents=True)
    (directory / "__init__.py").write_text(body)
    if version is not None:
        information = place / f"{name}-{version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        )


def no_gpu(place: Path) -> None:
    """The driver is not asked."""
    (place / "pynvml.py").write_text("raise ImportError('not here')")


def test_this_machine(tmp_path: Path, device: str) -> None:
    status, out, error = doctor(tmp_path, "--json", TRITON_CACHE_DIR=str(tmp_path / "cache"))
    found = json.loads(out)
    assert error == ""
    assert list(found) == [
        "schema", "date", "ok", "versions", "gpus", "environment", "backends", "peers", "cache", "problems",
    ]  # fmt: skip
    assert found["schema"] == 1
    assert found["versions"]["tileflash"] == tileflash.__version__
    assert found["versions"]["torch"].startswith(installed_versions()["torch"].split("+")[0])
    assert found["environment"]["TRITON_CACHE_DIR"] == found["cache"]["directory"] == str(tmp_path / "cache")
    assert [backend["name"] for backend in found["backends"]] == list(BACKENDS)
    served = [backend for backend in found["backends"] if backend["serves"]]
    assert {backend["name"] for backend in served} >= {"sdpa-cpu", "tiled", "sdpa-math", "reference"}
    for backend in served:
        assert backend["self_test"]["status"] == "ok"
    page = (Path(SOURCE).parent / "docs" / "doctor.md").read_text(encoding="utf-8")
    test = served[0]["self_test"]
    for key in (*served[0], *test, *test["cases"][0], *test["cases"][0]["results"][0], *(found["gpus"] or [{}])[0]):
        assert f"`{key}`" in page, key
    assert all(backend["self_test"] is None for backend in found["backends"] if not backend["serves"])
    if device == "cuda":
        assert found["gpus"][0]["usable"] is True
        assert {backend["name"]: backend for backend in found["backends"]}["triton"]["device"] == "cuda"
    assert status == (0 if found["ok"] else 1)
    assert found["ok"] is not any(problem["severity"] == "error" for problem in found["problems"])


@pytest.mark.parametrize(
    ("body", "identifier", "words"),
    [
        ("raise OSError('libcudart.so.12: cannot open shared object file: No such file')", "torch.import", "was built for CUDA 12"),
        ("import os\nos.abort()", "torch.crashed", "takes the process down"),
        ("import time\ntime.sleep(600)", "torch.timeout", "does not come to an end"),
        ("raise ModuleNotFoundError(\"No module named 'torch'\")", "torch.missing", "PyTorch is not installed"),
    ],
)  # fmt: skip
def test_where_pytorch_cannot_be_imported(tmp_path: Path, body: str, identifier: str, words: str) -> None:
    package(tmp_path, "torch", body)
    no_gpu(tmp_path)
    package(tmp_path, "triton", "__version__ = '3.7.1'")
    package(tmp_path, "numpy", "__version__ = '2.3.5'\ndef arange(n): return range(n)")  # the real one takes a while
    package(tmp_path, "flash_attn", "raise AssertionError('not tried')", "2.8.3")
    status, out, error = doctor(tmp_path, "--timeout-seconds", "3")
    assert (status, error) == (1, "")
    problem = out[out.index("FAILED torch: ") :].splitlines()
    assert words in problem[0]
    assert problem[1].startswith("  said: ")
    assert problem[2].startswith("  fix: ")
    assert "-m pip install" in problem[2]
    assert "'torch>=2.11'" in problem[2]
    assert "FlashAttention 2 2.8.3: not tried, PyTorch cannot be imported" in out
    assert "none: they are loaded with PyTorch" in out
    assert "Traceback" not in out
    assert "\x1b" not in out  # no colours in a pipe
    found = (
        json.loads(doctor(tmp_path, "--json", "--timeout-seconds", "3")[1]) if identifier == "torch.crashed" else None
    )
    if found is not None:
        assert found["backends"] == []
        assert found["ok"] is False
        assert identifier in [problem["id"] for problem in found["problems"]]


def test_a_broken_triton_and_broken_other_libraries(tmp_path: Path) -> None:
    no_gpu(tmp_path)
    package(tmp_path, "triton", "import os\nos.abort()", "3.7.1")
    package(tmp_path, "flash_attn", f"raise ImportError({UNDEFINED!r})", "2.7.4+cu12torch2.6cxx11abiFALSE")
    package(tmp_path / "flash_attn", "cute", "")  # FlashAttention 2 brings such files along
    package(
        tmp_path,
        "flash_attn_interface",
        "import sys\nprint('boom', file=sys.stderr, flush=True)\nimport os\nos.abort()",
        "3.0.0",
    )
    package(tmp_path, "xformers", "", "0.0.33")
    package(tmp_path / "xformers", "ops", "")
    status, out, _ = doctor(tmp_path, "--json", "--no-self-test", CUDA_VISIBLE_DEVICES="")
    found = json.loads(out)
    assert status == 1
    assert [(problem["id"], problem["severity"]) for problem in found["problems"] if not problem["id"].startswith("cache")] == [
        ("triton.crashed", "error"),
        ("peer.failed", "warning"), ("peer.crashed", "warning"),
    ]  # fmt: skip
    backends = {backend["name"]: backend for backend in found["backends"]}
    assert list(backends) == list(BACKENDS)
    assert backends["triton"]["loads"] is False
    assert backends["triton"]["load_error"].startswith("the process died of SIGABRT")
    assert backends["triton"]["load_error"] in backends["triton"]["reasons"][0]
    assert backends["tiled"]["serves"] is True
    assert backends["tiled"]["self_test"] is None
    peers = {peer["name"]: peer for peer in found["peers"]}
    assert [peer["status"] for peer in peers.values()] == ["failed", "crashed", "absent", "ok", "absent"]
    assert peers["FlashAttention 2"]["built_for"] == {"torch": "2.6", "cuda": "12", "cxx11_abi": False}
    assert peers["FlashAttention 2"]["error"] == f"ImportError: {UNDEFINED}"
    assert "boom" in peers["FlashAttention 3"]["error"]
    mismatch = next(problem for problem in found["problems"] if problem["subject"] == "FlashAttention 2")
    assert "ABI mismatch: FlashAttention 2 was built against another PyTorch than torch 2." in mismatch["what"]
    assert "it was built for torch 2.6, CUDA 12, the old C++ ABI; tileflash does not need it" in mismatch["what"]
    assert mismatch["fix"].endswith("--no-build-isolation --no-cache-dir flash-attn")


def test_other_commands_point_here_where_a_package_cannot_be_loaded(tmp_path: Path) -> None:
    package(tmp_path, "torch", "raise ImportError('libtorch.so: undefined symbol: x')")
    run = subprocess.run(
        [sys.executable, "-m", "tileflash", "explain"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), SOURCE])},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.returncode == 1
    assert run.stderr.startswith("tileflash doctor says why a package cannot be loaded, and what mends it\n")
    assert "ImportError: libtorch.so: undefined symbol: x" in run.stderr


def test_help_has_examples_and_exit_statuses() -> None:
    text = CliRunner().invoke(app, ["doctor", "--help"], env={"COLUMNS": "160"}).output
    assert "tileflash doctor --json > doctor.json" in text
    assert "Exit status: 0 all is well, 1 something must be mended" in text


def test_bad_usage_is_status_2() -> None:
    for flags in (["--jsn"], ["--timeout-seconds", "soon"], ["--timeout-seconds", "0"]):
        assert CliRunner().invoke(app, ["doctor", *flags]).exit_code == 2


def test_what_this_process_has_installed_is_what_the_rules_see() -> None:
    assert set(installed_versions()) >= {"torch", "numpy"}
    assert Machine.__dataclass_fields__["installed"].default_factory() == installed_versions()
