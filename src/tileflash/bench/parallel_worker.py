"""One rank of a measurement: `python -m tileflash.bench.parallel_worker REQUEST.json`, by torchrun where there are several.

It trains by the trainer itself, as `tileflash train` does, and leaves files beside the request: `RUN.jsonl` by rank 0, the trainer's
log, which has each step's time and loss; `RUN.RANK.json` by every rank, with its peak memory.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any


def work(request: Path) -> int:
    """Do the runs of a request one after the other; the exit status, that of `tileflash train`."""
    import torch

    from tileflash.bench.flags import OUT_OF_MEMORY
    from tileflash.train import TrainConfig, TrainingOutOfMemoryError, train
    from tileflash.train.metrics import peak_memory
    from tileflash.train.setup import rank_device

    runs: list[dict[str, Any]] = json.loads(request.read_text(encoding="utf-8"))
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    for number, settings in enumerate(runs):
        config = TrainConfig(**settings, log_json=str(request.parent / f"{number}.jsonl"))
        if torch.cuda.is_initialized():
            gc.collect()  # what an earlier run left in circles must be gone before its memory can be
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            train(config)
        except TrainingOutOfMemoryError as error:
            _tell(request, number, rank, {OUT_OF_MEMORY: True, "reason": str(error)})
            return 3
        used, reserved = peak_memory(rank_device(config.device, local_rank))
        _tell(request, number, rank, {"peak_bytes": used, "reserved_bytes": reserved})
    return 0


def _tell(request: Path, number: int, rank: int, facts: dict[str, Any]) -> None:
    (request.parent / f"{number}.{rank}.json").write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    status = work(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # as `tileflash train`: a process group's threads outlive the interpreter's own end
