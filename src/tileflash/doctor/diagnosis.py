"""Puts the doctor's findings together: `diagnose()`, and their stable form for other programs (docs/doctor.md)."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

import tileflash
from tileflash.doctor.cache import KernelCache, cache_problems, inspect_cache
from tileflash.doctor.loader_errors import Surroundings, explain_loader_error
from tileflash.doctor.machine import OLDEST_TORCH, Machine
from tileflash.doctor.peers import PEERS, Peer, built_for, is_installed, version_of
from tileflash.doctor.problem import Problem, dotted, pip_install
from tileflash.doctor.rules import machine_problems
from tileflash.doctor.steps import Outcome, run_steps

SCHEMA = 1

# Environment variables that change what runs.
_VARIABLES = (
    "TRITON_INTERPRET", "TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_PTXAS_PATH", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES",
    "CUDA_HOME", "CC", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH",
)  # fmt: skip


@dataclass(frozen=True)
class Diagnosis:
    """What was found. `backends` and `peers` are dictionaries as in the JSON form."""

    versions: dict[str, str | None]
    gpus: list[dict[str, Any]]
    environment: dict[str, str]
    backends: list[dict[str, Any]]
    peers: list[dict[str, Any]]
    cache: KernelCache
    problems: list[Problem]

    @property
    def errors(self) -> list[Problem]:
        return [problem for problem in self.problems if problem.severity == "error"]

    def exit_status(self, strict: bool = False) -> int:
        """0 when nothing must be mended, else 1; with `strict` warnings count, too."""
        return 1 if self.errors or (strict and self.problems) else 0

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries, lists, strings, numbers, booleans and None; keys are only ever added within a schema."""
        return {
            "schema": SCHEMA,
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "ok": not self.errors,
            "versions": self.versions,
            "gpus": self.gpus,
            "environment": self.environment,
            "backends": self.backends,
            "peers": self.peers,
            "cache": self.cache.facts(),
            "problems": [asdict(problem) for problem in self.problems],
        }


