"""The diagnosis for people: a section each, one line a finding, and the problems with their remedies at the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tileflash.doctor.diagnosis import Diagnosis

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"ok": "green", "-": "dim", "WARNING": "yellow", "FAILED": "bold red"}


def print_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    """Print all of it; on what is no terminal without colours."""
    from rich.text import Text

    def line(mark: str, text: str) -> None:
        console.print(Text.assemble("  ", (f"{mark:<8}", _STYLES.get(mark, "")), text))

    for title, lines in _sections(diagnosis):
        console.print(Text(title, style="bold"))
        for mark, text in lines:
            line(mark, text)
    for problem in diagnosis.problems:
        mark = "FAILED" if problem.severity == "error" else "WARNING"
        console.print(Text.assemble((mark, _STYLES[mark]), f" {problem.subject}: {problem.what}"))
        if problem.said:
            console.print(Text(f"  said: {_one_line(problem.said)}", style="dim"))
        console.print(Text.assemble("  ", ("fix:", "bold"), f" {problem.fix}"))
    console.print(Text(_conclusion(diagnosis), style="bold"))


def _conclusion(diagnosis: Diagnosis) -> str:
    errors, all_problems = len(diagnosis.errors), len(diagnosis.problems)
    if not all_problems:
        return "all is well"
    warnings = all_problems - errors
    if not errors:
        return f"all is well with tileflash; {_count(warnings, 'warning')}"
    return f"{_count(errors, 'error')}" + (f", {_count(warnings, 'warning')}" if warnings else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _sections(diagnosis: Diagnosis) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    marks = {"error": "FAILED", "warning": "WARNING"}
    worst: dict[str, str] = {}
    for problem in diagnosis.problems:
        if worst.get(problem.subject) != "FAILED":
            worst[problem.subject] = marks[problem.severity]
    yield "versions", _version_lines(diagnosis, worst)
    yield (
        "GPUs",
        [_gpu_line(gpu, worst) for gpu in diagnosis.gpus] or [("-", "neither the driver nor PyTorch sees one")],
    )
    if diagnosis.environment:
        yield "environment", [("-", f"{name}={value}") for name, value in diagnosis.environment.items()]
    backends = [_backend_line(backend) for backend in diagnosis.backends]
    yield "backends", backends or [(worst.get("torch", "-"), "none: they are loaded with PyTorch")]
    yield "other attention libraries (tileflash needs none)", [_peer_line(peer) for peer in diagnosis.peers]
    cache = diagnosis.cache
    size = f"{cache.bytes / 2**20:,.1f} MiB in {cache.files:,} files" if cache.exists else "not there yet"
    free = "" if cache.free_bytes is None else f", {cache.free_bytes / 2**30:,.1f} GiB free"
    text = f"{cache.directory}: {size}, {'writable' if cache.writable else 'not writable'}{free}; empty it: {cache.empty_command}"
    yield "kernel cache", [(worst.get("kernel cache", "ok"), text)]


def _version_lines(diagnosis: Diagnosis, worst: dict[str, str]) -> list[tuple[str, str]]:
    versions = diagnosis.versions
    for_what = f"CUDA {versions['torch_cuda']}" if versions["torch_cuda"] else ""
    for_what = for_what or (f"HIP {versions['torch_hip']}" if versions["torch_hip"] else "no CUDA")
    loaded = versions["torch_cuda"] or versions["torch_hip"] or diagnosis.backends
    extras = {"torch": f" ({for_what})" if loaded else ""}
    if versions["driver"]:
        extras["driver"] = f" (CUDA up to {versions['driver_cuda']})"
    lines = [("ok", f"tileflash {versions['tileflash']} on {versions['platform']}")]
    for name in ("python", "torch", "triton", "numpy", "driver"):
        text = f"{name} {versions[name]}{extras.get(name, '')}" if versions[name] else f"{name}: none"
        lines.append((worst.get(name, "ok" if versions[name] else "-"), text))
    if compiler := worst.get("C compiler"):
        lines.append((compiler, "C compiler"))
    return lines


def _gpu_line(gpu: dict[str, Any], worst: dict[str, str]) -> tuple[str, str]:
    text = f"{gpu['index']}: {gpu['name']}, capability {gpu['capability']}"
    if gpu["memory_bytes"]:
        text += f", {gpu['memory_bytes'] / 2**30:,.1f} GiB, {gpu['free_memory_bytes'] / 2**30:,.1f} GiB free"
    if not gpu["usable"]:
        return "FAILED", f"{text}: PyTorch does not use it"
    return worst.get(gpu["name"], worst.get("GPU", "ok")), text


def _backend_line(backend: dict[str, Any]) -> tuple[str, str]:
    name = f"{backend['name']:<15}"
    if not backend["device"]:
        return "-", f"{name} {_one_line('; '.join(backend['reasons']))}"
    test = backend["self_test"]
    if test is None:
        return "ok", f"{name} serves on {backend['device']} (not tested)"
    if test["status"] not in ("ok", "wrong"):
        return "FAILED", f"{name} {test['status']}: {_one_line(test['error'])}"
    results = [result for case in test["cases"] for result in case["results"]]
    shares = [
        float("inf") if r["error"] is None else r["error"] / r["tolerance"] if r["tolerance"] else 0.0 for r in results
    ]
    worst = results[shares.index(max(shares))]
    error = "NaN" if worst["error"] is None else f"{worst['error']:.1e}"
    text = (
        f"{name} {backend['device']} {test['dtype']}, forward and backward: largest error {error} of {worst['tolerance']:.1e} "
        f"allowed ({worst['name']}); compile {test['compile_s']:.1f} s, run {test['run_s']:.1f} s"
    )
    return "ok" if test["status"] == "ok" else "FAILED", text


def _peer_line(peer: dict[str, Any]) -> tuple[str, str]:
    if peer["status"] == "absent":
        return "-", f"{peer['name']}: not installed"
    text = f"{peer['name']} {peer['version'] or ''}".rstrip()
    if peer["status"] == "ok":
        return "ok", text
    if peer["status"] == "skipped":
        return "-", f"{text}: not tried, {peer['error']}"
    return "WARNING", f"{text}: {peer['status']}: {_one_line(peer['error'])}"
