"""Slabs, and handing out the units (blocks or slots) that slabs are cut into.

Knows ids and counts; does not know bytes, requests or what a unit holds.
"""

from __future__ import annotations

import enum

from hybridserve.core.step import UnitCopy


class SlabKind(enum.IntEnum):
    """What a slab is used for."""

    FREE = 0
    KV = 1
    STATE = 2
    NULL = 3


class IntegrityError(RuntimeError):
    """The bookkeeping contradicts itself: memory was lost, or has two owners."""


class SlabAllocator:
    """Hands out slabs 1 .. num_slabs - 1; slab 0 is the null slab (D8). A slab serves one pool at a time."""

    def __init__(self, num_slabs: int) -> None:
        if num_slabs < 1:
            raise ValueError(f"num_slabs: {num_slabs} leaves no room for the null slab")
        self.num_slabs = num_slabs
        # Slabs from here on were never used; on a CPU the system has not committed their pages yet.
        self._fresh = 1
        self._returned: list[int] = []
        self._kinds = bytearray([SlabKind.NULL])  # of each slab that was ever used
        self._holders: dict[int, UnitPool] = {}

    @property
    def num_usable(self) -> int:
        return self.num_slabs - 1

    @property
    def num_free(self) -> int:
        return self.num_slabs - 1 - len(self._holders)

    def allocate(self, holder: UnitPool) -> int:
        """The caller has checked `num_free`."""
        if self._returned:
            slab = self._returned.pop()
        else:
            slab = self._fresh
            if slab == self.num_slabs:
                raise IntegrityError("a slab was asked for and none is free")
            self._fresh += 1
            self._kinds.append(SlabKind.FREE)
        self._kinds[slab] = holder.kind
        self._holders[slab] = holder
        return slab

    def free(self, slab: int) -> None:
        del self._holders[slab]
        self._returned.append(slab)
        self._kinds[slab] = SlabKind.FREE

    def kinds(self) -> bytes:
        """The `SlabKind` of each slab, one byte each; those at the end, which were never used, are left
        out."""
        return bytes(self._kinds)

    def held_by(self, holder: UnitPool) -> set[int]:
        return {slab for slab, pool in self._holders.items() if pool is holder}

    def check_integrity(self) -> None:
        known = sorted([*self._holders, *self._returned])
        if known != list(range(1, self._fresh)):
            raise IntegrityError("a slab is lost, free twice, or free and in use")
        kinds = [self._holders[slab].kind if slab in self._holders else SlabKind.FREE for slab in known]
        if list(self._kinds) != [SlabKind.NULL, *kinds]:
            raise IntegrityError("the map of slabs differs from who holds them")


