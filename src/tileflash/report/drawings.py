"""The plots of the ledger's page: speed and memory by length, speed-ups, the roofline, step times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from tileflash.bench.attention import SUITE as ATTENTION
from tileflash.bench.attention import work_of
from tileflash.bench.audit import RATIO
from tileflash.bench.ceilings import COPY, MATMUL
from tileflash.bench.flags import DOUBTFUL
from tileflash.bench.generation import SUITE as GENERATION
from tileflash.bench.gpu_watch import SUITE as DEVICE
from tileflash.bench.ledger import Line
from tileflash.bench.markdown import newest_runs
from tileflash.bench.memory import SUITE as MEMORY
from tileflash.bench.statistic import geometric_mean
from tileflash.bench.table_train import SUITE as TRAIN
from tileflash.compare.canvas import INK, length_axis, new_figure, styled, svg_of, with_axes
from tileflash.compare.document import Plot
from tileflash.gpu_peaks import find_gpu
from tileflash.report.look import MARKERS, SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MIB = 2**20
Ceilings = Mapping[str, float]  # what the sitting measured of its GPU, by metric
Value = Callable[[Line, float], float]


def plots_of(lines: Sequence[Line]) -> list[Plot]:
    """All that the audited lines of one GPU give, the newest run of each suite; figures that cannot be true are not drawn."""
    plots: list[Plot] = []
    suites = {
        ATTENTION: _attention, "lengths": _fixed_batch, MEMORY: _memory, "scaling": _fixed_batch, TRAIN: _train, GENERATION: _generation,
    }  # fmt: skip
    for suite, draw in suites.items():
        chosen = [line for line in lines if line.suite == suite and not set(line.flags) - DOUBTFUL]
        for run in newest_runs(chosen):
            device = [line for line in lines if line.suite == DEVICE and line.run == run[0].run]
            plots += draw(run, {line.metric: line.median for line in device if line.median is not None})
    return plots


def _attention(lines: list[Line], ceilings: Ceilings) -> Iterator[Plot]:
    colours = _order(lines)
    times = [line for line in lines if line.metric == "time_ms"]
    ratios = [line for line in lines if line.metric.startswith(RATIO)]
    if ratios:
        yield _speedup_bars(ratios, colours)
    if times and find_gpu(times[0].gpu) is not None:
        yield from _roofline(times, colours, ceilings)
    panels = _distinct(times, "direction", "head_dim", "mask")
    for direction, head_dim, mask in sorted(panels, key=lambda panel: panel[0] != "forward"):
        own = _where(times, direction=direction, head_dim=head_dim, mask=mask)
        name = f"tflops-{direction}-{head_dim}-{mask}"
        caption = f"Attention {direction}, head dimension {head_dim}, {mask} mask: TFLOP/s by sequence length"
        yield Plot(
            name,
            caption,
            _by_length(own, colours, lambda line, ms: work_of(line.case).tflops(ms), "TFLOP/s", name, False),
        )


def _memory(lines: list[Line], ceilings: Ceilings) -> Iterator[Plot]:
    colours = _order(lines)
    peaks = [line for line in lines if line.metric == "peak_bytes"]
    for (which,) in _distinct(peaks, "pass"):
        own, name = _where(peaks, **{"pass": which}), f"memory-{which}"
        caption = f"Memory of attention, {which}: peak above the inputs by sequence length"
        yield Plot(name, caption, _by_length(own, colours, lambda _, value: value / _MIB, "MiB", name, True))


def _train(lines: list[Line], ceilings: Ceilings) -> Iterator[Plot]:
    colours = _order(lines)
    for (model,) in _distinct(lines, "model"):
        own = _where(lines, model=model)
        for metric, label, caption, scale in (
            ("step_ms", "ms a step", "step time by sequence length", 1.0),
            ("peak_bytes", "MB", "peak memory by sequence length", _MIB),
        ):
            figures, name = [line for line in own if line.metric == metric], f"train-{metric}-{model}"
            if figures:
                drawn = _by_length(figures, colours, lambda _, value, scale=scale: value / scale, label, name, True)  # type: ignore[misc]
                yield Plot(name, f"{model}: {caption}", drawn)


def _fixed_batch(lines: list[Line], ceilings: Ceilings) -> Iterator[Plot]:
    colours, suite, case = _order(lines), lines[0].suite, lines[0].case
    for (direction,) in _distinct(lines, "direction"):
        for metric, label, what, scale in (("time_ms", "ms", "time", 1.0), ("peak_bytes", "MiB", "peak memory", _MIB)):
            own = [line for line in _where(lines, direction=direction) if line.metric == metric]
            if own:
                name = f"{suite}-{metric}-{direction}"
                drawn = _by_length(own, colours, lambda _, value, scale=scale: value / scale, label, name, True)  # type: ignore[misc]
                yield Plot(name, f"Attention {direction}, batch {case['batch']}: {what} by sequence length", drawn)


def _generation(lines: list[Line], ceilings: Ceilings) -> Iterator[Plot]:
    own = [line for line in lines if line.metric == "tokens_per_s"]
    if own:
        drawn = _by_length(own, _order(lines), lambda _, value: value, "tok/s", "generation", True)
        yield Plot("generation", f"{own[0].case['model']}: tokens a second by context", drawn)


def _order(lines: Sequence[Line]) -> dict[str, int]:
    """Variants and the places of their colours and markers; the same variant keeps them in all plots of a suite."""
    names = dict.fromkeys(line.variant for line in lines)
    ours = [name for name in names if name.startswith(("tileflash", "flash"))]
    return {name: place % len(SERIES) for place, name in enumerate(dict.fromkeys([*ours, *names]))}


def _distinct(lines: Sequence[Line], *names: str) -> list[tuple[str | int | float | bool, ...]]:
    return list(dict.fromkeys(tuple(line.case[name] for name in names) for line in lines))


def _where(lines: Sequence[Line], **case: object) -> list[Line]:
    return [line for line in lines if all(line.case[name] == value for name, value in case.items())]


def _by_length(
    lines: list[Line], colours: dict[str, int], value: Value, label: str, name: str, logarithmic: bool
) -> str:
    """Median of each variant by sequence length with its spread."""
    with styled():
        figure, axes = with_axes()
        for variant in (v for v in colours if any(line.variant == v for line in lines)):
            # Of one length measured with several batches the last is drawn.
            by_length = {
                int(line.case["seq"]): line for line in lines if line.variant == variant and line.median is not None
            }
            points = sorted(by_length.items())
            middle = [value(line, line.median or 0.0) for _, line in points]
            ends = [sorted((value(line, line.low or 0.0), value(line, line.high or 0.0))) for _, line in points]
            place = colours[variant]
            axes.errorbar(
                [length for length, _ in points],
                middle,
                yerr=[
                    [m - low for m, (low, _) in zip(middle, ends, strict=True)],
                    [high - m for m, (_, high) in zip(middle, ends, strict=True)],
                ],
                color=SERIES[place][0], marker=MARKERS[place], markersize=4, capsize=2, linewidth=1.6, label=variant,
            )  # fmt: skip
        if logarithmic:
            _plain_logarithmic(axes)
        else:
            axes.set_ylim(bottom=0)
        length_axis(axes, sorted({int(line.case["seq"]) for line in lines if line.median is not None}))
        axes.set_ylabel(label)
        axes.legend(fontsize=8, loc="best")
        return svg_of(figure, name)


def _plain_logarithmic(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:,.6g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _speedup_bars(ratios: list[Line], colours: dict[str, int]) -> Plot:
    """Geometric means over all points; the line goes from the smallest to the largest point."""
    baseline = ratios[0].metric.removeprefix(RATIO)
    groups = [str(direction) for (direction,) in _distinct(ratios, "direction")]
    variants = [variant for variant in colours if any(line.variant == variant for line in ratios)]
    width = 0.8 / max(1, len(variants))
    with styled():
        figure, axes = with_axes()
        for index, variant in enumerate(variants):
            for group, direction in enumerate(groups):
                values = [
                    line.median
                    for line in _where(ratios, direction=direction)
                    if line.variant == variant and line.median
                ]
                if not values:
                    continue
                mean, x = geometric_mean(values), group - 0.4 + width * (index + 0.5)
                axes.bar(
                    x,
                    mean,
                    width=width * 0.92,
                    color=SERIES[colours[variant]][0],
                    label=variant if group == 0 else None,
                )
                axes.plot([x, x], [min(values), max(values)], color=INK, linewidth=1)
                axes.annotate(
                    f"{mean:.2f}x", (x, max(values)), (0, 3), textcoords="offset points", ha="center", fontsize=7
                )
        axes.axhline(1.0, color=INK, linewidth=1, linestyle="--")
        axes.set_xticks(range(len(groups)), groups)
        axes.set_ylabel(f"speed relative to {baseline}")
        axes.margins(y=0.25)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, loc="upper left", ncols=2)
        caption = f"Attention: speed relative to {baseline}, geometric mean over all points; the line spans them"
        return Plot("speedup", caption, svg_of(figure, "speedup"))


def _roofline(times: list[Line], colours: dict[str, int], ceilings: Ceilings) -> Iterator[Plot]:
    gpu = find_gpu(times[0].gpu)
    assert gpu is not None
    for (direction,) in _distinct(times, "direction"):
        own = _where(times, direction=direction)
        points = [(work_of(line.case), line) for line in own if line.median]
        intensities = [work.flops / work.bytes for work, _ in points]
        left, right = min([*intensities, 100.0]) / 2, max([*intensities, 500.0]) * 2
        ridge = gpu.bf16_tflops * 1e3 / gpu.memory_gb_per_s
        with styled():
            figure = new_figure(4.2)
            axes = figure.subplots()
            axes.grid(True, linewidth=0.6)
            axes.plot(
                [left, ridge, right],
                [left * gpu.memory_gb_per_s / 1e3, gpu.bf16_tflops, gpu.bf16_tflops],
                color=INK, linewidth=1.4, label=f"limit of {gpu.name}",
            )  # fmt: skip
            if MATMUL in ceilings and COPY in ceilings:
                flat, slope = ceilings[MATMUL], ceilings[COPY] / 1e3
                axes.plot(
                    [left, flat / slope, right], [left * slope, flat, flat], color=INK, linewidth=1, linestyle="--",
                    label="product and copy, measured",
                )  # fmt: skip
            for variant, place in colours.items():
                mine = [(work, line) for work, line in points if line.variant == variant]
                if mine:
                    axes.plot(
                        [work.flops / work.bytes for work, _ in mine],
                        [work.flops / (line.median or 1.0) / 1e9 for work, line in mine],
                        linestyle="", marker=MARKERS[place], markersize=4, color=SERIES[place][0], label=variant,
                    )  # fmt: skip
            axes.set_xscale("log")
            _plain_logarithmic(axes)
            axes.set_ylim(bottom=axes.get_ylim()[0] / 6)  # room for the legend
            axes.set_xlabel("FLOPs a byte of inputs and outputs")
            axes.set_ylabel("TFLOP/s of visible pairs")
            axes.legend(fontsize=8, loc="lower right")
            name = f"roofline-{direction}"
            yield Plot(name, f"Roofline, attention {direction}: all shapes", svg_of(figure, name))
