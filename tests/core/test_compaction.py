"""Slabs that are emptied for the other kind: what moves where, who is told, and how much a step may move."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridserve.core import compaction
from hybridserve.core.block_pool import BlockPool
from hybridserve.core.cache_manager import CacheManager
from hybridserve.core.compaction import Compactor, Renaming
from hybridserve.core.plan import StepPlan
from hybridserve.core.request import Request, SamplingParams
from hybridserve.core.slabs import IntegrityError, SlabAllocator, UnitPool
from hybridserve.core.slot_pool import SlotPool
from hybridserve.core.step import UnitCopy
from tests.harness.scripted import ScriptedEngine, toy_layout

if TYPE_CHECKING:
    from collections.abc import Callable


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    size=st.integers(1, 6), num_slabs=st.integers(3, 7), seed=st.integers(0, 2**16), count=st.integers(1, 4)
)
def test_the_emptiest_slab_moves_into_the_fullest(size: int, num_slabs: int, seed: int, count: int) -> None:
    rng = random.Random(seed)
    slabs = SlabAllocator(num_slabs)
    pool = BlockPool(slabs, size)
    taken = pool.allocate(size * (num_slabs - 1)) or ()
    pool.free(rng.sample(taken, rng.randint(0, len(taken))))
    references = dict(pool._references)
    where = {block: block for block in references}  # what was there first -> where it is
    for _ in range(count):
        if pool.slabs_to_spare(0) < 1:
            break
        used = Counter(block // size for block in references)
        least = min(used.values())
        num_free = slabs.num_free
        assert pool.num_in_emptiest == least
        moved = pool.empty_slab()
        (slab,) = {block // size for block in moved}
        assert (len(moved), used[slab]) == (least, least)
        assert slabs.num_free == num_free + 1
        assert all(new // size != slab and new // size in used for new in moved.values())
        references = {moved.get(block, block): number for block, number in references.items()}
        where = {first: moved.get(block, block) for first, block in where.items()}
        pool.check_integrity(references)
        slabs.check_integrity()
    assert {new: pool.origin(new) for new in where.values()} == {new: first for first, new in where.items()}
    assert pool.num_moves == sum(first != new for first, new in where.items())
    moves = pool.take_moves()
    assert sorted(moves) == sorted(UnitCopy(first, new) for first, new in where.items() if first != new)
    assert pool.num_moves == 0
    assert all(pool.origin(block) == block for block in references)


def test_moves_of_one_planning_are_one() -> None:
    """u to v and v to w is u to w; a unit that is back has not moved; one that is free is not moved."""
    slabs = SlabAllocator(5)
    pool = BlockPool(slabs, 4)
    first, second, third = (pool.allocate(4) or () for _ in range(3))
    pool.free(first[:3])
    pool.free(second[:2])
    u = first[3]
    v = pool.empty_slab()[u]
    assert v in second
    pool.free(third[:1])
    pool.free(set(second[2:]) - {v})
    moved = pool.empty_slab()
    assert set(moved) <= {v, *second}
    w = moved[v]
    assert pool.origin(w) == u
    pool.free([w])
    assert pool.origin(w) == w
    assert u not in [move.source for move in pool.take_moves()]


def test_a_slot_takes_its_owner_along_and_is_somebody_elses_from_then_on() -> None:
    slabs = SlabAllocator(4)
    pool = SlotPool(slabs, 2)
    slots = [pool.allocate(name) or 0 for name in "abcd"]
    pool.free(slots[0], "a")
    pool.free(slots[2], "c")
    before = {slot: pool.generation(slot) for slot in slots}
    ((old, new),) = pool.empty_slab().items()
    assert pool.owner(new) in ("b", "d")
    assert pool.owner(old) is None
    assert pool.generation(new) == before[new] + 1
    (stayed,) = {slots[1], slots[3]} - {old}
    pool.check_integrity({new: "b" if old == slots[1] else "d", stayed: "b" if stayed == slots[1] else "d"})


def computed(name: str, num_tokens: int) -> Request:
    return Request(name, [1] * num_tokens, SamplingParams(), num_computed=num_tokens)


def half_empty(num_requests: int = 8, slots_per_slab: int = 2) -> tuple[CacheManager, list[Request]]:
    """Slot slabs of two, in each of which one is left; no slab is free."""
    cache = CacheManager(toy_layout(num_requests // 2 + 3, slots_per_slab=slots_per_slab))
    requests = [computed(f"r{index}", 1) for index in range(num_requests)]
    for one in requests:
        assert cache.reserve(one, 1)
    return cache, requests


def test_whoever_holds_something_is_told() -> None:
    cache, requests = half_empty()
    for gone in requests[::2]:
        cache.release(gone)
    live = requests[1::2]
    live[0].last_step = 7  # a step in flight writes it
    cache.release(gone := live.pop(0))
    plan = StepPlan(8, 100)
    cache.begin_step(plan)
    one, two, three = live
    plan.state_copies = [UnitCopy(one.state_slot, two.state_slot), UnitCopy(one.state_slot, three.state_slot)]
    plan.state_swaps_in = [UnitCopy(99, one.state_slot), UnitCopy(98, two.state_slot)]
    held = {one.id: one.state_slot for one in live}
    waits = cache._deferred[7][0].slot
    assert cache.make_room(cache.blocks.num_free + cache.layout.blocks_per_slab + 1, 0)
    moves, moved = cache.take_moves()
    assert set(moved) == {one.id for one in live if one.state_slot != held[one.id]}
    renamed = {copy.source: copy.destination for copy in moves.slots}
    assert renamed
    assert {one.id: renamed.get(held[one.id], held[one.id]) for one in live} == {
        one.id: one.state_slot for one in live
    }
    assert cache._deferred[7][0].slot == renamed.get(waits, waits)
    assert cache._deferred[7][0].owner == gone.id
    assert plan.state_copies == [(one.state_slot, two.state_slot), (one.state_slot, three.state_slot)]
    assert plan.state_swaps_in == [(99, one.state_slot), (98, two.state_slot)]
    cache.check_integrity(live)
    cache.step_finished(7)
    cache.check_integrity(live)


def test_integrity_check_sees_a_request_that_nobody_would_tell() -> None:
    cache, requests = half_empty()
    del cache._holders[requests[0]]
    with pytest.raises(IntegrityError, match="told"):
        cache.check_integrity(requests)


# ---- what the scheduler makes of it


@pytest.fixture
def one_slab_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "MAX_BYTES", 1)


def scattered(depth: int, *, num_tokens: int, num_live: int = 4) -> ScriptedEngine:
    """`num_live` sequences decode. Each of their slots is alone in a slab of two, and their blocks are in as
    many slabs as it takes to hold twice as many; no slab is free."""
    num_slabs = 1 + num_live + -(-2 * num_live // 5)
    e = ScriptedEngine(
        toy_layout(num_slabs, slots_per_slab=2), depth, max_num_batched_tokens=64, max_num_seqs=2 * num_live
    )
    for index in range(2 * num_live):
        e.add(f"r{index}", [index, 1], max_tokens=num_tokens, ignore_eos=True)
    e.step()
    e.step()
    for index in range(0, 2 * num_live, 2):
        e.abort(f"r{index}")
    e.step()
    e.step()
    usage = e.scheduler.cache.usage()
    assert (usage.num_slot_slabs, usage.num_slots, usage.num_slabs) == (num_live, num_live, num_slabs - 1)
    return e


@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_prompt_is_admitted_where_slots_are_scattered(depth: int) -> None:
    e = scattered(depth, num_tokens=6)
    late = e.add("late", list(range(23)), max_tokens=2, ignore_eos=True)
    step = e.step()
    assert step is not None
    assert "late" in [sequence.request_id for sequence in step.sequences]
    assert step.moves.slots
    assert set(step.moved) <= {"r1", "r3", "r5", "r7"}
    e.run()
    assert late.num_preemptions == e.scheduler.counters.num_preemptions == 0
    counters = e.scheduler.cache.compactor.counters
    assert counters.num_compacted_slabs == 1
    assert counters.num_moved_bytes == e.layout.slot_stride
    e.check_outputs()
    e.check_drained()


@pytest.mark.parametrize("depth", [1, 2])
def test_sequences_grow_into_slabs_of_scattered_slots(depth: int) -> None:
    e = scattered(depth, num_tokens=18)  # 4 x 5 blocks, all that there is beside two slabs of slots
    e.run()
    assert e.scheduler.counters.num_preemptions == 0
    assert e.scheduler.cache.compactor.counters.num_compacted_slabs == 2
    e.check_outputs()
    e.check_drained()


@pytest.mark.parametrize("depth", [1, 2])
def test_slots_are_had_from_slabs_of_scattered_blocks(depth: int) -> None:
    e = ScriptedEngine(toy_layout(6, slots_per_slab=2), depth, max_num_batched_tokens=64)
    for name in "abc":
        e.add(name, [3], max_tokens=30, ignore_eos=True)
    while e.scheduler.cache.blocks.num_used < 15:  # three slabs, in which the sequences take turns
        e.step()
    e.abort("a")
    e.abort("b")
    for index in range(5):
        e.add(f"late{index}", [index], max_tokens=1, ignore_eos=True)
    e.run()
    assert e.scheduler.counters.num_preemptions == 0
    assert max(len(step.sequences) for step in e.steps) == 6
    assert any(step.moves.blocks for step in e.steps)
    e.check_outputs()
    e.check_drained()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.usefixtures("one_slab_a_step")
def test_a_step_moves_no_more_than_the_bound(depth: int) -> None:
    """A request that takes more waits for the next step."""
    e = scattered(depth, num_tokens=6, num_live=6)
    e.add("late", list(range(34)), max_tokens=1, ignore_eos=True)
    e.run()
    moves = [len(step.moves.slots) for step in e.steps]
    assert max(moves) == 1
    assert sum(moves) == e.scheduler.cache.compactor.counters.num_compacted_slabs == 2
    e.check_outputs()
    e.check_drained()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.usefixtures("one_slab_a_step")
def test_nobody_is_preempted_for_what_the_next_step_moves(depth: int) -> None:
    e = scattered(depth, num_tokens=12, num_live=12)  # all need a block at once, and a slab holds five
    e.run()
    assert e.scheduler.counters.num_preemptions == 0
    assert max(len(step.moves.slots) for step in e.steps) == 1
    e.check_outputs()
    e.check_drained()


def scattered_checkpoints() -> ScriptedEngine:
    """Nothing runs; six slabs with a checkpoint each, where there were two."""
    e = ScriptedEngine(
        toy_layout(20, slots_per_slab=2),
        prefix_caching=True,
        max_num_seqs=12,
        max_num_batched_tokens=400,
        max_model_len=400,
    )
    for index in range(12):
        e.add(f"r{index}", [index, 1, 1, 1, 1], max_tokens=1, ignore_eos=True)
    e.run()
    prefix = e.scheduler.cache.prefix
    by_slab: dict[int, Any] = {}
    for node in list(prefix.index._checkpointed):
        slab = node.checkpoint.slot // 2
        if slab in by_slab:
            prefix.drop(node)
        by_slab[slab] = node
    assert e.scheduler.cache.usage().num_checkpoints == len(by_slab) == 6
    return e


def tokens_in(e: ScriptedEngine, num_slabs: int) -> list[int]:
    """A prompt that needs so many slabs of blocks more than can be had as they lie."""
    cache = e.scheduler.cache
    num_blocks = (
        cache.blocks.num_open + cache.blocks.units_per_slab * (cache.slabs.num_free + num_slabs - 1) + 1
    )
    return [7] * (num_blocks * e.layout.block_size - 1)


def test_no_prefix_goes_while_units_that_are_open_would_do() -> None:
    e = scattered_checkpoints()
    prefix = e.scheduler.cache.prefix
    before = (prefix.counters.num_evicted_blocks, prefix.counters.num_vanished_checkpoints)
    e.add("late", tokens_in(e, 1), max_tokens=1, ignore_eos=True)
    step = e.step()
    assert step is not None
    assert len(step.moves.slots) == 1
    assert (prefix.counters.num_evicted_blocks, prefix.counters.num_vanished_checkpoints) == before
    e.abort("late")
    for index in range(12):
        e.add(f"again{index}", [index, 1, 1, 1, 1, 2], max_tokens=1, ignore_eos=True)
        e.run()
    assert sum(e.requests[f"again{index}"].num_cached for index in range(12)) >= 4 * 4
    e.check_outputs()
    e.check_drained()


@pytest.mark.usefixtures("one_slab_a_step")
def test_planning_goes_on_where_nothing_else_can_run() -> None:
    e = scattered_checkpoints()
    late = tokens_in(e, 2)
    e.add("late", late, max_tokens=1, ignore_eos=True)
    step = e.step()
    assert step is not None
    assert len(step.moves.slots) == 2
    assert e.scheduler.cache.compactor._is_bounded  # again, from the next step on
    e.run()
    e.check_outputs()
    e.check_drained()


def test_a_checkpoint_is_not_in_the_way_of_its_slot() -> None:
    """A match needs a slot besides the checkpoint's. Where there is no other, it is not used."""
    e = ScriptedEngine(toy_layout(3, kind="state"), prefix_caching=True)
    prompt = list(range(9))
    e.add("a", prompt, max_tokens=1, ignore_eos=True)
    e.run()
    assert e.scheduler.cache.prefix.num_checkpoints == 1
    e.add("long", [1, 2], max_tokens=20, ignore_eos=True)
    e.step()
    e.add("b", prompt, max_tokens=1, ignore_eos=True)
    step = e.step()
    assert step is not None
    assert [sequence.request_id for sequence in step.sequences] == ["long", "b"]
    e.run()
    e.check_outputs()
    e.check_drained()


