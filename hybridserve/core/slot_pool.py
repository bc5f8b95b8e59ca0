"""Recurrent-state slots with owners and generations. Knows ids and names; does not know what a state is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridserve.core.slabs import IntegrityError, SlabAllocator, SlabKind, UnitPool

if TYPE_CHECKING:
    from collections.abc import Mapping


class SlotPool(UnitPool):
    """A slot has exactly one owner. Its generation counts its tenants: a note about a slot's content that
    carries another generation than the slot's is about somebody else's state (D13)."""

    kind = SlabKind.STATE

    def __init__(self, slabs: SlabAllocator, slots_per_slab: int) -> None:
        super().__init__(slabs, slots_per_slab)
        self._owners: dict[int, str] = {}
        self._generations: dict[int, int] = {}

    def allocate(self, owner: str) -> int | None:
        """A slot, or None where there is none."""
        if self.slabs_needed(1) > self.slabs.num_free:
            return None
        slot = self._take(1)[0]
        self._owners[slot] = owner
        self._generations[slot] = self._generations.get(slot, 0) + 1
        return slot

    def free(self, slot: int, owner: str) -> None:
        if self._owners.get(slot) != owner:
            raise IntegrityError(f"slot {slot} is freed by {owner!r} but owned by {self._owners.get(slot)!r}")
        del self._owners[slot]
        self._give(slot)

    def _rename(self, unit: int, new: int) -> None:
        self._owners[new] = self._owners.pop(unit)
        self._generations[new] = self._generations.get(new, 0) + 1

    def owner(self, slot: int) -> str | None:
        return self._owners.get(slot)

    def generation(self, slot: int) -> int:
        """How many owners the slot has had, the present one included."""
        return self._generations.get(slot, 0)

    def check_integrity(self, owners: Mapping[int, str] | None = None) -> None:
        """`owners`: the owner of each slot in use, told by those who hold them."""
        self._check_units(set(self._owners))
        if owners is not None and owners != self._owners:
            raise IntegrityError("the owners of slots differ from those who hold them")
