"""Suite `generation`: tokens a second by context, with the decoding that the trainer has today: no K/V cache, so that each new token
computes its whole context again. Both attentions run in one process on the same weights, in rounds that alternate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from tileflash.bench.attention_variants import attempt
from tileflash.bench.flags import FAILED, TIMER_DISAGREES, WRONG_RESULT
from tileflash.bench.ledger import CaseValue, Line
from tileflash.bench.model_shapes import model_shape
from tileflash.bench.model_steps import SCHEMES
from tileflash.bench.model_worker import BASELINE, FLASH, scheme_attention
from tileflash.bench.sitting import Sitting
from tileflash.bench.statistic import Statistic
from tileflash.bench.timing import Clock, Timing, TimingPlan, compare
from tileflash.gpu_peaks import find_gpu
from tileflash.models import AttentionFunction, ModelConfig, empty_model, flops_per_token, initialize_weights

SUITE = "generation"
_TOLERANCE = {
    "bfloat16": 5e-2,
    "float32": 1e-3,
}  # of logits, relative to the largest; a wrong mask gives several times as much


@dataclass(frozen=True)
class GenerationSuite:
    """The model, the contexts, and how many tokens each measurement adds. ValueError names what does not fit."""

    model: str = "llama3-1b"
    contexts: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    new_tokens: int = 4
    dtype: str = "bfloat16"
    device: str = "cuda"
    seed: int = 0
    budget_seconds: float | None = None
    timing: TimingPlan = field(default_factory=TimingPlan)

    def __post_init__(self) -> None:
        longest = model_shape(self.model).max_sequence_length
        if not self.contexts or not 1 <= min(self.contexts) <= max(self.contexts) <= longest:
            raise ValueError(
                f"`contexts` was {self.contexts}; each must be 1 to {longest}, the positions of {self.model}"
            )
        if self.new_tokens < 1:
            raise ValueError(f"`new_tokens` was {self.new_tokens}; it must be at least 1")
        if self.dtype not in _TOLERANCE:
            raise ValueError(f"`dtype` was {self.dtype!r}; it must be one of {', '.join(_TOLERANCE)}")
        if self.budget_seconds is not None and not self.budget_seconds > 0:
            raise ValueError(f"`budget_seconds` was {self.budget_seconds}; it must be above 0")


class _Switch:
    """An attention that is one of several: the model is built once."""

    def __init__(self) -> None:
        self.functions: dict[str, AttentionFunction] = {scheme: scheme_attention(scheme) for scheme in SCHEMES}
        self.scheme = FLASH

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float | None
    ) -> torch.Tensor:
        return self.functions[self.scheme](q, k, v, causal=causal, scale=scale)


def run_generation(
    suite: GenerationSuite, sitting: Sitting, clock: Clock, now: Callable[[], float] = time.monotonic
) -> Iterator[tuple[int, list[Line], list[str]]]:
    """Context by context: ledger lines (`token_ms`, `tokens_per_s`, `peak_bytes`) and reasons. With `budget_seconds` it stops before a
    context that would not end in time, taken to need four times the last one's."""
    from tileflash.train.generate import generate

    config, switch, dtype = model_shape(suite.model), _Switch(), getattr(torch, suite.dtype)
    model = empty_model(config, switch, suite.device, dtype)
    initialize_weights(model, suite.seed)
    begin, last = now(), 0.0
    for context in suite.contexts:
        started = now()
        if suite.budget_seconds is not None and started + 4 * last - begin >= suite.budget_seconds:
            return
        generator = torch.Generator(suite.device).manual_seed(suite.seed)
        prompt = torch.randint(config.vocab_size, (1, context), generator=generator, device=suite.device)
        prompt_ids: list[int] = prompt[0].tolist()

        def added(scheme: str, context: int = context, prompt_ids: list[int] = prompt_ids) -> list[int]:
            switch.scheme = scheme
            generator = torch.Generator(suite.device).manual_seed(suite.seed)
            return generate(
                model, prompt_ids, length=context + suite.new_tokens, vocabulary=config.vocab_size, context=context,
                generator=generator, dtype=dtype, temperature=0.0,
            )  # fmt: skip

        def logits(scheme: str, prompt: torch.Tensor = prompt) -> tuple[torch.Tensor]:
            switch.scheme = scheme
            with torch.no_grad():
                return (model.features(prompt)[0, -1] @ model.head_weight.T,)

        yield context, *_measure(suite, context, config, logits, added, sitting, clock)
        last = now() - started