def _what_waits_for_a_step_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    plain = CacheManager._rename

    def rename(self: CacheManager, renaming: Renaming) -> None:
        deferred, self._deferred = self._deferred, {}
        plain(self, renaming)
        self._deferred = deferred

    patch.setattr(CacheManager, "_rename", rename)


def _a_move_begins_where_the_last_one_ended(patch: pytest.MonkeyPatch) -> None:
    plain = UnitPool.empty_slab

    def empty_slab(self: UnitPool) -> dict[int, int]:
        moved = plain(self)
        self._moves.update({new: unit for unit, new in moved.items()})
        return moved

    patch.setattr(UnitPool, "empty_slab", empty_slab)


def _moves_survive_their_units(patch: pytest.MonkeyPatch) -> None:
    plain = UnitPool._give

    def give(self: UnitPool, unit: int) -> None:
        origin = self._moves.get(unit)
        plain(self, unit)
        if origin is not None:
            self._moves[unit] = origin

    patch.setattr(UnitPool, "_give", give)


def _the_plan_copies_from_where_it_was(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepPlan, "rename", lambda self, renaming: None)


def _generations_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        SlotPool, "_rename", lambda self, unit, new: self._owners.update({new: self._owners.pop(unit)})
    )


def _moves_have_no_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Compactor, "_has_bytes", lambda self, num_bytes: True)


