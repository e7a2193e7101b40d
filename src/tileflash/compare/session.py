"""One sitting of a comparison: makes the runs that are still to be made, and writes the report whatever happens."""

from __future__ import annotations

import fcntl
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

from rich.console import Console

from tileflash.bench.ledger import require_ledger
from tileflash.compare.checks import demo_complaints
from tileflash.compare.conclusions import conclusion
from tileflash.compare.console import Display, show_end
from tileflash.compare.ledger import append_to_ledger
from tileflash.compare.plan import CompareConfig, Run, decided, plan, train_arguments
from tileflash.compare.report import Findings, build_report
from tileflash.compare.report_html import to_html
from tileflash.compare.report_markdown import to_markdown
from tileflash.compare.results import Outcome, RunResult, read_run
from tileflash.compare.runner import TRAIN_COMMAND, execute, log_path
from tileflash.compare.texts import texts
from tileflash.files import written_aside

OK, FAILED, INTERRUPTED = 0, 1, 130


def compare(config: CompareConfig, *, command: Sequence[str] = TRAIN_COMMAND, console: Console | None = None) -> int:
    """Measure, write OUTPUT/report.md and OUTPUT/report.html, and return the exit status.

    Args:
        command: what `tileflash train` is called as.

    Returns:
        0; 1 when a run failed (out of memory is a result, not a failure) or the demo's losses are not as they must be;
        130 after Ctrl-C or SIGTERM.

    Raises:
        OSError: when the output directory cannot be written.
        ValueError: when another comparison is writing to it, the device cannot do what was asked for, or the ledger
            holds something else than a ledger. Nothing has been measured then.
    """
    config = decided(config)
    if config.ledger is not None:
        require_ledger(config.ledger)
    with held(config.output) as lock:
        return _compare(config, partial(execute, command=command, keep_open=[lock]), console or Console())


def _compare(config: CompareConfig, make_run: Callable[..., RunResult], console: Console) -> int:
    runs = plan(config)
    results = earlier_results(config, runs, console)
    with terminate_as_interrupt():
        stopped = make_runs(config, runs, results, make_run, console)
    findings = Findings(config, results, len(runs), stopped)
    reports = _write_reports(findings)
    say = texts(config.language)
    show_end(console, findings, conclusion(findings.first, findings.by_length, say), reports)
    if stopped == "interrupted":
        return INTERRUPTED
    if config.ledger is not None:
        added = append_to_ledger(config.ledger, findings)
        console.print(f"ledger: {added} lines added to {config.ledger}", highlight=False, soft_wrap=True)
    complaints = demo_complaints(findings.comparisons) if config.demo else []
    for complaint in complaints:
        console.print(f"error: {complaint}", style="red", highlight=False, soft_wrap=True)
    return FAILED if complaints or findings.failures() else OK


@contextmanager
def held(output: Path) -> Iterator[int]:
    """Keep other comparisons out of `output`: a second one would put the first one's runs aside under its hands.

    The kernel releases the lock however the processes end that have the file open, whose number is what is yielded: a
    run whose comparison was killed (SIGKILL) still writes its log and keeps the device busy.
    """
    output.mkdir(parents=True, exist_ok=True)
    with (output / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"output is {output}: another comparison is writing to it, or the last run of one that was killed "
                "still goes on; it must be a directory of its own"
            ) from None
        yield lock.fileno()


def earlier_results(config: CompareConfig, runs: list[Run], console: Console) -> dict[Run, RunResult]:
    """What an interrupted comparison left that still holds; a new one puts what is there aside."""
    directory = config.output / "runs"
    if not config.resume:
        if directory.is_dir() and any(directory.iterdir()):
            previous = config.output / "runs.previous"
            shutil.rmtree(previous, ignore_errors=True)
            directory.rename(previous)
            console.print(f"an earlier comparison's runs are kept in {previous}", highlight=False, soft_wrap=True)
        directory.mkdir(parents=True, exist_ok=True)
        return {}
    results = {}
    for run in runs:
        result = read_run(run, log_path(config, run))
        # Failed ones are made again, and those made with other arguments (a seed, a device) are not this comparison's.
        holds = result is not None and result.record.arguments == tuple(train_arguments(config, run))
        if result is not None and holds and result.outcome in (Outcome.FINISHED, Outcome.OUT_OF_MEMORY):
            results[run] = result
    if results:
        console.print(f"taking up {len(results)} finished runs of {len(runs)} from {directory}", highlight=False)
    return results


def make_runs(
    config: CompareConfig,
    runs: list[Run],
    results: dict[Run, RunResult],
    make_run: Callable[..., RunResult],
    console: Console,
) -> str | None:
    """Fill `results`; return why it stopped early, or None."""
    deadline = None if config.budget_seconds is None else time.monotonic() + config.budget_seconds
    with Display(console, len(runs), len(results)) as display:
        try:
            for index, run in enumerate(runs, start=1):
                if run in results:
                    continue
                if _settled(run, results):
                    display.advance()
                    continue
                limit_s = _limit(config, run, results, deadline)
                if limit_s is None:
                    return "budget"
                display.running(run, 0)
                result = make_run(config, run, limit_s=limit_s, on_progress=_progress_of(display, run))
                if result.outcome is Outcome.TIMED_OUT and limit_s < config.timeout_seconds:
                    return "budget"
                results[run] = result
                display.finished(result, index)
        except KeyboardInterrupt:
            display.say("interrupted: writing the report of what is there")
            return "interrupted"
    return None


def _progress_of(display: Display, run: Run) -> Callable[[int], None]:
    return lambda steps: display.running(run, steps)


def _settled(run: Run, results: dict[Run, RunResult]) -> bool:
    """Whether an earlier repeat of the same configuration ended in a way that another would only repeat."""
    return any(
        other.setting == run.setting and other.scheme == run.scheme and result.settled
        for other, result in results.items()
    )


def _limit(config: CompareConfig, run: Run, results: dict[Run, RunResult], deadline: float | None) -> float | None:
    """Seconds that `run` may take, or None when the budget leaves no room for it, judged by its earlier repeats."""
    if deadline is None:
        return config.timeout_seconds
    left_s = deadline - time.monotonic()
    earlier_s = [
        result.record.duration_s
        for other, result in results.items()
        if other.setting == run.setting and other.scheme == run.scheme
    ]
    if left_s <= max(earlier_s, default=0.0):
        return None
    return min(left_s, config.timeout_seconds)


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Within it SIGTERM (from `timeout`, a batch system) ends the comparison as Ctrl-C does: with its report."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _write_reports(findings: Findings) -> list[Path]:
    document = build_report(findings)
    output = findings.config.output
    for plot in document.plots():
        write_whole(output / "plots" / f"{plot.name}.svg", plot.svg)
    markdown, html = output / "report.md", output / "report.html"
    write_whole(markdown, to_markdown(document))
    write_whole(html, to_html(document))
    return [markdown, html]


def write_whole(path: Path, text: str) -> None:
    """Aside, then renamed: whoever has the old report open never sees half a new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(path) as (aside,):
        aside.write_text(text, encoding="utf-8")
