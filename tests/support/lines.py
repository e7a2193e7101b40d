"""Ledger lines as the suites write them, with figures that are easy to reckon with."""

from __future__ import annotations

from tileflash.bench import Line, Sitting, Statistic

H200 = Sitting(
    "run-1", "2026-12-01T09:30:00Z", "abc1234", "NVIDIA H200", {"torch": "2.11.0+cu130", "driver": "580.159.04"}
)


def _figure(median: float, repeats: int = 3) -> Statistic:
    return Statistic(median, median * 0.9, median * 1.1, repeats)


def attention_lines(sitting: Sitting = H200, direction: str = "forward", ours_ms: float = 0.5) -> list[Line]:
    lines = []
    for seq in (512, 1024):
        case = {
            "direction": direction, "batch": 16384 // seq, "heads": 16, "kv_heads": 16, "seq": seq, "head_dim": 128,
            "mask": "causal", "dtype": "bfloat16",
        }  # fmt: skip
        lines += [
            sitting.line("attention", case, "tileflash-triton", "time_ms", _figure(ours_ms), limit=0.1),
            sitting.line("attention", case, "tileflash-triton", "speed_ratio_to_fa2", _figure(1.0 / ours_ms)),
            sitting.line("attention", case, "fa2", "time_ms", _figure(1.0), limit=0.1),
            sitting.line("attention", case, "cudnn", "time_ms", None, limit=0.1, flags=("unsupported",)),
        ]
    return lines


def train_lines(sitting: Sitting = H200, seq: int = 4096, oom: bool = False) -> list[Line]:
    case = {"model": "gpt2", "batch": 4, "seq": seq, "dtype": "bfloat16"}
    lines = []
    for variant, step_ms, peak in (("baseline", 300.0, 40000.0), ("flash", 100.0, 10000.0)):
        tokens = 4 * seq / step_ms * 1e3
        for metric, value in (("step_ms", step_ms), ("tokens_per_s", tokens), ("peak_bytes", peak * 2**20)):
            if oom and variant == "baseline":
                lines.append(sitting.line("train", case, variant, metric, None, flags=("out_of_memory",)))
            else:
                lines.append(sitting.line("train", case, variant, metric, _figure(value, repeats=5)))
    return lines