def _what_is_evictable_goes_first(patch: pytest.MonkeyPatch) -> None:
    plain = CacheManager._compact

    def compact(self: CacheManager, num_blocks: int, num_slots: int) -> bool:
        while not self.fits(num_blocks, num_slots) and self._evict(wants_block=num_slots == 0):
            pass
        return plain(self, num_blocks, num_slots)

    patch.setattr(CacheManager, "_compact", compact)


def _a_bound_is_a_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Compactor, "lift_bound", lambda self: False)


def _bounded_is_short(patch: pytest.MonkeyPatch) -> None:
    plain = CacheManager.is_short_of
    patch.setattr(
        CacheManager, "is_short_of", lambda self, count: plain(self, count) or self.compactor.is_held_up
    )


def _a_match_is_held_come_what_may(patch: pytest.MonkeyPatch) -> None:
    plain = CacheManager.admit

    def admit(self: CacheManager, request: Request, match: Any, *rest: Any) -> Any:
        found = self.prefix.match(request)
        return None if found.node is not None and match.node is None else plain(self, request, match, *rest)

    patch.setattr(CacheManager, "admit", admit)


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        (_what_waits_for_a_step_is_forgotten, test_whoever_holds_something_is_told),
        (_the_plan_copies_from_where_it_was, test_whoever_holds_something_is_told),
        (_a_move_begins_where_the_last_one_ended, test_moves_of_one_planning_are_one),
        (_moves_survive_their_units, test_moves_of_one_planning_are_one),
        (_generations_stay, test_a_slot_takes_its_owner_along_and_is_somebody_elses_from_then_on),
        (_what_is_evictable_goes_first, test_no_prefix_goes_while_units_that_are_open_would_do),
        (_a_bound_is_a_bound, test_planning_goes_on_where_nothing_else_can_run),
        (_moves_have_no_bound, lambda: test_a_step_moves_no_more_than_the_bound(1)),
        (_bounded_is_short, lambda: test_nobody_is_preempted_for_what_the_next_step_moves(1)),
        (_a_match_is_held_come_what_may, test_a_checkpoint_is_not_in_the_way_of_its_slot),
    ],
)
def test_it_is_seen(
    fault: Callable[[pytest.MonkeyPatch], None],
    test: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    fault(monkeypatch)
    if fault in (_a_bound_is_a_bound, _moves_have_no_bound, _bounded_is_short):
        request.getfixturevalue("one_slab_a_step")
    with pytest.raises((AssertionError, IntegrityError, KeyError)):
        test()
