"""What sequences hold: all or nothing, fenced by step, and forks that never write to what they share."""

from __future__ import annotations

import pytest

from hybridserve.core.cache_manager import CacheManager
from hybridserve.core.request import Request, SamplingParams
from hybridserve.core.slabs import IntegrityError
from tests.harness.scripted import toy_layout


def request(name: str, num_computed: int = 0) -> Request:
    return Request(name, [1] * 10, SamplingParams(), num_computed=num_computed)


def manager(num_slabs: int = 4, kind: str = "hybrid") -> CacheManager:
    return CacheManager(toy_layout(num_slabs, kind=kind))


def test_reserve_is_all_or_nothing_over_blocks_and_slot() -> None:
    cache = manager(num_slabs=3)
    layout = cache.layout
    room = layout.blocks_per_slab * layout.block_size  # of the two slabs, the slot takes one
    one = request("one")
    assert not cache.reserve(one, room + 1)
    assert (one.block_ids, one.state_slot) == ((), 0)
    assert cache.usage().num_bytes == 0
    assert cache.reserve(one, room)
    assert one.state_slot
    assert len(one.block_ids) == layout.blocks_per_slab
    held = one.block_ids
    assert not cache.reserve(one, room + 1)
    assert one.block_ids == held
    assert cache.reserve(one, 1)  # needs nothing
    cache.check_integrity([one])


def test_a_slot_that_does_not_fit_leaves_the_blocks_free() -> None:
    cache = manager(num_slabs=2)
    one = request("one")
    assert not cache.reserve(one, 1)  # one slab can't hold both kinds
    assert cache.usage().num_slabs == 0


@pytest.mark.parametrize("kind", ["kv", "state"])
def test_models_with_one_kind_of_memory(kind: str) -> None:
    cache = manager(num_slabs=20, kind=kind)
    one = request("one")
    assert cache.reserve(one, 9)
    assert (len(one.block_ids), one.state_slot > 0) == ((3, False) if kind == "kv" else (0, True))
    child = request("one#1")
    one.num_computed = 9
    copies = cache.fork(one, child)
    assert copies is not None
    assert (len(copies.blocks), len(copies.state)) == ((1, 0) if kind == "kv" else (0, 1))
    cache.check_integrity([one, child])
    cache.release(one)
    cache.release(child)
    assert cache.usage().num_bytes == 0


def test_release_waits_for_the_step_that_may_still_write() -> None:
    cache = manager()
    cache.step_finished(4)
    one, two = request("one"), request("two")
    cache.reserve(one, 5)
    cache.reserve(two, 5)
    one.last_step, two.last_step = 6, 4
    used = cache.usage()
    cache.release(one)
    assert (one.block_ids, one.state_slot) == ((), 0)
    assert cache.usage() == used
    cache.check_integrity([two])
    cache.release(two)  # nothing in flight writes to it
    assert cache.usage().num_blocks == 2
    coming = 2 + cache.layout.blocks_per_slab  # the slab of its slot will be empty, too
    assert not cache.is_short_of(cache.blocks.num_free + coming)
    assert cache.is_short_of(cache.blocks.num_free + coming + 1)
    cache.step_finished(5)
    assert cache.usage().num_blocks == 2
    cache.step_finished(6)
    assert cache.usage().num_bytes == 0
    cache.release(one)  # again: nothing happens
    cache.check_integrity([])


@pytest.mark.parametrize(
    ("num_computed", "num_shared", "copies_block"), [(9, 2, True), (8, 2, False), (3, 0, True)]
)
def test_fork_shares_full_blocks_and_copies_the_rest(
    num_computed: int, num_shared: int, copies_block: bool
) -> None:
    cache = manager()
    parent, child = request("p", num_computed), request("p#1")
    cache.reserve(parent, num_computed)
    copies = cache.fork(parent, child)
    assert copies is not None
    assert child.num_computed == num_computed
    assert child.block_ids[:num_shared] == parent.block_ids[:num_shared]
    assert len(child.block_ids) == num_shared + 1
    assert not set(child.block_ids[num_shared:]) & set(parent.block_ids)
    assert copies.state == ((parent.state_slot, child.state_slot),)
    assert copies.blocks == (((parent.block_ids[-1], child.block_ids[-1]),) if copies_block else ())
    assert cache.reserve(child, num_computed + 1)
    assert len(child.block_ids) == num_shared + 1  # the next token needs nothing more
    cache.check_integrity([parent, child])
    cache.release(parent)
    cache.check_integrity([child])
    cache.release(child)
    assert cache.usage().num_bytes == 0


def test_fork_without_room_changes_nothing() -> None:
    cache = manager(num_slabs=3)
    room = cache.layout.blocks_per_slab * cache.layout.block_size
    parent, child = request("p", room), request("p#1")
    cache.reserve(parent, room)
    assert cache.fork(parent, child) is None
    assert (child.num_computed, child.block_ids, child.state_slot) == (0, (), 0)
    cache.check_integrity([parent, child])


def test_integrity_check_sees_a_write_to_a_shared_block() -> None:
    cache = manager()
    parent, child = request("p", 8), request("p#1")
    cache.reserve(parent, 8)
    cache.fork(parent, child)
    parent.num_computed = 7  # as if its next token were to be written into a full, shared block
    with pytest.raises(IntegrityError, match="shared block"):
        cache.check_integrity([parent, child])
    parent.num_computed = 9
    with pytest.raises(IntegrityError, match="more tokens than its blocks hold"):
        cache.check_integrity([parent, child])


def test_integrity_check_sees_lost_and_doubled_memory() -> None:
    cache = manager()
    one, two = request("one"), request("two")
    cache.reserve(one, 5)
    with pytest.raises(IntegrityError):
        cache.check_integrity([])
    two.state_slot = one.state_slot
    with pytest.raises(IntegrityError, match="held by 'one' and 'two'"):
        cache.check_integrity([one, two])
    two.state_slot, two.block_ids = 0, one.block_ids
    with pytest.raises(IntegrityError):
        cache.check_integrity([one, two])


def test_usage_counts_bytes_of_units_without_the_null_slab() -> None:
    cache = manager()
    layout = cache.layout
    cache.reserve(request("one"), 5)
    usage = cache.usage()
    assert (usage.num_blocks, usage.num_slots, usage.num_slabs, usage.num_usable_slabs) == (2, 1, 2, 3)
    assert usage.num_bytes == 2 * layout.block_stride + layout.slot_stride
    assert usage.utilisation == usage.num_bytes / (3 * layout.slab_bytes)
