"""A plan as a picture: what each rank's memory goes to, and throughput against the number of sequences.

Needs matplotlib (extra `plot`). Knows how numbers are drawn; computes none of them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hybridserve.engine.plan_report import stage_title
from hybridserve.engine.roofline import BATCHES, CONTEXT_TOKENS, MEMORY_SHARE
from hybridserve.engine.units import UNITS

if TYPE_CHECKING:
    from pathlib import Path

    from hybridserve.engine.plan import EnginePlan, StagePlan

NAMED = 0.045
"""Share of a bar from which a part has room for its name; the legend lists all."""

INK, FAINT = "#22272e", "#8b949e"
ACCENT = "#1f4e79"
WEIGHTS = {
    "experts": ACCENT,
    "mamba": "#c55a11",
    "mlp": "#2e75b6",
    "attention": "#7f6000",
    "embeddings": "#f4b183",
    "other": "#bfbfbf",
}
"""Of the parts of a model, the same in every picture."""
REST = {"workspace": "#a6a6a6", "adapters": "#7030a0", "arena": "#70ad47", "free": "#f2f2f2"}


def draw_plan(plan: EnginePlan, path: Path) -> None:
    """Write a PNG (or whatever the file's ending says). ValueError without matplotlib, or for an ending that
    it does not know."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot: matplotlib is not installed: pip install 'hybridserve[plot]'") from None
    figure = Figure(figsize=(12, 5.2), dpi=150, layout="constrained")
    memory, speed = figure.subplots(1, 2, width_ratios=[1.0 + 0.25 * (len(plan.kinds_of_stages()) - 1), 1.45])
    figure.suptitle(_title(plan), x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK)
    _draw_memory(memory, plan)
    _draw_speed(speed, plan)
    for axes in (memory, speed):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK, labelsize=9)
    try:
        figure.savefig(path)
    except ValueError as error:
        raise ValueError(f"--plot: {path}: {error}") from None


def _title(plan: EnginePlan) -> str:
    weights = plan.dtype if plan.quantization is None else plan.quantization.quantization.format
    stages = f", {plan.parallel.pipeline} stages" if plan.parallel.pipeline > 1 else ""
    return f"{plan.model}   {weights} weights on {plan.parallel.num_ranks} x {plan.hardware.title}{stages}"


def _draw_memory(axes: Any, plan: EnginePlan) -> None:
    """A bar for each kind of stage, from its weights up to the end of the device's memory."""
    kinds = plan.kinds_of_stages()
    columns = [_parts(plan, stage) for _, stage in kinds]
    colors = {part: color for part, color in WEIGHTS.items() if any(part in each for each in columns)} | REST
    is_narrow = len(columns) > 3
    total = max(sum(column.values()) for column in columns)
    unit = next(unit for unit in ("GiB", "MiB", "KiB") if total >= UNITS[unit] or unit == "KiB")
    columns = [{part: size / UNITS[unit] for part, size in column.items()} for column in columns]
    total /= UNITS[unit]
    for index, column in enumerate(columns):
        bottom = 0.0
        for part, size in column.items():
            axes.bar(index, size, 0.62, bottom, color=colors[part], edgecolor="white", linewidth=0.6)
            if size >= NAMED * total:
                axes.text(
                    index,
                    bottom + size / 2,
                    f"{size:.1f}" if is_narrow else f"{part}  {size:.1f}",
                    ha="center",
                    va="center",
                    fontsize=9,
                    color=_readable_on(colors[part]),
                )
            bottom += size
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_xticks(
        range(len(columns)),
        [stage_title(*kind).replace(" ", "\n" if is_narrow else " ", 1) for kind in kinds]
        if len(plan.stages) > 1
        else ["each rank"],
    )
    axes.set_ylabel(unit, color=INK)
    axes.set_title("Memory of a rank", loc="left", fontsize=11, color=INK)
    handles = [(part, color) for part, color in colors.items() if any(part in column for column in columns)]
    _legend(axes, handles, columns, unit)


