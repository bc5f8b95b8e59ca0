"""What a low-rank-adapter backend is given and must do. Knows tensors; knows no request and no file.

An adapter lives in a *slot* of a table; slot 0 means no adapter and is always empty. Nothing here rounds a
rank up or fills with zeros: a pair has the rank that was trained.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from hybridserve.kernels.registry import Backend

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from hybridserve.kernels.moe.interface import ExpertGroups

CHUNK_ROWS = 32
"""Rows of one adapter that a tile of a grouped kernel takes at most."""

ALIGNMENT = 16
"""Bytes to a multiple of which A and B start: what a vector load takes."""


class Segment(NamedTuple):
    """Rows `start .. stop` of `LoraBatch.rows`: those of one adapter."""

    slot: int
    start: int
    stop: int


@dataclass(slots=True)
class LoraBatch:
    """Which of `T` rows use which adapter. Built once a step and shared by all layers.

    There is no batch where no row has an adapter: layers are then given None, and do nothing.
    """

    row_slots: torch.Tensor  # [T] int64: the slot of each row, 0 for none
    rows: torch.Tensor  # [R] int64: the rows that have one, grouped by slot, in order within a slot
    segments: list[Segment]  # by slot, the same facts on the host
    chunks: torch.Tensor  # [C, 3] int32: (slot, start in `rows`, number of rows <= CHUNK_ROWS) for tiles
    host_row_slots: npt.NDArray[np.int64]  # [T]: `row_slots` where no device need be asked
    is_recorded: bool = False
    """Whether steps are recorded with it: the tensors hold other rows in every step that is replayed, and
    the host knows none of them. Rows are padded with slot 0, chunks with ones of no rows. No segments."""
    slots: frozenset[int] = field(init=False)  # of the segments
    derived: dict[str, Any] = field(default_factory=dict)
    """Whatever a backend derives from the above once a step, by a name of its own."""

    def __post_init__(self) -> None:
        self.slots = frozenset(segment.slot for segment in self.segments)


@dataclass(frozen=True, slots=True, eq=False)
class LoraPair:
    """What one adapter adds to some columns of a projection's output:

    y[:, start : start + out] += scale * (x @ A.T) @ B + bias + gain * (y - base bias)

    A and B have the model's dtype. `scale`, `bias` (already scaled) and `gain` are float32 and meet the
    float32 accumulator. For an embedding A is [vocab, r], and a row of it takes the place of x @ A.T.
    """

    A: torch.Tensor  # [r, in], contiguous
    B: torch.Tensor  # [r, out], contiguous: neighbours among the outputs, not among the ranks, lie together
    scale: float
    start: int = 0
    bias: torch.Tensor | None = None  # [out]
    gain: torch.Tensor | None = None  # [out]: g - 1 of DoRA (arXiv 2402.09353), whose g is folded into B


@dataclass(frozen=True, slots=True)
class Room:
    """The most that any adapter may have in one place: what steps are recorded for, whoever comes later."""

    num_pairs: int  # of a (slot, group)
    num_outputs: int  # of a pair
    rank: int
    dtype: torch.dtype  # of A and B

    def check(self, pairs: tuple[LoraPair, ...]) -> None:
        """ValueError for pairs that recorded steps could not add."""
        if len(pairs) > self.num_pairs:
            raise ValueError(f"{len(pairs)} pairs where there is room for {self.num_pairs}")
        for pair in pairs:
            rank, num_outputs = pair.B.shape
            if rank > self.rank or num_outputs > self.num_outputs:
                raise ValueError(
                    f"rank {rank} and {num_outputs} outputs where there is room for {self.rank} and "
                    f"{self.num_outputs}"
                )
            if pair.A.dtype != self.dtype or any(each.data_ptr() % ALIGNMENT for each in (pair.A, pair.B)):
                raise ValueError(f"A and B are not {self.dtype} at multiples of {ALIGNMENT} bytes")


class LoraTable:
    """The pairs of every slot for one place in the model.

    With `num_groups` > 1 (experts) each slot has pairs for every group: (slot, group) is a virtual adapter.
    `version` changes with the content, so that what a backend keeps in `derived` can be told stale;
    `slot_versions` says of which slots it changed.
    """

    def __init__(self, num_slots: int, num_groups: int = 1) -> None:
        self.num_slots = num_slots
        self.num_groups = num_groups
        self.room: Room | None = None
        """Where steps with adapters are recorded; set before that, and while the table is empty."""
        self.version = 0
        self.slot_versions = [0] * (num_slots + 1)
        self.derived: dict[str, Any] = {}
        self._pairs: list[tuple[LoraPair, ...]] = [()] * ((num_slots + 1) * num_groups)
        self._used: set[int] = set()

    def pairs(self, slot: int, group: int = 0) -> tuple[LoraPair, ...]:
        """In order of `start`, not overlapping; none where that slot's adapter leaves this place alone."""
        return self._pairs[slot * self.num_groups + group]

    def concerns(self, batch: LoraBatch) -> bool:
        """Whether any adapter of the batch has pairs here, or may have some when a recorded step is run."""
        if batch.is_recorded:
            return self.room is not None or bool(self._used)
        return not self._used.isdisjoint(batch.slots)

    def put(self, slot: int, pairs: tuple[LoraPair, ...], group: int = 0) -> None:
        if not (0 < slot <= self.num_slots and 0 <= group < self.num_groups):
            raise IndexError(f"slot {slot} of {self.num_slots}, group {group} of {self.num_groups}")
        if self.room is not None:
            self.room.check(pairs)
        self._pairs[slot * self.num_groups + group] = pairs
        self._changed(slot)

    def clear(self, slot: int) -> None:
        """Leave nothing of an adapter behind, whatever the next one in its slot adapts."""
        if not 0 < slot <= self.num_slots:
            raise IndexError(f"slot {slot} of {self.num_slots}")
        if slot not in self._used:
            return
        first = slot * self.num_groups
        self._pairs[first : first + self.num_groups] = [()] * self.num_groups
        self._changed(slot)

    def _changed(self, slot: int) -> None:
        first = slot * self.num_groups
        if any(self._pairs[first : first + self.num_groups]):
            self._used.add(slot)
        else:
            self._used.discard(slot)
        self.version += 1
        self.slot_versions[slot] = self.version


