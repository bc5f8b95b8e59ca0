"""Slabs, blocks and slots against brute force: nothing is lost or handed out twice, and null never."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybridserve.core.block_pool import BlockPool
from hybridserve.core.slabs import IntegrityError, SlabAllocator, SlabKind
from hybridserve.core.slot_pool import SlotPool


class PoolMachine(RuleBasedStateMachine):
    """Two pools over one allocator; the model is a Counter of block references and a dict of slot owners."""

    @initialize(
        num_slabs=st.integers(2, 6), blocks_per_slab=st.integers(0, 5), slots_per_slab=st.integers(1, 3)
    )
    def build(self, num_slabs: int, blocks_per_slab: int, slots_per_slab: int) -> None:
        self.slabs = SlabAllocator(num_slabs)
        self.blocks = BlockPool(self.slabs, blocks_per_slab)
        self.slots = SlotPool(self.slabs, slots_per_slab)
        self.references: Counter[int] = Counter()
        self.owners: dict[int, str] = {}
        self.generations: Counter[int] = Counter()

    def _free_units(self, used: set[int], per_slab: int, others: set[int]) -> list[int]:
        """Every unit that could be handed out: of slabs that the other kind doesn't hold."""
        slabs = set(range(1, self.slabs.num_slabs)) - others
        return [
            unit
            for slab in slabs
            for unit in range(slab * per_slab, (slab + 1) * per_slab)
            if unit not in used
        ]

    def _slabs_of(self, units: set[int], per_slab: int) -> set[int]:
        return {unit // per_slab for unit in units}

    def _free_blocks(self) -> list[int]:
        others = self._slabs_of(set(self.owners), self.slots.units_per_slab or 1)
        return self._free_units(set(self.references), self.blocks.units_per_slab, others)

    def _free_slots(self) -> list[int]:
        others = self._slabs_of(set(self.references), self.blocks.units_per_slab or 1)
        return self._free_units(set(self.owners), self.slots.units_per_slab, others)

    @precondition(lambda self: self.blocks.units_per_slab)
    @rule(count=st.integers(0, 9))
    def allocate_blocks(self, count: int) -> None:
        free = self._free_blocks()
        blocks = self.blocks.allocate(count)
        assert (blocks is None) == (count > len(free))
        if blocks is not None:
            assert len(set(blocks)) == count
            assert set(blocks) <= set(free)
            self.references.update(blocks)

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def share_or_free_blocks(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.references)), unique=True))
        if data.draw(st.booleans()):
            self.blocks.share(blocks)
            self.references.update(blocks)
        else:
            self.blocks.free(blocks)
            self.references = +(self.references - Counter(blocks))

    @precondition(lambda self: self.slots.units_per_slab)
    @rule(owner=st.sampled_from("abc"))
    def allocate_slot(self, owner: str) -> None:
        free = self._free_slots()
        slot = self.slots.allocate(owner)
        assert (slot is None) == (not free)
        if slot is not None:
            assert slot in free
            self.owners[slot] = owner
            self.generations[slot] += 1
            assert self.slots.generation(slot) == self.generations[slot]

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def free_slot(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.owners)))
        with pytest.raises(IntegrityError, match="owned by"):
            self.slots.free(slot, "somebody else")
        self.slots.free(slot, self.owners.pop(slot))

    @precondition(lambda self: self.blocks.slabs_to_spare(0) > 0)
    @rule()
    def empty_a_slab_of_blocks(self) -> None:
        num_free = self.slabs.num_free
        moved = self.blocks.empty_slab()
        self.references = Counter({moved.get(block, block): n for block, n in self.references.items()})
        assert self.slabs.num_free == num_free + 1

    @precondition(lambda self: self.slots.slabs_to_spare(0) > 0)
    @rule()
    def empty_a_slab_of_slots(self) -> None:
        num_free = self.slabs.num_free
        moved = self.slots.empty_slab()
        self.owners = {moved.get(slot, slot): owner for slot, owner in self.owners.items()}
        for slot in moved.values():
            self.generations[slot] += 1  # another tenant
            assert self.slots.generation(slot) == self.generations[slot]
        assert self.slabs.num_free == num_free + 1

    @rule()
    def freeze(self) -> None:
        for pool, used in ((self.blocks, set(self.references)), (self.slots, set(self.owners))):
            moves = pool.take_moves()
            assert {move.destination for move in moves} <= used
            assert all(source != destination for source, destination in moves)

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "slabs"):
            return
        self.slabs.check_integrity()
        self.blocks.check_integrity(self.references)
        self.slots.check_integrity(self.owners)
        assert 0 not in self.references
        assert 0 not in self.owners
        held = self._slabs_of(set(self.references), self.blocks.units_per_slab or 1)
        held |= self._slabs_of(set(self.owners), self.slots.units_per_slab or 1)
        assert self.slabs.num_free == self.slabs.num_usable - len(held)
        assert self.blocks.num_free == len(self._free_blocks())
        assert self.slots.num_free == len(self._free_slots())


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)