def diagnose(
    *, self_test: bool = True, timeout_s: float = 120.0, on_start: Callable[[str], None] = lambda step: None
) -> Diagnosis:
    """Look at this machine. Each step (an import, a backend's self-test) gets `timeout_s` at most; `on_start` is told of it."""

    def wanted(step: str, outcomes: Mapping[str, Outcome]) -> bool:
        # After a PyTorch that cannot be imported, or a Triton that takes the process down, this would be the same again.
        return step != "backends" or not (_is_dead(outcomes.get("torch")) or _is_dead(outcomes.get("triton")))

    steps = ("driver", "numpy", "torch", "triton", "backends")
    found = run_steps(steps, timeout_s, wanted=wanted, on_start=on_start)
    machine = Machine(found["driver"], found["numpy"], found["torch"], found["triton"])
    problems = machine_problems(machine)
    cache = inspect_cache()
    backends: list[dict[str, Any]] = []
    if machine.torch.ok:
        hidden = ("triton",) if _is_dead(machine.triton) else ()
        surveyed = found["backends"]
        if hidden and surveyed.status == "skipped":
            surveyed = run_steps(["backends"], timeout_s, hidden=hidden, on_start=on_start)["backends"]
        if surveyed.ok:
            backends = surveyed.facts["backends"]
            names = [backend["name"] for backend in backends if backend["device"]] if self_test else []
            tested = run_steps([f"self-test:{name}" for name in names], timeout_s, hidden=hidden, on_start=on_start)
            for backend in backends:
                if backend["name"] == "triton" and not machine.triton.ok:
                    backend |= {"loads": False, "load_error": machine.triton.error}
                    backend["reasons"] = [f"Triton cannot be loaded: {machine.triton.error}"]
                backend["self_test"] = _self_test_facts(tested.get(f"self-test:{backend['name']}"))
            problems += [problem for backend in backends for problem in _backend_problems(backend, machine, cache)]
        else:
            problems.append(_survey_problem(surveyed, machine))
    problems += cache_problems(cache)
    peers = []
    for peer in PEERS:
        facts, peer_problems = _examine(peer, machine, timeout_s, on_start)
        peers.append(facts)
        problems += peer_problems
    return Diagnosis(
        _versions(machine),
        _gpus(machine),
        {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        backends,
        peers,
        cache,
        problems,
    )


def _is_dead(outcome: Outcome | None) -> bool:
    """Whether a step took the process down or hung: doing the same again would, too."""
    return outcome is not None and outcome.status in ("crashed", "timeout")


def _versions(machine: Machine) -> dict[str, str | None]:
    torch, driver = machine.torch.facts, machine.driver.facts
    return {
        "tileflash": tileflash.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": machine.version("torch", machine.torch),
        "torch_cuda": torch.get("cuda"),
        "torch_hip": torch.get("hip"),
        "triton": machine.triton_version,
        "numpy": machine.version("numpy", machine.numpy),
        "driver": driver.get("version"),
        "driver_cuda": driver.get("cuda"),
    }


def _gpus(machine: Machine) -> list[dict[str, Any]]:
    """PyTorch's GPUs; where it has none, the driver's, which are then not usable."""
    if gpus := machine.torch.facts.get("gpus"):
        return [{**gpu, "usable": True} for gpu in gpus]
    return [{**gpu, "usable": False} for gpu in machine.driver.facts.get("gpus", [])]


def _self_test_facts(outcome: Outcome | None) -> dict[str, Any] | None:
    """None where none was made."""
    if outcome is None:
        return None
    status = "wrong" if outcome.ok and not outcome.facts["ok"] else outcome.status
    return {
        "status": status,
        "error": outcome.error,
        "dtype": outcome.facts.get("dtype"),
        "compile_s": outcome.facts.get("compile_s"),
        "run_s": outcome.facts.get("run_s"),
        "cases": outcome.facts.get("cases", []),
    }


def _backend_problems(backend: dict[str, Any], machine: Machine, cache: KernelCache) -> list[Problem]:
    test, name = backend["self_test"], backend["name"]
    if not backend["loads"] and machine.triton.ok:  # otherwise Triton's own problem is told
        fix = f"cd /path/to/tileflash && {pip_install('--force-reinstall', '--no-deps', '.')}"
        meaning = explain_loader_error(backend["load_error"], Surroundings("tileflash's kernels", fix))
        return [Problem("kernels.not-loaded", name, "error", meaning.what, meaning.fix, backend["load_error"])]
    if test is None or test["status"] == "ok":
        return []
    # What is cached may be of a compiler that died half-way, and costs seconds to make again.
    fix = f"{cache.empty_command} && tileflash doctor" if name == "triton" else _instead_of(name)
    if test["status"] == "wrong":
        wrong = [(result, case["case"]) for case in test["cases"] for result in case["results"] if not result["ok"]]
        result, case = wrong[0]
        error = "not a number" if result["error"] is None else f"off by {result['error']:.1e}"
        what = f"{name} computes wrong results: {result['name']} is {error}, {result['tolerance']:.1e} is allowed"
        return [Problem("self-test.wrong", name, "error", what, fix, case)]
    if test["status"] == "failed":
        facts = machine.torch.facts
        meaning = explain_loader_error(
            test["error"], Surroundings(name, fix, facts["version"], facts["cuda"], facts["cxx11_abi"])
        )
        what = f"{name} fails on a small problem" if meaning.kind == "unknown" else meaning.what
        return [Problem("self-test.failed", name, "error", what, meaning.fix, test["error"])]
    how = "takes the process down" if test["status"] == "crashed" else "does not come to an end"
    return [
        Problem(f"self-test.{test['status']}", name, "error", f"{name} {how} on a small problem", fix, test["error"])
    ]


def _instead_of(name: str) -> str:
    """What to do about a backend that is not ours."""
    if name.startswith("sdpa-"):
        return f'{pip_install("--upgrade", "torch")} (until then name another: attention(..., backend="tiled"))'
    return pip_install("--force-reinstall", f"torch>={dotted(OLDEST_TORCH)}")  # it is nothing but PyTorch's operators


def _survey_problem(outcome: Outcome, machine: Machine) -> Problem:
    """PyTorch loads, and tileflash on top of it does not."""
    reinstall = pip_install("--force-reinstall", f"torch>={dotted(OLDEST_TORCH)}")
    meaning = explain_loader_error(outcome.error, Surroundings("tileflash", reinstall, machine.torch.facts["version"]))
    what = "tileflash's backends cannot be loaded" if meaning.kind == "unknown" else meaning.what
    return Problem("backends.not-loaded", "tileflash", "error", what, meaning.fix, outcome.error)


def _examine(
    peer: Peer, machine: Machine, timeout_s: float, on_start: Callable[[str], None]
) -> tuple[dict[str, Any], list[Problem]]:
    """Import another library in a process of its own, where it is installed."""
    facts: dict[str, Any] = {"name": peer.name, "module": peer.module, "version": version_of(peer), "error": ""}
    built = built_for(peer)
    facts["built_for"] = asdict(built)
    if not is_installed(peer):
        return {**facts, "status": "absent"}, []
    if not machine.torch.ok:
        return {**facts, "status": "skipped", "error": "PyTorch cannot be imported"}, []
    step = f"import:{peer.module}"
    outcome = run_steps([step], timeout_s, on_start=on_start)[step]
    if facts["version"] is None:
        if not outcome.ok and peer.module == "flash_attn.cute":
            # FlashAttention 2 may bring files of FlashAttention 4, without what they need: nobody installed that.
            return {**facts, "status": "absent"}, []
        facts["version"] = outcome.facts.get("version")
    facts |= {"status": outcome.status, "error": outcome.error}
    if outcome.ok:
        return facts, []
    torch = machine.torch.facts
    around = Surroundings(
        peer.name, peer.reinstall, torch["version"], torch["cuda"], torch["cxx11_abi"], built, peer.distributions[0]
    )
    meaning = explain_loader_error(outcome.error, around)
    what = meaning.what
    if meaning.kind == "unknown" and outcome.status != "failed":
        how = "takes the process down" if outcome.status == "crashed" else "does not come to an end"
        what = f"importing {peer.module} {how}"
    what += "; tileflash does not need it"
    return facts, [Problem(f"peer.{outcome.status}", peer.name, "warning", what, meaning.fix, outcome.error)]
