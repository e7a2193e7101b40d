"""The operators' kernels compile without a GPU, with the newest Triton and with 3.6.0, spill nothing and load 16 bytes at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
TRITON_36 = Path(sys.prefix) / "triton-3.6.0"


# The same group as the other compilations, which are heavy.
@pytest.mark.xdist_group("compile")
@pytest.mark.parametrize(("target", "triton"), [("sm_90", "installed"), ("sm_90", "3.6.0"), ("gfx942", "installed")])
def test_kernels_fit_the_hardware(target: str, triton: str) -> None:
    if triton == "3.6.0" and not TRITON_36.is_dir():
        pytest.skip(f"Triton 3.6.0 is not in {TRITON_36} (`make test` puts it there)")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = [str(TRITON_36)] if triton == "3.6.0" else []
    environment["PYTHONPATH"] = os.pathsep.join([*path, str(SOURCE)])
    command = [sys.executable, "-m", "tileflash.kernels.triton.offline_operators", target]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert run.returncode == 0, run.stderr[-2000:]
    reports = [json.loads(line) for line in run.stdout.splitlines()]
    kernels = {report["kernel"] for report in reports}
    assert kernels == {
        "cross_entropy_kernel", "scale_kernel", "norm_forward_kernel", "norm_backward_kernel", "gated_forward_kernel",
        "gated_backward_kernel", "rotary_kernel", "add_parts_kernel", "square_sum_kernel", "finish_kernel", "adamw_kernel", "add_kernel",
        "add_rows_kernel",
    }  # fmt: skip
    assert len(reports) == 28 + 18 + 12 + 6 + 11 + 2
    for report in reports:
        assert report["spill_bytes"] == 0, report
        assert report["shared_bytes"] <= 32 * 1024, report
        if target == "sm_90":  # two programs of 256 threads, one of 512
            assert report["registers"] <= 104, report
            if report["kernel"] != "finish_kernel":  # one program, of a few kilobytes
                assert report["widest_bytes"] == 16, report
