"""A plan as people read it: the lines that an engine prints when it starts and `hybridserve plan` shows.

Knows how numbers are laid out; computes none of them.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

from hybridserve.engine.roofline import CONTEXT_TOKENS, MEMORY_SHARE
from hybridserve.engine.units import UNITS, count_text, size_text
from hybridserve.kernels.registry import AUTO
from hybridserve.models.mapping import numbers_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hybridserve.engine.plan import EnginePlan, StagePlan

Row = tuple[str, str]

LONGEST_TITLE = 20
SHOWN_BATCHES = (1, 8, 32, 64, 128, 256, 512)


def plan_table(plan: EnginePlan, *, every_reason: bool = False) -> str:
    """Of the backends that were not taken it tells those that could not be, or every one with its reason. A
    plan of other hardware than the machine at hand also has what each rank's memory goes to, and how fast it
    would decode."""
    rows = [*_model_rows(plan)]
    if not plan.is_projected:
        rows.append(("", _short_memory(plan)))
    if plan.quantization is not None:
        rows += plan.quantization.rows()
    rows += _memory_rows(plan) if plan.is_projected else _workspace_rows(plan)
    rows += _arena_rows(plan)
    rows += _capacity_rows(plan) if plan.is_projected else [("fits", _short_capacity(plan))]
    rows.append(("limits", f"{plan.max_num_seqs} sequences, {plan.max_num_batched_tokens:,} tokens a step"))
    if plan.is_projected:
        rows += _decode_rows(plan)
    if plan.lora is not None:
        rows += plan.lora.rows()
    rows += _backend_rows(plan, every_reason=every_reason)
    rows.append(plan.graphs.row())
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}".rstrip() for name, text in rows)


def _model_rows(plan: EnginePlan) -> Iterator[Row]:
    yield "model", f"{plan.model} ({plan.architecture}), {plan.dtype} on {plan.device}"
    if plan.shape is not None:
        yield "", f"no checkpoint is here: planned from the shape of {plan.shape} that comes with hybridserve"
    if plan.hardware.memory_bytes is not None:
        memory = size_text(plan.hardware.memory_bytes)
        yield (
            "hardware",
            f"{plan.parallel.num_ranks} x {plan.hardware.title}, {memory} each; not this machine",
        )
    several = plan.parallel.num_ranks > 1
    if several:
        yield plan.parallel.row()
    yield (
        "weights",
        f"{size_text(plan.weight_bytes)}{' a rank' if several else ''}, "
        f"{count_text(plan.parameters_total)} parameters, {count_text(plan.parameters_active)} read a token",
    )


def _short_memory(plan: EnginePlan) -> str:
    parts: dict[str, int] = {}
    for stage in plan.stages:
        for part, formats in stage.weights_by_part().items():
            parts[part] = parts.get(part, 0) + sum(formats.values())
    listed = ", ".join(f"{part} {size_text(size)}" for part, size in parts.items())
    several = "" if len(plan.stages) == 1 else " (a rank of each stage together)"
    return f"{listed}{several}"


def _workspace_rows(plan: EnginePlan) -> Iterator[Row]:
    activations = max(stage.workspace.activations for stage in plan.stages)
    yield "workspace", f"{size_text(activations)} of activations in the largest step"


def _memory_rows(plan: EnginePlan) -> Iterator[Row]:
    """A column for each kind of stage, in the unit that suits the largest of them."""
    kinds = plan.kinds_of_stages()
    stages = [stage for _, stage in kinds]
    titles = [stage_title(*kind) for kind in kinds] if len(plan.stages) > 1 else [""]
    largest = max(plan.bytes_taken(stage) for stage in stages)
    unit = next(unit for unit in ("GiB", "MiB", "KiB") if largest >= UNITS[unit] or unit == "KiB")

    def shown(num_bytes: int) -> str:
        return f"{num_bytes / UNITS[unit]:.2f}"

    lines: list[tuple[str, Sequence[str]]] = [(f"{unit} a rank", titles)]
    columns = [stage.weights_by_part() for stage in stages]
    formats_of_parts = dict.fromkeys(
        (part, name) for column in columns for part, formats in column.items() for name in formats
    )
    for part, name in formats_of_parts:
        sizes = [column.get(part, {}).get(name, 0) for column in columns]
        lines.append((f"{part}, {name}", [shown(size) for size in sizes]))
    for name in ("runtime", "activations", "graphs", "collectives"):
        sizes = [getattr(stage.workspace, name) for stage in stages]
        if any(sizes):
            lines.append((name, [shown(size) for size in sizes]))
    if plan.adapter_bytes:
        lines.append(("adapters", [shown(plan.adapter_bytes)] * len(stages)))
    lines.append(("arena", [shown(stage.arena_bytes) for stage in stages]))
    if plan.hardware.memory_bytes is not None:
        left = [plan.hardware.memory_bytes - plan.bytes_taken(stage) for stage in stages]
        lines.append(("left free", [shown(size) for size in left]))
    yield from _grid("memory", lines)


def _arena_rows(plan: EnginePlan) -> Iterator[Row]:
    layout = plan.layout
    units = ((layout.blocks_per_slab, "blocks"), (layout.slots_per_slab, "slots"))
    per_slab = " or ".join(f"{count} {name}" for count, name in units if count)
    a_rank = " a rank" if plan.parallel.num_ranks > 1 else ""
    yield (
        "arena",
        f"{size_text(plan.arena_bytes)}{a_rank}: {layout.num_slabs} slabs of {size_text(layout.slab_bytes)}, "
        f"each {per_slab}",
    )
    if layout.blocks_per_slab:
        yield (
            "block",
            f"{layout.block_size} tokens, {size_text(layout.bytes_per_block)} "
            f"({size_text(plan.kv_bytes_per_token)} a token), {plan.cache_dtype}",
        )
    if layout.slots_per_slab:
        yield "slot", f"{size_text(layout.bytes_per_slot)} a sequence, recurrent state {plan.state_dtype}"
    if plan.prefix_caching:
        points = f", with a state every {plan.checkpoint_interval:,} tokens of a long prompt"
        yield "prefixes", "are kept while there is memory" + (points if plan.checkpoint_interval else "")
    else:
        yield "prefixes", "are not kept (cache.prefix_caching is false)"
    yield plan.host.row(several_ranks=plan.parallel.num_ranks > 1)
    if len(plan.stages) > 1:
        for numbers, stage in plan.kinds_of_stages():
            yield _numbered(numbers), _stage_text(numbers, stage)


def stage_title(numbers: Sequence[int], stage: StagePlan) -> str:
    """The layers of a stage that is alone of its kind, else the numbers of all that are."""
    return _numbered(numbers) if len(numbers) > 1 else _layers_text(stage, "-")


def _layers_text(stage: StagePlan, to: str) -> str:
    first, last = stage.layers
    return f"layers {first}{to}{last}" if last > first else f"layer {first}"


def _numbered(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"stage {numbers[0]}"
    listed = f"stages {numbers_text(numbers).strip('{}')}"
    return listed if len(listed) <= LONGEST_TITLE else f"{len(numbers)} of {numbers[0]} to {numbers[-1]}"


def _stage_text(numbers: Sequence[int], stage: StagePlan) -> str:
    layout = stage.layout
    sizes = (("block", layout.bytes_per_block), ("slot", layout.bytes_per_slot))
    units = ", ".join(f"{name} {size_text(size)}" for name, size in sizes if size)
    count = stage.layers[1] - stage.layers[0] + 1
    several = f"{count} layers each" if count > 1 else "a layer each"
    layers = _layers_text(stage, " to ") if len(numbers) == 1 else several
    return (
        f"{layers}: weights {size_text(stage.weight_bytes)}, arena "
        f"{size_text(stage.arena_bytes)}, slab {size_text(layout.slab_bytes)}, {units}, "
        f"padding {layout.padding:.1%}"
    )


def _short_capacity(plan: EnginePlan) -> str:
    shown = plan.capacity()[::2] if len(plan.capacity()) > 6 else plan.capacity()
    if shown[-1] != plan.capacity()[-1]:
        shown.append(plan.capacity()[-1])
    return ", ".join(f"{count:,} x {tokens:,}" for tokens, count in shown) + " tokens"


def _capacity_rows(plan: EnginePlan) -> Iterator[Row]:
    capacity = plan.capacity()
    lines = [
        ("tokens each", [_tokens(tokens) for tokens, _ in capacity]),
        ("sequences", [f"{count:,}" for _, count in capacity]),
    ]
    yield from _grid("fits", lines)


def _decode_rows(plan: EnginePlan) -> Iterator[Row]:
    steps = [plan.decode_step(batch) for batch in SHOWN_BATCHES]
    title = f"{plan.parallel.num_ranks} x {plan.hardware.title}"
    yield "decode", f"projected for {title}, {CONTEXT_TOKENS:,} tokens a sequence; nothing was measured"
    lines = [
        ("sequences", [str(step.batch) for step in steps]),
        ("GB a step", [f"{step.bytes_moved / 1e9:,.0f}" for step in steps]),
        ("roofline, tokens/s", [f"{step.roofline:,.0f}" for step in steps]),
        (f"at {MEMORY_SHARE:.0%}, tokens/s", [f"{step.projected:,.0f}" for step in steps]),
        ("each", [f"{step.projected / step.batch:,.0f}" for step in steps]),
    ]
    yield from _grid("", lines)
    if beyond := [step.batch for step in steps if not plan.fits(step.batch, CONTEXT_TOKENS)]:
        yield "", f"from {beyond[0]} sequences on: more than max_num_seqs or the arena allow"


def _backend_rows(plan: EnginePlan, *, every_reason: bool) -> Iterator[Row]:
    if plan.hardware.is_here:
        for op, choice in plan.backends.items():
            yield op, choice.text(every_reason=every_reason)
        return
    wanted = [f"{op} {choice.name}" for op, choice in plan.backends.items() if choice.name != AUTO]
    yield "kernels", ", ".join([*wanted, "chosen where it runs"])


def _grid(name: str, lines: Sequence[tuple[str, Sequence[str]]]) -> Iterator[Row]:
    """Lines of (label, cells) as rows, columns aligned to the right."""
    label_width = max(len(label) for label, _ in lines)
    columns = zip_longest(*(cells for _, cells in lines), fillvalue="")
    widths = [max(map(len, column)) for column in columns]
    for index, (label, cells) in enumerate(lines):
        padded = [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=False)]
        yield (name if index == 0 else ""), "   ".join([f"{label:<{label_width}}", *padded])


def _tokens(number: int) -> str:
    return f"{number // 1024}K" if number % 1024 == 0 else f"{number:,}"
