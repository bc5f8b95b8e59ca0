"""Emptying slabs of one kind for the other. Knows pools and bytes; does not know who holds a unit.

A slab changes its use only when it is empty, so a few units in each of many slabs can stand in the way of
memory that is there. They are moved together, by copies that the next step begins with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hybridserve.core.step import UnitCopies, UnitCopy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hybridserve.core.block_pool import BlockPool
    from hybridserve.core.cache_spec import CacheLayout
    from hybridserve.core.slot_pool import SlotPool

MAX_BYTES = 256 << 20
"""Moved by one step, unless a single slab takes more, or nothing could run without."""


@dataclass(slots=True)
class CompactionCounters:
    num_compacted_slabs: int = 0
    """Emptied by moving what was in them."""
    num_moved_bytes: int = 0


class Renaming(NamedTuple):
    """Units that have other numbers now, by their old ones. The others keep theirs."""

    blocks: Mapping[int, int]
    slots: Mapping[int, int]

    def of_blocks(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        """The same tuple where none of them has moved."""
        if self.blocks.keys().isdisjoint(blocks):
            return blocks
        return tuple([self.blocks.get(block, block) for block in blocks])

    def of_slot(self, slot: int) -> int:
        return self.slots.get(slot, slot)


def rename_copies(
    copies: Iterable[UnitCopy], moved: Mapping[int, int], *, sources: bool = True
) -> list[UnitCopy]:
    """Copies that come after the moves; not `sources`: those are in other memory."""
    return [
        UnitCopy(moved.get(source, source) if sources else source, moved.get(destination, destination))
        for source, destination in copies
    ]


class Compactor:
    """Empties slabs, and counts what that costs the step that is being planned."""

    def __init__(
        self,
        layout: CacheLayout,
        blocks: BlockPool,
        slots: SlotPool,
        counters: CompactionCounters | None = None,
    ) -> None:
        self.counters = counters or CompactionCounters()
        self.is_held_up = False
        """Whether slabs were left as they are, in this planning, since the step moves enough."""
        self._blocks, self._slots = blocks, slots
        self._block_bytes, self._slot_bytes = layout.block_stride, layout.slot_stride
        self._is_bounded = True

    def empty_slabs(self, count: int, num_blocks: int, num_slots: int) -> Renaming:
        """Empty up to `count` slabs, as far as there is room for so many units more in the others of their
        kind and the step's bytes go. What has moved has to be told to all who hold units."""
        moved: dict[int, int] = {}
        if self._blocks.slabs_to_spare(num_blocks) > 0:
            pool: BlockPool | SlotPool = self._blocks
            num_wanted, num_bytes = num_blocks, self._block_bytes
        else:
            pool, num_wanted, num_bytes = self._slots, num_slots, self._slot_bytes
        while count and pool.slabs_to_spare(num_wanted) > 0:
            if not self._has_bytes(pool.num_in_emptiest * num_bytes):
                self.is_held_up = True
                break
            last = pool.empty_slab()
            moved = {unit: last.pop(new, new) for unit, new in moved.items()} | last
            self.counters.num_compacted_slabs += 1
            count -= 1
        return Renaming(moved, {}) if pool is self._blocks else Renaming({}, moved)

    def _has_bytes(self, num_bytes: int) -> bool:
        num_moved = self._num_moved_bytes
        return not num_moved or num_moved + num_bytes <= MAX_BYTES or not self._is_bounded

    @property
    def _num_moved_bytes(self) -> int:
        return self._blocks.num_moves * self._block_bytes + self._slots.num_moves * self._slot_bytes

    def lift_bound(self) -> bool:
        """Nothing can run: let the step move as much as that takes. Whether that makes a difference."""
        was_held_up, self.is_held_up = self.is_held_up, False
        self._is_bounded = self._is_bounded and not was_held_up
        return was_held_up

    def take_moves(self) -> UnitCopies:
        """For the step that is frozen."""
        self.counters.num_moved_bytes += self._num_moved_bytes
        self.is_held_up, self._is_bounded = False, True
        return UnitCopies(self._blocks.take_moves(), self._slots.take_moves())