def _measure(
    suite: GenerationSuite,
    context: int,
    config: ModelConfig,
    logits: Callable[[str], tuple[torch.Tensor]],
    added: Callable[[str], list[int]],
    sitting: Sitting,
    clock: Clock,
) -> tuple[list[Line], list[str]]:
    case: Mapping[str, CaseValue] = {
        "model": suite.model, "batch": 1, "seq": context, "new_tokens": suite.new_tokens, "dtype": suite.dtype, "cache": False,
    }  # fmt: skip
    refused: dict[str, tuple[str, str]] = {}
    peaks: dict[str, float | None] = {}
    results: dict[str, torch.Tensor] = {}
    for scheme in SCHEMES:
        _reset(suite.device)
        trial = attempt(partial(logits, scheme))
        if trial.result is None:
            refused[scheme] = (trial.flag or FAILED, trial.reason)
        else:
            results[scheme], peaks[scheme] = trial.result[0].float(), _peak(suite.device)
    if len(results) == len(SCHEMES):
        expected = results[BASELINE]
        error = float((results[FLASH] - expected).abs().max() / expected.abs().max())
        if not error <= _TOLERANCE[suite.dtype]:  # NaN is wrong too
            refused[FLASH] = (WRONG_RESULT, f"logits differ by {error:.1e} of the largest from the baseline's")
    calls = {scheme: partial(added, scheme) for scheme in SCHEMES if scheme not in refused}
    timings = compare(calls, clock, baseline=BASELINE, plan=suite.timing) if calls else {}
    gpu = find_gpu(sitting.gpu) if suite.dtype == "bfloat16" else None
    flops = flops_per_token(config, context) / 3 * context  # forward alone is a third
    limit_ms = None if gpu is None else flops / (gpu.bf16_tflops * 1e12) * 1e3
    lines: list[Line] = []
    for scheme in SCHEMES:
        if scheme in refused:
            lines.append(sitting.line(SUITE, case, scheme, "token_ms", None, flags=(refused[scheme][0],)))
            continue
        lines += _lines(suite, case, scheme, timings[scheme], limit_ms, peaks[scheme], sitting)
    return lines, [f"{scheme}, context {context}: {reason}" for scheme, (_, reason) in refused.items()]


def _lines(
    suite: GenerationSuite,
    case: Mapping[str, CaseValue],
    scheme: str,
    timing: Timing,
    limit_ms: float | None,
    peak: float | None,
    sitting: Sitting,
) -> Iterator[Line]:
    each, flags = suite.new_tokens, (TIMER_DISAGREES,) if timing.disagrees else ()
    ms = timing.time_ms
    token = Statistic(ms.median / each, ms.low / each, ms.high / each, ms.repeats)
    rate = Statistic(1e3 / token.median, 1e3 / token.high, 1e3 / token.low, token.repeats)
    yield sitting.line(SUITE, case, scheme, "token_ms", token, limit=limit_ms, flags=flags)
    yield sitting.line(SUITE, case, scheme, "tokens_per_s", rate, flags=flags)
    if peak is not None:
        yield sitting.line(SUITE, case, scheme, "peak_bytes", Statistic(peak, peak, peak, 1))


def _reset(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: str) -> float | None:
    """The highest use of one pass over the context, with the weights."""
    return float(torch.cuda.max_memory_allocated(device)) if torch.device(device).type == "cuda" else None
