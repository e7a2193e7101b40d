"""Every default configuration of the Hopper kernels compiles without a GPU, and of each option one band: bf16 with Triton 3.6.0 (torch
2.11's), fp16 with the newest.

In processes of their own, side by side: the tests' process runs Triton in its interpreter, and a bad shared-memory shape aborts a process.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parents[2] / "src"
TRITON_36 = Path(sys.prefix) / "triton-3.6.0"
SHARED_LIMIT_BYTES = 227 * 1024
# Stores and loads together. In the forward pass none are in the loops over tiles: what is kept there is read once for a tile of queries.
SPILL_LIMIT_BYTES = {
    ("forward", 64): 180, ("forward", 256): 220, ("backward", 64): 128, ("backward", 128): 128,
    ("backward keys", 64): 64, ("backward keys", 128): 96, ("backward queries", 256): 96,
}  # fmt: skip
LOOP_SPILL_LIMIT = {("backward", 64): 4}  # loads and stores, where a tile is masked
# With a soft cap (and, in the forward pass, sinks).
CAPPED_SPILL_LIMIT_BYTES = {
    ("forward", 64): 180, ("forward", 256): 640, ("backward", 128): 320, ("backward keys", 128): 400, ("backward queries", 128): 48,
}  # fmt: skip
CAPPED_LOOP_SPILL_LIMIT = {("forward", 256): 8, ("backward", 128): 56, ("backward keys", 128): 48}
# Packed sequences: the bounds of a band differ from tile to tile.
PACKED_SPILL_LIMIT_BYTES = {**SPILL_LIMIT_BYTES, ("forward", 64): 240, ("forward", 256): 280}
PACKED_LOOP_SPILL_LIMIT = {("backward", 64): 24}
LIMITS = {
    "soft cap": (CAPPED_SPILL_LIMIT_BYTES, CAPPED_LOOP_SPILL_LIMIT), "packed": (PACKED_SPILL_LIMIT_BYTES, PACKED_LOOP_SPILL_LIMIT),
}  # fmt: skip
# Products in the loop and before it, for each of the consumer warpgroups: fewer would mean that some went to FMA units.
LEAST_WGMMA = {
    ("forward", 64): 3 * 24, ("forward", 128): 2 * 32, ("forward", 256): 2 * 40,
    ("backward", 64): 2 * 36, ("backward", 128): 2 * 32, ("backward", 256): 2 * 76,
    ("backward keys", 64): 2 * 28, ("backward keys", 128): 2 * 24, ("backward keys", 256): 2 * 72,
    ("backward queries", 64): 2 * 32, ("backward queries", 128): 2 * 40, ("backward queries", 256): 2 * 68,
}  # fmt: skip
# A wait at a hardware barrier must stand where it was written: duplicated in two branches it would hang (facebookexperimental/triton#1040).
NAMED_BARRIERS = {("backward", 64): 2 * 1, ("backward", 256): 2 * 3, ("backward keys", 256): 2 * 3}


def start(dtype: str, triton_path: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [triton_path, str(SOURCE)]))
    command = [sys.executable, "-m", "tileflash.kernels.hopper.offline", dtype, "--tested"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.fixture(scope="module")
def reports() -> dict[str, list[dict[str, Any]]]:
    """By dtype. Both compilations run at once."""
    runs = {"fp16": start("fp16", "")}
    if TRITON_36.is_dir():
        runs["bf16"] = start("bf16", str(TRITON_36))
    found = {}
    for dtype, run in runs.items():
        out, err = run.communicate(timeout=1700)
        assert run.returncode == 0, err[-2000:]
        found[dtype] = [json.loads(line) for line in out.splitlines()]
    return found


@pytest.mark.timeout(1800)  # two minutes on two idle cores
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_shipped_configurations_fit_the_hardware(dtype: str, reports: dict[str, list[dict[str, Any]]]) -> None:
    if dtype not in reports:
        pytest.skip(f"Triton 3.6.0 is not in {TRITON_36} (`make test` puts it there)")
    # Three bands; forward in three sizes; backward in two sizes with and without grouped heads, and the wide one. In bf16 also what makes
    # d_k and d_v alone, and d_q alone, in three sizes each; a soft cap forward in three sizes, backward in two; packed in three. In fp16
    # one size: the two of determinism, and four kernels with a soft cap and four packed.
    options = (2 * 3) + (3 + 2) + 2 * 3 if dtype == "bf16" else 2 + 4 + 4
    assert len(reports[dtype]) == 3 * (3 + 2 * 2 + 1) + options
    for report in reports[dtype]:
        name = f"{report}"
        key = (report["kernel"].split(",")[0], report["head_dim"])
        assert report["shared_bytes"] <= SHARED_LIMIT_BYTES, name
        _, _, option = report["kernel"].partition(", ")
        spill_limit, loop_limit = LIMITS.get(option, (SPILL_LIMIT_BYTES, LOOP_SPILL_LIMIT))
        assert report["spill_bytes"] <= spill_limit.get(key, 0), name
        assert report["spills_in_loops"] <= loop_limit.get(key, 0), name
        assert report["serialised"] == 0, f"ptxas serialised wgmma: {name}"
        assert report["wgmma"] >= LEAST_WGMMA[key], f"products are missing: {name}"
        assert report["named_barriers"] == NAMED_BARRIERS.get(key, 0), name
        # What a thread starts with: 65,536 registers divided by the threads, 12 warps or (3 consumers) 16.
        assert report["registers"] == (128 if key == ("forward", 64) else 168), name


def test_spills_are_looked_for_in_loops_that_multiply() -> None:
    loop = [".L_x_1:", "  HGMMA R1", "  {}", "  @P0 BRA `(.L_x_1) ;"]
    outer = [".L_x_0:", "  LDL R1", *loop, "  STL R2", "  HGMMA R3", "  BRA `(.L_x_0) ;", "  EXIT", "  LDL R4"]
    far = [*outer, ".L_x_9:", "  STL R5", "  BRA `(.L_x_1) ;"]
    wait = [".L_x_3:", "  LDL R6", "  @!P0 BRA `(.L_x_3) ;"]
    program = "import sys; from tileflash.kernels.hopper.offline import spills_in_loops; print(spills_in_loops(sys.stdin.read()))"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    environment.pop("TRITON_INTERPRET", None)
    for within, count in (("STL R7", 1), ("LDL.64 R7", 1), ("LDS R7", 0)):
        text = "\n".join([*far, *wait]).format(within)
        run = subprocess.run(
            [sys.executable, "-c", program], input=text, capture_output=True, text=True, env=environment
        )
        assert run.stdout.strip() == str(count), run.stderr
