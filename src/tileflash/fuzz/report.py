"""What a run says: progress, failures as Python and JSON, the summary, the ledger's line."""

from __future__ import annotations

import time
from itertools import combinations
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from tileflash.fuzz.limits import Limits
from tileflash.fuzz.problems import BIASES, OPTIONS, OTHERS, SLOPES, Problem, changed_fields, to_json
from tileflash.fuzz.session import Failure, FuzzPlan, Outcome
from tileflash.fuzz.variants import make_variants

if TYPE_CHECKING:
    from rich.console import Console

    from tileflash.bench.ledger import Line
    from tileflash.bench.sitting import Sitting

_OURS = ("triton", "tiled", "reference")
_PLAIN_EVERY_S = 10.0
# A variant compiles three to five kernels, which took some 20 s on one core; a third of the time shall go there.
_VARIANT_S = 20.0


def default_backends(device: str, named: list[str] | None) -> tuple[str, ...]:
    """Those named, or all of ours that serve on the device. ValueError for a name that is none and for one that does not serve."""
    from tileflash.attention.dispatch import BACKENDS, choose
    from tileflash.attention.problem import make_problem

    serving = []
    for name in named or _OURS:
        if name not in BACKENDS:
            raise ValueError(f"--backend must be one of {', '.join(BACKENDS)}, got {name!r}")
        dtype = torch.float32 if torch.float32 in BACKENDS[name].dtypes else torch.bfloat16
        q = torch.zeros(1, 1, 1, 16, device=device, dtype=dtype)
        problem = make_problem(q, q, q, False, (None, None), None, False)
        try:
            choose(problem, name)
        except ValueError as error:
            if named:
                raise ValueError(f"--backend {name}: {error}") from None
            continue
        serving.append(name)
    return tuple(dict.fromkeys(serving))


def default_variants(device: str, workers: int, seconds: float | None) -> int:
    """As many as compile in a third of the time; on a CPU nothing is compiled."""
    if not device.startswith("cuda"):
        return 64
    return workers * max(1, int((seconds or 300.0) / 3 / _VARIANT_S))


class Progress:
    """A bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, plan: FuzzPlan) -> None:
        from rich.progress import Progress as Bar

        self._console, self._plan = console, plan
        self._bar = Bar(console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("fuzz", total=1.0)
        self._told = time.monotonic()
        self._shown = 0

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def tell(self, outcome: Outcome) -> None:
        plan = self._plan
        # At once, before anything is made smaller: a run that is killed has said what it found.
        for failure in outcome.failures[self._shown :]:
            words = "; ".join(failure.words)
            self._console.print(
                f"problem {failure.index}: {failure.kind} ({words}): {to_json(failure.problem)}", markup=False
            )
        self._shown = len(outcome.failures)
        shares = [outcome.count / plan.problems if plan.problems else 0.0]
        shares.append(outcome.seconds / plan.seconds if plan.seconds else 0.0)
        words = f"{outcome.count:,} problems, {len(outcome.failures)} wrong"
        self._bar.update(self._task, completed=min(1.0, max(shares)), description=words)
        if not self._console.is_terminal and time.monotonic() - self._told >= _PLAIN_EVERY_S:
            self._told = time.monotonic()
            self._console.print(f"{words} ({outcome.seconds:.0f} s)")


def failure_text(failure: Failure, plan: FuzzPlan) -> str:
    """What went wrong, and how to see it again."""
    smallest = failure.smallest
    kind = "is wrong" if failure.kind == "mismatch" else f"makes a {failure.kind}"
    lines = [f"problem {failure.index} {kind}: {failure.problem}", *(f"    {words}" for words in failure.words)]
    if failure.shrunk is not None:
        lines.append(f"  shrunk to {smallest}")
    lines += ["", snippet(smallest, failure.backend, plan.device), ""]
    lines.append(f"tileflash fuzz --backend {failure.backend} --device {plan.device} --replay '{to_json(smallest)}'")
    return "\n".join([*lines, ""])


def snippet(problem: Problem, backend: str, device: str) -> str:
    """Python that examines the problem again."""
    arguments = ", ".join(f"{name}={value!r}" for name, value in changed_fields(problem).items())
    return (
        "import torch\n\nfrom tileflash.fuzz import Problem, examine\n\n"
        f"problem = Problem({arguments})\nprint(*examine(problem, {backend!r}, {device!r}), sep='\\n')"
    )


def summary(outcome: Outcome, plan: FuzzPlan) -> str:
    """Counts, rate, and how often each option was on."""
    rate = outcome.count / outcome.seconds if outcome.seconds else 0.0
    failed = len(outcome.failures)
    lines = [
        f"{outcome.count:,} problems in {outcome.seconds:.0f} s ({rate:,.0f} a second), {plan.variants} variants, seed {plan.seed}, "
        f"{', '.join(plan.backends)} on {plan.device}: {failed or 'no'} mismatch{'es' if failed != 1 else ''}"
    ]
    names = {*BIASES, *OTHERS}
    used = [
        tuple(sorted(one.model.options))
        for one in make_variants(plan.variants, plan.seed, plan.device, Limits.of(plan.backends))
    ]
    pairs = {pair for options in used for pair in combinations(options, 2)}
    possible = [pair for pair in combinations(OPTIONS, 2) if not set(pair) <= set(BIASES) and not set(pair) <= SLOPES]
    single = {option for options in used for option in options}
    lines.append(f"variants: {len(single)} of {len(OPTIONS)} options, {len(pairs)} of {len(possible)} pairs of them")
    options = [f"{name} {outcome.traits[name]:,}" for name in (*BIASES, *OTHERS)]
    lines.append(f"options: {', '.join(options)}")
    lines.append(f"others: {', '.join(f'{k} {v:,}' for k, v in sorted(outcome.traits.items()) if k not in names)}")
    if outcome.slow_seconds and plan.device.startswith("cuda"):
        lines.append(
            f"workers computed for {outcome.worker_seconds:.0f} s in all, {outcome.slow_seconds:.0f} s of them in slow bunches "
            "(compiling)"
        )
    return "\n".join([*lines, *outcome.notes, *outcome.complaints])


def ledger_line(outcome: Outcome, plan: FuzzPlan, sitting: Sitting) -> Line:
    """`mismatches` of as many problems as were judged."""
    from tileflash.bench.statistic import Statistic

    case: dict[str, Any] = {"problems": outcome.count, "seed": plan.seed}
    failed = float(len(outcome.failures))
    variant = f"tileflash-{'+'.join(plan.backends)}"
    return sitting.line("fuzz", case, variant, "mismatches", Statistic(failed, failed, failed, 1))