def test_the_fullest_slab_is_filled_first() -> None:
    slabs = SlabAllocator(4)
    pool = BlockPool(slabs, 4)
    blocks = pool.allocate(12)
    assert blocks is not None
    first, second, third = blocks[:4], blocks[4:8], blocks[8:]
    pool.free(first[:3] + second[:1] + third[:2])
    assert pool.allocate(1) == (second[0],)
    assert set(pool.allocate(2) or ()) == set(third[:2])
    pool.free([first[3]])
    assert slabs.num_free == 1  # the emptiest one could empty


def test_a_slab_changes_its_use_when_it_empties() -> None:
    slabs = SlabAllocator(3)
    blocks, slots = BlockPool(slabs, 8), SlotPool(slabs, 2)
    kv = blocks.allocate(16)
    assert kv is not None
    assert slots.allocate("a") is None
    blocks.free(kv[:7])
    assert slots.allocate("a") is None
    blocks.free(kv[7:8])
    slot = slots.allocate("a")
    assert slot is not None
    assert slot // 2 == kv[0] // 8
    assert blocks.allocate(1) is None


def test_high_slabs_stay_untouched_until_needed() -> None:
    slabs = SlabAllocator(10**9)  # costs nothing: slabs never used are not listed
    pool = BlockPool(slabs, 2)
    for _ in range(100):
        blocks = pool.allocate(6)
        assert blocks is not None
        assert max(blocks) < 8
        pool.free(blocks)


def test_a_double_free_is_found() -> None:
    slabs = SlabAllocator(3)
    blocks, slots = BlockPool(slabs, 2), SlotPool(slabs, 2)
    taken = blocks.allocate(1)
    assert taken is not None
    blocks.free(taken)
    with pytest.raises(KeyError):
        blocks.free(taken)
    slot = slots.allocate("a")
    assert slot is not None
    slots.free(slot, "a")
    with pytest.raises(IntegrityError, match="owned by None"):
        slots.free(slot, "a")


@pytest.mark.parametrize("corruption", ["free twice", "lost", "reference", "owner"])
def test_check_integrity_sees_corruption(corruption: str) -> None:
    slabs = SlabAllocator(4)
    blocks, slots = BlockPool(slabs, 4), SlotPool(slabs, 2)
    taken, slot = blocks.allocate(2), slots.allocate("a")
    assert taken is not None
    assert slot is not None
    references, owners = Counter(taken), {slot: "a"}
    free = blocks._free[taken[0] // 4]
    match corruption:
        case "free twice":
            free.append(taken[0])
        case "lost":
            free.pop()
        case "reference":
            references[taken[0]] += 1
        case "owner":
            owners[slot] = "b"
    check = slots.check_integrity if corruption == "owner" else blocks.check_integrity
    with pytest.raises(IntegrityError):
        check(owners if corruption == "owner" else references)


def test_the_map_of_slabs_says_who_holds_each() -> None:
    slabs = SlabAllocator(10**9)  # those never used are not listed
    blocks, slots = BlockPool(slabs, 2), SlotPool(slabs, 2)
    assert slabs.kinds() == bytes([SlabKind.NULL])
    held = blocks.allocate(3)
    slot = slots.allocate("a")
    assert held is not None
    assert slot is not None
    assert slabs.kinds() == bytes([SlabKind.NULL, SlabKind.KV, SlabKind.KV, SlabKind.STATE])
    blocks.free(held)
    assert slabs.kinds() == bytes([SlabKind.NULL, SlabKind.FREE, SlabKind.FREE, SlabKind.STATE])
    assert slots.allocate("b") is not None
    assert slots.allocate("c") is not None  # a slab changes its use
    assert sorted(slabs.kinds()[1:]) == sorted([SlabKind.FREE, SlabKind.STATE, SlabKind.STATE])
    slabs.check_integrity()
    slabs._kinds[1] ^= 1
    with pytest.raises(IntegrityError, match="map"):
        slabs.check_integrity()


def test_allocation_visits_no_slab_that_it_does_not_use() -> None:
    """F042's class of fault, a walk over everything that is held: 20,000 full slabs, then single blocks."""
    slabs = SlabAllocator(30_000)
    pool = BlockPool(slabs, 4)
    pool.allocate(80_000)
    rng = random.Random(0)
    visited = []
    pool._free = _Watched(pool._free, visited)
    for _ in range(100):
        blocks = pool.allocate(1)
        assert blocks is not None
        if rng.random() < 0.5:
            pool.free(blocks)
    assert len(visited) <= 300
    visited.clear()
    pool.free(range(4, 40, 2))  # half of nine slabs
    pool.empty_slab()
    assert len(visited) <= 100


class _Watched(dict[int, list[int]]):
    def __init__(self, content: dict[int, list[int]], visited: list[int]) -> None:
        super().__init__(content)
        self._visited = visited

    def __getitem__(self, slab: int) -> list[int]:
        self._visited.append(slab)
        return super().__getitem__(slab)
