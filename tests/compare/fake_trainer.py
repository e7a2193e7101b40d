"""Stands for `tileflash train` where a test needs an end that a real run would not give on demand.

Called as `python fake_trainer.py BEHAVIOUR MODEL [flags]`. BEHAVIOUR is a JSON object: kind of end -> list of
"SCHEME:SEQUENCE" (or "SCHEME:SEQUENCE:rREPEAT") that end so; the rest finish. Writes the log that the trainer writes.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path

MEBIBYTE = 2**20


def main() -> int:
    behaviour = json.loads(sys.argv[1])
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    for name in ("batch-size", "sequence-length", "total-batch-size", "num-iteration", "seed", "warmup-iterations"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("dtype", "device", "learning-rate", "log-json"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--flash", action="store_true")
    for name in ("fused-operators", "compile"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--master-weights")
    parser.add_argument("--cuda-graph", action=argparse.BooleanOptionalAction)
    args = parser.parse_args(sys.argv[2:])
    assert args.total_batch_size == args.batch_size * args.sequence_length
    scheme = "flash" if args.flash else "baseline"
    repeat = int(args.log_json.removesuffix(".jsonl").rsplit("-r", 1)[1])

    def is_asked(kind: str) -> bool:
        names = (f"{scheme}:{args.sequence_length}", f"{scheme}:{args.sequence_length}:r{repeat}")
        return any(name in behaviour.get(kind, []) for name in names)

    log = Path(args.log_json).open("w", buffering=1)  # noqa: SIM115 - it ends with the process

    def write(**event: object) -> None:
        log.write(json.dumps(event) + "\n")

    environment = {"gpu": "Fake GPU", "driver": "1.2", "cuda": "13.0", "torch": "2.11", "triton": "3.6"}
    environment |= {"gpu_memory_bytes": 80 * 2**30, "python": "3.12", "cpu": "Fake CPU", "commit": "abc1234"}
    environment["date"] = "2026-11-30T09:00:00Z"
    config = {key: value for key, value in vars(args).items() if key != "log_json"}
    facts = {"environment": environment, "parameters": 124_000_000, "attention": f"fake {scheme}"}
    facts["cuda_graph"] = args.cuda_graph
    write(event="start", model=args.model, config=config, **facts)
    if is_asked("garbage"):
        log.write('not json\n{"event": "step", "step_ms": "nan"}\n[1, 2]\n{"event": "st\n')
    if is_asked("out_of_memory"):
        write(event="end", status="out_of_memory", message="CUDA out of memory; lower --batch-size")
        print("out of memory", file=sys.stderr)
        return 3
    if is_asked("hang"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    for step in range(1, args.num_iteration + 1):
        step_ms, peak, loss = figures(scheme, args.sequence_length, repeat, step)
        write(event="step", step=step, train_loss=loss, step_ms=step_ms, peak_used_bytes=peak, tokens_per_s=1.0)
        if is_asked("crash") and step == 3:
            print("Traceback (most recent call last):\nRuntimeError: the fake broke at step 3", file=sys.stderr)
            write(event="end", status="failed", message="RuntimeError: the fake broke at step 3")
            return 1
        if is_asked("killed") and step == 3:
            signal.raise_signal(signal.SIGKILL)
        if is_asked("slow"):
            print("slow step", step, flush=True)
            time.sleep(0.3)
    write(event="end", status="finished", message="")
    return 0


def figures(scheme: str, length: int, repeat: int, step: int) -> tuple[float, int, float]:
    """(step_ms, peak_used_bytes, loss): plausible, and known to the tests; the first step is ten times slower."""
    quadratic = length**2 / 65536
    linear = length / 64
    step_ms = 10.0 + 4.0 * linear + (quadratic if scheme == "baseline" else quadratic / 6)
    step_ms *= 1.0 + 0.01 * (repeat - 2) * (1 if scheme == "baseline" else -1)
    peak = int((900 + 12 * linear + (8 * quadratic if scheme == "baseline" else 0)) * MEBIBYTE)
    loss = 11.0 - 0.05 * step + (0.0 if scheme == "baseline" else 1e-5 * step)
    return step_ms * (10.0 if step == 1 else 1.0), peak, loss


if __name__ == "__main__":
    sys.exit(main())
