"""KV blocks with reference counts. Knows ids and counts; does not know tokens or requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridserve.core.slabs import IntegrityError, SlabAllocator, SlabKind, UnitPool

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class BlockPool(UnitPool):
    """A block can be shared by several sequences as long as nobody writes to it; it is free when the last
    lets go."""

    kind = SlabKind.KV

    def __init__(self, slabs: SlabAllocator, blocks_per_slab: int) -> None:
        super().__init__(slabs, blocks_per_slab)
        self._references: dict[int, int] = {}

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """`count` blocks, each with one reference; None, and nothing is taken, where there are fewer."""
        if self.slabs_needed(count) > self.slabs.num_free:
            return None
        blocks = self._take(count)
        for block in blocks:
            self._references[block] = 1
        return tuple(blocks)

    def share(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._references[block] += 1

    def free(self, blocks: Iterable[int]) -> list[int]:
        """Drop one reference to each. Returns those that have one left."""
        references = self._references
        single: list[int] = []
        for block in blocks:
            count = references[block]
            if count == 1:
                del references[block]
                self._give(block)
            else:
                references[block] = count - 1
                if count == 2:
                    single.append(block)
        return single

    def _rename(self, unit: int, new: int) -> None:
        self._references[new] = self._references.pop(unit)

    def num_references(self, block: int) -> int:
        return self._references.get(block, 0)

    def check_integrity(self, references: Mapping[int, int] | None = None) -> None:
        """`references`: how often each block is held, counted by those who hold them."""
        self._check_units(set(self._references))
        if references is not None and references != self._references:
            raise IntegrityError("the reference counts of blocks differ from what is held")
