"""The host's memory, cut like the arena: sequences that were swapped out, and evicted prefixes. Knows ids,
counts and which copies are planned; does not know tokens, nor who is swapped out or why.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from hybridserve.core.block_pool import BlockPool
from hybridserve.core.slabs import IntegrityError, SlabAllocator, SlabKind, UnitPool
from hybridserve.core.slot_pool import SlotPool
from hybridserve.core.step import UnitCopies, UnitCopy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hybridserve.core.cache_spec import CacheLayout
    from hybridserve.core.prefix_nodes import Node
    from hybridserve.core.request import Request

OWNER = "#prefix cache"
"""Of slots that hold checkpoints, in the arena and here; no request's id has a '#' at its beginning."""

MAX_KEPT_BYTES = 64 << 20
"""Of evicted prefixes that one step copies here, give or take a unit: a few milliseconds on any machine."""


class Held(NamedTuple):
    """Memory, of either tier, that a sequence has given up and that a step in flight may still use."""

    blocks: tuple[int, ...]
    slot: int
    owner: str


class _Fixed:
    """How many units of a pool can't be evicted, by slab."""

    def __init__(self, pool: UnitPool) -> None:
        self._pool = pool
        self.counts: dict[int, int] = {}
        self.total = 0

    def add(self, unit: int) -> None:
        slab = unit // self._pool.units_per_slab
        self.counts[slab] = self.counts.get(slab, 0) + 1
        self.total += 1

    def remove(self, unit: int) -> None:
        slab = unit // self._pool.units_per_slab
        self.counts[slab] -= 1
        if not self.counts[slab]:
            del self.counts[slab]
        self.total -= 1

    def slabs_with(self, count: int) -> int:
        """Slabs that could not be anybody else's if `count` more units were fixed and the rest were gone."""
        size = self._pool.units_per_slab
        if not size:
            return 0
        missing = max(0, count + self.total - len(self.counts) * size)
        return len(self.counts) - (-missing // size)


class HostTier:
    """Two kinds of tenants: sequences, which stay until they are released, and prefixes, which are `offer`ed
    to whoever needs the room, the oldest first. `forget` is called for each that goes.

    A copy from the arena is planned with the unit that it goes to, and belongs to the next step that is
    frozen (`take_swaps_out`). Without slabs, nothing ever fits.
    """

    def __init__(self, layout: CacheLayout, num_slabs: int) -> None:
        """`num_slabs`: with slab 0, which is never handed out."""
        self.layout = layout
        self.slabs = SlabAllocator(max(1, num_slabs))
        self.blocks = BlockPool(self.slabs, layout.blocks_per_slab)
        self.slots = SlotPool(self.slabs, layout.slots_per_slab)
        self.forget: Callable[[SlabKind, Node], None] = lambda kind, node: None
        self.num_sequences = 0
        self._fixed = {SlabKind.KV: _Fixed(self.blocks), SlabKind.STATE: _Fixed(self.slots)}
        self._offered: dict[tuple[SlabKind, int], Node] = {}  # the oldest first
        self._swaps_out: dict[SlabKind, dict[int, int]] = {SlabKind.KV: {}, SlabKind.STATE: {}}
        self._num_kept_bytes = 0  # since the last step was frozen
        self.num_planned_bytes = 0
        """Of sequences, that the next step to be frozen copies here."""
        self._reading: dict[int, list[Held]] = {}

    # ---- room

    def reserve(self, num_blocks: int, num_slots: int) -> bool:
        """Whether so many units can be had; prefixes have gone for them if they can, and only then."""
        blocks, slots = self._fixed[SlabKind.KV], self._fixed[SlabKind.STATE]
        if blocks.slabs_with(num_blocks) + slots.slabs_with(num_slots) > self.slabs.num_usable:
            return False
        while not self._fits(num_blocks, num_slots):
            self._evict_oldest()
        return True

    def _fits(self, num_blocks: int, num_slots: int) -> bool:
        needed = self.blocks.slabs_needed(num_blocks) if num_blocks else 0
        needed += self.slots.slabs_needed(num_slots) if num_slots else 0
        return needed <= self.slabs.num_free

    def _evict_oldest(self) -> None:
        (kind, unit), node = next(iter(self._offered.items()))
        self.forget(kind, node)
        self.drop(kind, unit)

    # ---- sequences

    def swap_out(self, request: Request, blocks: Sequence[int], slot: int) -> bool:
        """Plan a copy of units of the arena, and keep them for `request`; False, and nothing has changed,
        where there is no room. `slot` 0: it has none."""
        if not self.reserve(len(blocks), int(slot > 0)):
            return False
        request.host_block_ids = self._take_blocks(blocks)
        if slot:
            request.host_slot = self._take_slot(slot, request.id)
        self.num_planned_bytes += self._num_bytes(len(blocks), int(slot > 0))
        self.num_sequences += 1
        return True

    def release(self, request: Request, step_id: int | None = None) -> None:
        """Take back what a request holds: at once, or when step `step_id`, which swaps it in, is done."""
        if not request.host_block_ids and not request.host_slot:
            return
        held = Held(request.host_block_ids, request.host_slot, request.id)
        request.host_block_ids, request.host_slot = (), 0
        self.num_sequences -= 1
        if step_id is None:
            self._free(held)
        else:  # a copy to it in the same step would come before that from it
            self._reading.setdefault(step_id, []).append(held)

    def step_finished(self, step_id: int) -> None:
        """Nothing up to and including this step runs any more."""
        for step in [step for step in self._reading if step <= step_id]:
            for held in self._reading.pop(step):
                self._free(held)

    def _free(self, held: Held) -> None:
        num_dropped = {SlabKind.KV: 0, SlabKind.STATE: 0}
        for kind, units in ((SlabKind.KV, held.blocks), (SlabKind.STATE, (held.slot,) if held.slot else ())):
            for unit in units:
                self._fixed[kind].remove(unit)
                num_dropped[kind] += self._swaps_out[kind].pop(unit, None) is not None
        self.num_planned_bytes -= self._num_bytes(num_dropped[SlabKind.KV], num_dropped[SlabKind.STATE])
        self.blocks.free(held.blocks)
        if held.slot:
            self.slots.free(held.slot, held.owner)

    def _num_bytes(self, num_blocks: int, num_slots: int) -> int:
        return num_blocks * self.layout.block_stride + num_slots * self.layout.slot_stride

    # ---- prefixes

    def keep(self, kind: SlabKind, source: int, node: Node) -> int:
        """Plan a copy of a block or checkpoint of the arena that goes: the unit that it goes to, which is on
        offer; 0 where there is no room, or the next step copies enough already."""
        is_block = kind is SlabKind.KV
        if self._num_kept_bytes >= MAX_KEPT_BYTES or not self.reserve(int(is_block), int(not is_block)):
            return 0
        self._num_kept_bytes += self.layout.block_stride if is_block else self.layout.slot_stride
        unit = self._take_blocks([source])[0] if is_block else self._take_slot(source, OWNER)
        self.offer(kind, unit, node)
        return unit

    def offer(self, kind: SlabKind, unit: int, node: Node) -> None:
        """Whoever needs the room may have it, after all that was offered before."""
        self._fixed[kind].remove(unit)
        self._offered[kind, unit] = node

    def withdraw(self, kind: SlabKind, unit: int) -> None:
        """A step is going to read it."""
        del self._offered[kind, unit]
        self._fixed[kind].add(unit)

    def drop(self, kind: SlabKind, unit: int) -> None:
        """Free a unit that is on offer."""
        del self._offered[kind, unit]
        self._swaps_out[kind].pop(unit, None)
        if kind is SlabKind.KV:
            self.blocks.free([unit])
        else:
            self.slots.free(unit, OWNER)

    def clear(self) -> None:
        """Keep nothing but what sequences hold or steps read."""
        while self._offered:
            self._evict_oldest()

    # ---- copies

    def _take_blocks(self, sources: Sequence[int]) -> tuple[int, ...]:
        """Room for them has been made."""
        blocks = self.blocks.allocate(len(sources)) or ()
        for block, source in zip(blocks, sources, strict=True):
            self._fixed[SlabKind.KV].add(block)
            self._swaps_out[SlabKind.KV][block] = source
        return blocks

    def _take_slot(self, source: int, owner: str) -> int:
        slot = self.slots.allocate(owner) or 0
        self._fixed[SlabKind.STATE].add(slot)
        self._swaps_out[SlabKind.STATE][slot] = source
        return slot

    def take_swaps_out(self) -> UnitCopies:
        """Copies that were planned since the last call and are still wanted, for the step that is frozen."""
        blocks, slots = self._swaps_out[SlabKind.KV], self._swaps_out[SlabKind.STATE]
        copies = UnitCopies(
            tuple([UnitCopy(source, block) for block, source in blocks.items()]),
            tuple([UnitCopy(source, slot) for slot, source in slots.items()]),
        )
        blocks.clear()
        slots.clear()
        self._num_kept_bytes = self.num_planned_bytes = 0
        return copies

    # ---- what is there

    def bytes_by_kind(self) -> dict[str, int]:
        """What the host's memory is used for. "sequences": with prefixes that a step reads just now."""
        block, slot = self.layout.block_stride, self.layout.slot_stride
        num_blocks, num_slots = self._fixed[SlabKind.KV].total, self._fixed[SlabKind.STATE].total
        used = self.blocks.num_used * block + self.slots.num_used * slot
        return {
            "sequences": num_blocks * block + num_slots * slot,
            "prefix_blocks": (self.blocks.num_used - num_blocks) * block,
            "checkpoints": (self.slots.num_used - num_slots) * slot,
            "free": self.slabs.num_usable * self.layout.slab_bytes - used,
        }

    def check_integrity(
        self, requests: Sequence[Request], blocks: Mapping[int, Node], slots: Mapping[int, Node]
    ) -> None:
        """Raise IntegrityError unless `requests`, the tree (its nodes by block and slot) and steps in flight
        hold exactly what the pools gave out."""
        held = [Held(one.host_block_ids, one.host_slot, one.id) for one in requests]
        if self.num_sequences != sum(one.blocks != () or one.slot > 0 for one in held):
            raise IntegrityError("sequences in the host's memory were miscounted")
        held += [one for group in self._reading.values() for one in group]
        references = Counter(block for one in held for block in one.blocks) + Counter(list(blocks))
        owners = dict.fromkeys(slots, OWNER) | {one.slot: one.owner for one in held if one.slot}
        self.slabs.check_integrity()
        self.blocks.check_integrity(references)
        self.slots.check_integrity(owners)
        if any(count > 1 for count in references.values()) or len(owners) != self.slots.num_used:
            raise IntegrityError("a unit of the host's memory has two tenants")
        known = {SlabKind.KV: blocks, SlabKind.STATE: slots}
        if any(known[kind].get(unit) is not node for (kind, unit), node in self._offered.items()):
            raise IntegrityError("a unit of the host's memory is on offer that the tree does not know")
        for kind, pool, in_use in (
            (SlabKind.KV, self.blocks, set(references)),
            (SlabKind.STATE, self.slots, set(owners)),
        ):
            fixed = [unit for unit in in_use if (kind, unit) not in self._offered]
            size = pool.units_per_slab
            if self._fixed[kind].counts != Counter(unit // size for unit in fixed):
                raise IntegrityError("what can't be evicted of the host's memory was miscounted")
            if not in_use.issuperset(self._swaps_out[kind]):
                raise IntegrityError("a copy is planned to a unit of the host's memory that is free")
