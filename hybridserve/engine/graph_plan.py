"""Which decode steps are recorded: for how many sequences, and for how long ones.

Knows numbers; knows neither devices nor kernels.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridserve.config.schema import EngineConfig
    from hybridserve.core.cache_spec import CacheLayout

LARGEST_SIZE = 256

SIZE_STEP = 8
ADAPTER_SIZE_STEP = 32
"""Where a step has adapters: there are fewer sizes, as every recording costs time at start-up and memory."""

FIRST_LENGTH = 2048
LENGTH_FACTOR = 8
"""From one length to the next. Attention over 2,048 tokens launches programs for all that the length allows,
and those that have nothing to do end at once."""

MOST_POSITIONS = 1 << 22
"""Of all sequences of a recording together: what attention keeps of its parts grows with them. 256 sequences
of 16,384 tokens, or 32 of 131,072."""


def graph_sizes(num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24 .. up to `num_seqs` or 256, and the last of these itself."""
    largest = min(num_seqs, LARGEST_SIZE)
    sizes = {1, 2, 4, *range(SIZE_STEP, largest + 1, SIZE_STEP), largest}
    return tuple(sorted(size for size in sizes if size <= largest))


def adapter_graph_sizes(num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 32, 64, 96 .. up to the largest of `graph_sizes`, and that itself."""
    sizes = graph_sizes(num_seqs)
    return tuple(
        size for size in sizes if size in (1, 2, 4, 8, 16, sizes[-1]) or size % ADAPTER_SIZE_STEP == 0
    )


def graph_lengths(max_model_len: int) -> tuple[int, ...]:
    """2,048, eight times that, and so on, up to `max_model_len`."""
    lengths = []
    length = FIRST_LENGTH
    while length < max_model_len:
        lengths.append(length)
        length *= LENGTH_FACTOR
    return (*lengths, max_model_len)


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """Numbers of sequences and of tokens a sequence, ascending; both empty where nothing is recorded.

    Steps in which nobody has an adapter and steps in which somebody has one are recorded apart: most have
    none, and the first kind has nothing of adapters in it."""

    sizes: tuple[int, ...]
    lengths: tuple[int, ...]
    reason: str
    """Why nothing is recorded, or not as much as `max_num_seqs` asks for; may be empty."""
    adapter_sizes: tuple[int, ...] = ()
    """Numbers of sequences of steps with adapters, at the same lengths; empty where these aren't recorded."""
    num_adapter_slots: int = 0
    """Adapters that a step may have."""
    adapter_reason: str = ""
    """Why there may be adapters, and steps with them are not recorded."""
    on_demand: bool = False
    """Whether only what steps turn out to need is recorded: on a CPU, which computes rows that nobody needs
    for nothing, so that there is a size for every number of sequences."""

    @property
    def num_recordings(self) -> int:
        return sum(len(self.lengths_of(size)) for size in (*self.sizes, *self.adapter_sizes))

    def lengths_of(self, size: int) -> tuple[int, ...]:
        """Those that are recorded for so many sequences: the first, and of the others those that don't keep
        too much memory."""
        return self.lengths[:1] + tuple(each for each in self.lengths[1:] if each * size <= MOST_POSITIONS)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def row(self) -> tuple[str, str]:
        """For `EnginePlan.table`."""
        if not self.sizes:
            return "graphs", f"none ({self.reason})"
        why = f" ({self.reason})" if self.reason else ""
        if self.on_demand:
            adapters = f"; none with adapters ({self.adapter_reason})" if self.adapter_reason else ""
            return (
                "graphs",
                f"decode steps of up to {self.sizes[-1]} sequences, once they come often{why}{adapters}",
            )
        adapters = ""
        if self.adapter_sizes:
            adapters = f"; with adapters, {len(self.adapter_sizes)} sizes"
        elif self.adapter_reason:
            adapters = f"; none with adapters ({self.adapter_reason})"
        return (
            "graphs",
            f"decode steps of 1 to {self.sizes[-1]} sequences, {len(self.sizes)} sizes{why}, "
            f"of up to {self.lengths[-1]:,} tokens{adapters}; {self.num_recordings} recordings",
        )


def plan_graphs(
    config: EngineConfig,
    layout: CacheLayout,
    max_model_len: int,
    obstacle: str | None,
    num_adapter_slots: int = 0,
    adapter_obstacle: str | None = None,
    *,
    on_cpu: bool = False,
) -> GraphPlan:
    """The obstacles: why nothing can be recorded, or no step with adapters, if so; `num_adapter_slots` is 0
    where there are none. ValueError where it has to be."""
    wanted = config.kernels.graphs
    if wanted == "never":
        return GraphPlan((), (), "kernels.graphs is never")
    if wanted == "always" and (why := obstacle or adapter_obstacle):
        raise ValueError(f"kernels.graphs: always: {why}")
    if obstacle is not None:
        return GraphPlan((), (), obstacle)
    num_seqs = config.scheduler.max_num_seqs
    room = layout.max_sequences(1)
    reason = ""
    if room < min(num_seqs, LARGEST_SIZE):
        reason = f"max_num_seqs is {num_seqs}, but memory holds {room}"
    num_seqs = min(num_seqs, room)
    lengths = graph_lengths(max_model_len) if layout.blocks_per_slab and not on_cpu else (max_model_len,)
    sizes = tuple(range(1, min(num_seqs, LARGEST_SIZE) + 1)) if on_cpu else graph_sizes(num_seqs)
    plan = GraphPlan(sizes, lengths, reason, on_demand=on_cpu)
    if not num_adapter_slots:
        return plan
    if adapter_obstacle is not None:
        return replace(plan, adapter_reason=adapter_obstacle)
    sizes = sizes if on_cpu else adapter_graph_sizes(num_seqs)
    return replace(plan, adapter_sizes=sizes, num_adapter_slots=num_adapter_slots)
