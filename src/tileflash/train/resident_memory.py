"""How much memory a process has held, without PyTorch: for processes that are to stay small, too."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def peak_resident_bytes() -> int:
    """The largest resident size of this process since its start."""
    status = Path("/proc/self/status")
    if status.is_file():
        # Not getrusage: on Linux its maximum survives exec, so that a child of a large process starts with its size.
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
