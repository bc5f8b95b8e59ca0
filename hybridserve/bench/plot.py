"""A run as a picture: how latencies are distributed, and throughput and requests under way over time.

Needs matplotlib (extra `plot`). Knows how numbers are drawn; takes all of them from a report.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hybridserve.bench.summary import percentile, span, token_times

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hybridserve.bench.record import Record
    from hybridserve.bench.report import Report

INK, FAINT, GRID = "#22272e", "#6e7781", "#e6e9ed"
BLUE, ORANGE, GREEN, RED = "#1f6feb", "#d9730d", "#2da44e", "#cf222e"
NUM_BINS = 40
NUM_SLICES = 120
"""Of the time of a run."""
WIDE = 30
"""Largest value over smallest, from which an axis of times is logarithmic."""


def check_plot(path: Path) -> None:
    """ValueError where `draw` could not, before there is anything to draw."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot: matplotlib is not installed: pip install 'hybridserve[plot]'") from None
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"--plot: {path}: its ending must be one of {', '.join(sorted(known))}")


def draw(report: Report, path: Path) -> None:
    """Write a PNG, or what the file's ending says. Of a run without a single success only the title is."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, rect=(0, 0, 1, 0.89))
    figure = Figure(figsize=(13, 7), dpi=150, layout=layout)
    _draw_title(figure, report)
    ok = [record for record in report.records if record.is_ok]
    if ok:
        (ttft, speed), (itl, running) = figure.subplots(2, 2, width_ratios=[1, 1.25])
        bound = None if report.slo is None else report.slo.ttft
        values = [record.ttft for record in ok if record.ttft is not None]
        _draw_distribution(ttft, "Time to first token", "requests", values, BLUE, bound)
        _draw_distribution(itl, "Time between tokens", "tokens", list(token_times(ok)), ORANGE, None)
        _draw_speed(speed, ok, span(report.records))
        _draw_running(running, report.records)
        speed.sharex(running)
        for axes in (ttft, speed, itl, running):
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.spines["bottom"].set_color(FAINT)
            axes.tick_params(colors=FAINT, labelsize=9, length=0)
            axes.grid(axis="y", color=GRID, linewidth=0.8)
            axes.set_axisbelow(True)
    figure.savefig(path)


def _draw_title(figure: Any, report: Report) -> None:
    context, summary = report.context, report.summary
    title = f"{context.target['model']}   {context.workload}, {context.load_text}"
    figure.text(0.012, 0.965, title, fontsize=15, fontweight="bold", color=INK, va="center")
    parts = [f"{summary.num_ok:,} requests", f"{summary.output_tokens_per_second:,.0f} output tokens/s"]
    if summary.ttft is not None:
        parts.append(f"TTFT p50 {_time(summary.ttft.p50)}, p99 {_time(summary.ttft.p99)}")
    if summary.itl is not None:
        parts.append(f"ITL p50 {_time(summary.itl.p50)}, p99 {_time(summary.itl.p99)}")
    if summary.goodput is not None:
        parts.append(f"goodput {summary.goodput.share:.0%} ({summary.goodput.slo})")
    if summary.num_failed:
        parts.append(f"{summary.num_failed:,} failed")
    figure.text(0.012, 0.918, "     ".join(parts), fontsize=10.5, color=FAINT, va="center")


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1000:.3g} ms" if seconds < 0.1 else f"{seconds * 1000:.0f} ms"


def _head(axes: Any, title: str, unit: str) -> None:
    axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold", color=INK, pad=16)
    axes.text(0, 1.025, unit, transform=axes.transAxes, fontsize=9, color=FAINT)


def _draw_distribution(
    axes: Any, title: str, noun: str, values: list[float], color: str, bound: float | None
) -> None:
    """A histogram with the percentiles marked."""
    _head(axes, title, noun)
    values = sorted(value * 1000 for value in values)
    axes.set_xlabel("milliseconds", fontsize=9, color=FAINT)
    if not values:
        axes.text(
            0.5, 0.5, "no token came after a first one", transform=axes.transAxes, ha="center", color=FAINT
        )
        return
    low, high = max(values[0], 1e-3), max(values[-1], 1e-3)
    marks = [(f"p{percent}", percentile(values, percent)) for percent in (50, 90, 99)]
    if high / low > WIDE:
        low = max(low, percentile(values, 0.5), 1e-3)
        edges = [low * (high / low) ** (step / NUM_BINS) for step in range(NUM_BINS + 1)]
        values = [max(value, low) for value in values]
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        pad = (high - low) * 0.02 or high * 0.02
        edges = [low - pad + (high - low + 2 * pad) * step / NUM_BINS for step in range(NUM_BINS + 1)]
    counts, _, _ = axes.hist(values, edges, color=color, alpha=0.85, edgecolor="white", linewidth=0.5)
    top = max(counts)
    axes.set_ylim(0, top * 1.3)
    axes.yaxis.get_major_locator().set_params(integer=True)
    for level, (name, at) in zip((1.22, 1.12, 1.02), marks, strict=True):
        axes.plot([at, at], [0, top * level], color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
        _label(axes, f"{name}  {_time(at / 1000)}", (at, top * level), INK)
    if bound is not None:
        axes.axvline(bound * 1000, color=RED, linewidth=1.2)
        _label(axes, "objective", (bound * 1000, top * 0.85), RED)


def _label(axes: Any, text: str, at: tuple[float, float], color: str) -> None:
    """Beside a line, on the side where there is room."""
    place = axes.transAxes.inverted().transform(axes.transData.transform(at))[0]
    axes.annotate(
        text,
        at,
        xytext=(-5 if place > 0.75 else 5, 0),
        textcoords="offset points",
        ha="right" if place > 0.75 else "left",
        va="center",
        fontsize=9,
        color=color,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
    )


def _draw_speed(axes: Any, records: Sequence[Record], whole: tuple[float, float]) -> None:
    """Output tokens a second, in slices of the whole run, and their mean."""
    begin, end = whole
    width = _nice((end - begin) / NUM_SLICES)
    slices = [0] * (math.ceil((end - begin) / width) + 1)
    for record in records:
        for time, count in zip(record.times, record.counts(), strict=True):
            slices[int((time - begin) / width)] += count
    edges = [number * width for number in range(len(slices) + 1)]
    _head(axes, "Output", f"tokens/s, in slices of {_time(width)}")
    axes.stairs([count / width for count in slices], edges, fill=True, color=GREEN, alpha=0.3)
    axes.stairs([count / width for count in slices], edges, color=GREEN, linewidth=1.3)
    mean = sum(record.num_output_tokens for record in records) / (end - begin)
    axes.axhline(mean, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.annotate(
        f"mean {mean:,.0f}",
        (1, mean),
        xycoords=("axes fraction", "data"),
        xytext=(-2, 3),
        textcoords="offset points",
        ha="right",
        fontsize=9,
        color=INK,
    )
    axes.set_ylim(0, max(slices) / width * 1.12)


def _nice(seconds: float) -> float:
    """The next of 1, 2, 5, 10, 20 ... milliseconds."""
    power = 10.0 ** math.floor(math.log10(max(seconds, 1e-3)))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= seconds * 0.999)


def _draw_running(axes: Any, records: Sequence[Record]) -> None:
    """Requests that were sent and have not ended: those that wait for their first token, and the others."""
    begin, _ = span(records)
    changes: list[tuple[float, int, int]] = []
    for record in records:
        first = record.times[0] if record.times else record.end
        changes += [(record.start - begin, 1, 0), (first - begin, -1, 1), (record.end - begin, 0, -1)]
    times, waiting, answered = [0.0], [0], [0]
    for time, more_waiting, more_answered in sorted(changes):
        times.append(time)
        waiting.append(waiting[-1] + more_waiting)
        answered.append(answered[-1] + more_answered)
    both = [one + other for one, other in zip(waiting, answered, strict=True)]
    _head(axes, "Under way", "requests")
    axes.fill_between(times, answered, step="post", color=BLUE, alpha=0.75, linewidth=0, label="answering")
    axes.fill_between(
        times,
        answered,
        both,
        step="post",
        color=ORANGE,
        alpha=0.7,
        linewidth=0,
        label="waiting for the first token",
    )
    axes.set_ylim(0, max(both) * 1.3)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="upper right", ncols=2, frameon=False, fontsize=9, labelcolor=INK)
    axes.set_xlabel("seconds", fontsize=9, color=FAINT)
    axes.set_xlim(0, max(times))