class LoraBackend(Backend):
    """Adds what adapters say to a step's activations, in place, for the rows that have one.

    Rows without an adapter are neither read nor written. A row's result does not depend on the company that
    it is in: to the bit with `native` and `reference`; with `torch_native`, whose matrix products have other
    shapes in other company, up to float32 rounding of its sums. Rank activations and sums are float32.
    """

    def write(self, table: LoraTable, device: torch.device) -> None:
        """Bring to the device, in the order of what is queued there, what recorded steps read of a table that
        has room: before any is recorded, and when the table has changed. What they read stays where it is."""
        return

    @abstractmethod
    def add(
        self,
        y: torch.Tensor,  # [T, out], rows may be strided; the model's dtype or float32
        x: torch.Tensor,  # [T, in], the unquantized input of the projection; rows may be strided
        table: LoraTable,
        batch: LoraBatch,
        bias: torch.Tensor | None = None,  # [out]: what y already has of the base model's bias
    ) -> None: ...

    @abstractmethod
    def add_embedding(
        self,
        y: torch.Tensor,  # [T, hidden]
        token_ids: torch.Tensor,  # [T] int64, local to the A of the pairs; -1 adds nothing but gain and bias
        table: LoraTable,
        batch: LoraBatch,
    ) -> None: ...

    @abstractmethod
    def add_experts(
        self,
        y: torch.Tensor,  # [P, out], one row a (token, expert) pair; the model's dtype or float32
        x: torch.Tensor,  # [N, in]
        x_rows: torch.Tensor | None,  # [P] int64: the row of x of each pair; None: they are the pairs' own
        table: LoraTable,  # a group an expert
        batch: LoraBatch,  # over tokens
        groups: ExpertGroups,
    ) -> None: ...
