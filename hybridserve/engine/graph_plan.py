"""Which decode steps are recorded: for how many sequences, and for how long ones.

Knows numbers; knows neither devices nor kernels.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridserve.config.schema import EngineConfig
    from hybridserve.core.cache_spec import CacheLayout

LARGEST_SIZE = 256
SIZE_STEP = 8

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
    """Numbers of sequences and of tokens a sequence, ascending; both empty where nothing is recorded."""

    sizes: tuple[int, ...]
    lengths: tuple[int, ...]
    reason: str
    """Why nothing is recorded, or not as much as `max_num_seqs` asks for; may be empty."""

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
        return (
            "graphs",
            f"decode steps of 1 to {self.sizes[-1]} sequences, {len(self.sizes)} sizes{why}, "
            f"of up to {self.lengths[-1]:,} tokens",
        )


def plan_graphs(
    config: EngineConfig, layout: CacheLayout, max_model_len: int, obstacle: str | None
) -> GraphPlan:
    """`obstacle`: why nothing can be recorded, if so. ValueError where it has to be."""
    wanted = config.kernels.graphs
    if wanted == "never":
        return GraphPlan((), (), "kernels.graphs is never")
    if obstacle is not None:
        if wanted == "always":
            raise ValueError(f"kernels.graphs: always: {obstacle}")
        return GraphPlan((), (), obstacle)
    num_seqs = config.scheduler.max_num_seqs
    room = layout.max_sequences(1)
    reason = ""
    if room < min(num_seqs, LARGEST_SIZE):
        reason = f"max_num_seqs is {num_seqs}, but memory holds {room}"
    lengths = graph_lengths(max_model_len) if layout.blocks_per_slab else (max_model_len,)
    return GraphPlan(graph_sizes(min(num_seqs, room)), lengths, reason)