def _legend(axes: Any, handles: list[tuple[str, str]], columns: list[dict[str, float]], unit: str) -> None:
    from matplotlib.patches import Patch

    labels = []
    for part, _ in handles:
        sizes = dict.fromkeys(f"{column.get(part, 0):.2f}" for column in columns)
        labels.append(f"{part}  {' / '.join(sizes)}")
    axes.legend(
        [Patch(color=color) for _, color in handles],
        labels,
        title=unit,
        alignment="left",
        fontsize=8,
        title_fontsize=8,
        frameon=False,
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        reverse=True,
    )


def _readable_on(color: str) -> str:
    red, green, blue = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return INK if 0.3 * red + 0.6 * green + 0.1 * blue > 140 else "white"


def _parts(plan: EnginePlan, stage: StagePlan) -> dict[str, float]:
    by_part = stage.weights_by_part()
    weights: dict[str, float] = {part: sum(by_part[part].values()) for part in WEIGHTS if part in by_part}
    rest = {"workspace": stage.workspace.total, "adapters": plan.adapter_bytes, "arena": stage.arena_bytes}
    parts = weights | {part: size for part, size in rest.items() if size}
    if plan.hardware.memory_bytes is not None:
        parts["free"] = plan.hardware.memory_bytes - plan.bytes_taken(stage)
    return parts


def _draw_speed(axes: Any, plan: EnginePlan) -> None:
    steps = [plan.decode_step(batch) for batch in BATCHES]
    batches = [step.batch for step in steps]
    axes.plot(batches, [step.roofline for step in steps], "--", color=FAINT, linewidth=1.4, label="roofline")
    axes.plot(
        batches,
        [step.projected for step in steps],
        "o-",
        color=ACCENT,
        linewidth=2,
        markersize=5,
        label=f"at {MEMORY_SHARE:.0%} of the bandwidth, with collectives",
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    ticks = _ticks(0.7 * min(step.projected for step in steps), max(step.roofline for step in steps))
    axes.set_yticks(ticks, [f"{tick:,.0f}" for tick in ticks])
    axes.set_ylim(ticks[0], ticks[-1])
    for step in (*steps[:-2:2], steps[-1]):
        is_last = step is steps[-1]
        axes.annotate(
            f"{step.projected:,.0f}",
            (step.batch, step.projected),
            xytext=(2, -15) if is_last else (4, -13),
            textcoords="offset points",
            ha="center" if is_last else "left",
            fontsize=8,
            color=INK,
        )
    fitting = [batch for batch in batches if plan.fits(batch, CONTEXT_TOKENS)]
    if fitting and fitting[-1] < batches[-1]:
        first, last = fitting[-1] * math.sqrt(2), batches[-1] * math.sqrt(2)
        axes.axvspan(first, last, color="#f3f5f7", zorder=0)
        axes.text(
            math.sqrt(first * last),
            math.sqrt(ticks[0] * ticks[-1]) / 2,
            "more than max_num_seqs\nor the arena allow",
            rotation=90,
            ha="center",
            va="center",
            fontsize=8,
            color=FAINT,
        )
    axes.set_xlim(batches[0] / math.sqrt(2), batches[-1] * math.sqrt(2))
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel(f"sequences decoding together, {CONTEXT_TOKENS:,} tokens each", color=INK)
    axes.set_ylabel("tokens/s, all sequences", color=INK)
    axes.set_title("Decode throughput, projected", loc="left", fontsize=11, color=INK)
    axes.legend(frameon=False, fontsize=9, loc="upper left")


def _ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, 20 .. around a range."""
    steps = [base * 10.0**power for power in range(-3, 9) for base in (1, 2, 5)]
    first = max(step for step in steps if step <= low)
    last = min(step for step in steps if step >= high)
    return [step for step in steps if first <= step <= last]