class UnitPool:
    """Units of one kind, `slab * units_per_slab + i`. Slabs are taken when needed, given back when empty.

    The fullest slab is filled first, so that the others have a chance to empty and change their use; the
    emptiest one can be emptied into the others. Each operation costs O(units that it moves), or O(a slab),
    however many slabs there are. `units_per_slab` 0: a kind that the model doesn't have.
    """

    kind: SlabKind
    """Of the slabs that it holds."""

    def __init__(self, slabs: SlabAllocator, units_per_slab: int) -> None:
        self.slabs = slabs
        self.units_per_slab = units_per_slab
        self.num_used = 0
        self._free: dict[int, list[int]] = {}  # slab -> its free units
        self._by_room: list[dict[int, None]] = [{} for _ in range(units_per_slab + 1)]  # free units -> slabs
        self._rooms = 0  # bit r is set where _by_room[r] is not empty, r > 0
        self._moves: dict[int, int] = {}  # new unit -> where what it holds was when the last step was frozen

    @property
    def num_slabs(self) -> int:
        return len(self._free)

    @property
    def num_open(self) -> int:
        """Free units in slabs that this pool already holds."""
        return len(self._free) * self.units_per_slab - self.num_used

    @property
    def num_free(self) -> int:
        """Units that could be had if all free slabs came here."""
        return self.num_open + self.slabs.num_free * self.units_per_slab

    def slabs_needed(self, count: int) -> int:
        """Slabs that must be added before `count` more units can be taken."""
        missing = count - self.num_open
        return -(-missing // self.units_per_slab) if missing > 0 else 0

    def slabs_to_spare(self, count: int) -> int:
        """Slabs that could be emptied if units were moved together, beside room for `count` more units; below
        0, those that have to be added. 0 for a kind that the model doesn't have."""
        return (self.num_open - count) // self.units_per_slab if self.units_per_slab else 0

    @property
    def num_in_emptiest(self) -> int:
        """Units in use of the slab that `empty_slab` would empty."""
        return self.units_per_slab + 1 - self._rooms.bit_length()

    def empty_slab(self) -> dict[int, int]:
        """Move what is in use of the emptiest slab into open units of others, the fullest first, and give the
        slab back. The caller has checked that there are as many (`slabs_to_spare`). Returns where each went.
        """
        size, room = self.units_per_slab, self._rooms.bit_length() - 1
        slab = next(iter(self._by_room[room]))
        self._discard(slab, room)
        free = set(self._free.pop(slab))
        units = [unit for unit in range(slab * size, (slab + 1) * size) if unit not in free]
        self.num_used -= len(units)
        moved = dict(zip(units, sorted(self._take(len(units))), strict=True))
        self.slabs.free(slab)
        for unit, new in moved.items():
            origin = self._moves.pop(unit, unit)
            if origin != new:
                self._moves[new] = origin
            self._rename(unit, new)
        return moved

    def _rename(self, unit: int, new: int) -> None:
        """What is known of a unit is about another now."""
        raise NotImplementedError

    @property
    def num_moves(self) -> int:
        """Since the last `take_moves`; a unit counts once."""
        return len(self._moves)

    def origin(self, unit: int) -> int:
        """Where the next step finds what a unit holds."""
        return self._moves.get(unit, unit)

    def take_moves(self) -> tuple[UnitCopy, ...]:
        """Moves since the last call, for the step that is frozen."""
        moves = tuple([UnitCopy(source, unit) for unit, source in self._moves.items()])
        self._moves.clear()
        return moves

    def _take(self, count: int) -> list[int]:
        """`count` units; the caller has checked that they are there."""
        units: list[int] = []
        while len(units) < count:
            if self._rooms:
                room = (self._rooms & -self._rooms).bit_length() - 1
                slab = next(iter(self._by_room[room]))
            else:
                slab, room = self._open_slab()
            rest = max(0, room - (count - len(units)))
            free = self._free[slab]
            units += free[: rest - 1 if rest else None : -1]
            del free[rest:]
            self._move(slab, room, rest)
        self.num_used += count
        return units

    def _give(self, unit: int) -> None:
        slab = unit // self.units_per_slab
        free = self._free[slab]
        free.append(unit)
        self.num_used -= 1
        self._moves.pop(unit, None)
        room = len(free)
        self._move(slab, room - 1, room)
        if room == self.units_per_slab:
            self._close_slab(slab)

    def _open_slab(self) -> tuple[int, int]:
        slab, size = self.slabs.allocate(self), self.units_per_slab
        self._free[slab] = list(range((slab + 1) * size - 1, slab * size - 1, -1))
        self._by_room[size][slab] = None
        self._rooms |= 1 << size
        return slab, size

    def _close_slab(self, slab: int) -> None:
        del self._free[slab]
        self._discard(slab, self.units_per_slab)
        self.slabs.free(slab)

    def _move(self, slab: int, room: int, new_room: int) -> None:
        self._discard(slab, room)
        self._by_room[new_room][slab] = None
        if new_room:
            self._rooms |= 1 << new_room

    def _discard(self, slab: int, room: int) -> None:
        del self._by_room[room][slab]
        if room and not self._by_room[room]:
            self._rooms &= ~(1 << room)

    def _check_units(self, used: set[int]) -> None:
        """`used` are the units that the pool believes to be in use."""
        if len(used) != self.num_used or self.slabs.held_by(self) != set(self._free):
            raise IntegrityError("units or slabs in use were miscounted")
        size = self.units_per_slab
        for slab, free in self._free.items():
            units = set(range(slab * size, (slab + 1) * size))
            if (
                set(free) != units - used
                or len(free) != len(units - used)
                or slab not in self._by_room[len(free)]
            ):
                raise IntegrityError(f"slab {slab}: a unit is lost, free twice, or free and in use")
        if any(unit // size not in self._free for unit in used):
            raise IntegrityError("a unit is in use in a slab that is not held")
        if not self._moves.keys() <= used:
            raise IntegrityError("something would be moved to a unit that is free")
        if self._rooms != sum(1 << room for room, slabs in enumerate(self._by_room) if room and slabs):
            raise IntegrityError("the index of slabs by free units is wrong")
