"""The host's memory: what fits, what goes for it, and which copies are still wanted."""

from __future__ import annotations

import itertools
import random

import pytest

from hybridserve.core import host_tier
from hybridserve.core.host_tier import OWNER, HostTier
from hybridserve.core.prefix_nodes import Node
from hybridserve.core.request import Request, SamplingParams
from hybridserve.core.slabs import IntegrityError, SlabKind
from hybridserve.core.step import UnitCopies, UnitCopy
from tests.harness.scripted import toy_layout

KV, STATE = SlabKind.KV, SlabKind.STATE


def request(name: str = "r") -> Request:
    return Request(name, [1], SamplingParams())


def node() -> Node:
    return Node(None, b"", 0)


def could_fit(host: HostTier, held: list[tuple[SlabKind, int]], num_blocks: int, num_slots: int) -> bool:
    """By brute force: whether units could be handed out if nothing but those that are held were there."""
    slabs: dict[int, set[int]] = {}
    sizes = {KV: host.layout.blocks_per_slab, STATE: host.layout.slots_per_slab}
    kinds: dict[int, SlabKind] = {}
    for kind, unit in held:
        slabs.setdefault(unit // sizes[kind], set()).add(unit)
        kinds[unit // sizes[kind]] = kind
    free = host.slabs.num_usable - len(slabs)
    for kind, wanted in ((KV, num_blocks), (STATE, num_slots)):
        room = sum(sizes[kind] - len(units) for slab, units in slabs.items() if kinds[slab] is kind)
        while room < wanted:
            room, free = room + sizes[kind], free - 1
    return free >= 0


@pytest.mark.parametrize("seed", range(30))
def test_what_fits_and_what_goes_for_it(seed: int) -> None:
    rng = random.Random(seed)
    layout = toy_layout(2, slots_per_slab=rng.choice([1, 2]))
    host = HostTier(layout, rng.randint(2, 7))
    gone: list[Node] = []
    host.forget = lambda kind, one: gone.append(one)
    sequences: list[Request] = []
    offered: dict[Node, tuple[SlabKind, int]] = {}  # the oldest first
    names = itertools.count()
    for _ in range(150):
        action = rng.random()
        held = [(KV, block) for one in sequences for block in one.host_block_ids]
        held += [(STATE, one.host_slot) for one in sequences if one.host_slot]
        before = list(offered)
        if action < 0.4:
            one, count, slot = request(f"r{next(names)}"), rng.randint(1, 6), rng.randint(0, 1)
            fits = could_fit(host, held, count, slot)
            assert host.swap_out(one, range(100, 100 + count), slot) == fits
            assert one.is_swapped_out == fits
            assert fits or not gone
            sequences += [one] * fits
        elif action < 0.75:
            kind, new = rng.choice([KV, STATE]), node()
            fits = could_fit(host, held, int(kind is KV), int(kind is STATE))
            unit = host.keep(kind, 7, new)
            assert (unit > 0) == fits
            if unit:
                offered[new] = (kind, unit)
        elif action < 0.9 and sequences:
            host.release(sequences.pop(rng.randrange(len(sequences))))
        elif offered:
            kind, unit = offered.pop(rng.choice(list(offered)))
            host.drop(kind, unit)
        host.take_swaps_out()
        assert gone == before[: len(gone)]  # the oldest
        for one in gone:
            del offered[one]
        gone.clear()
        host.check_integrity(
            sequences,
            {unit: one for one, (kind, unit) in offered.items() if kind is KV},
            {unit: one for one, (kind, unit) in offered.items() if kind is STATE},
        )
    host.clear()
    for one in sequences:
        host.release(one)
    assert (host.slabs.num_free, host.num_sequences) == (host.slabs.num_usable, 0)


def test_without_memory_nothing_fits() -> None:
    for num_slabs in (0, 1):
        host, one = HostTier(toy_layout(2), num_slabs), request()
        assert not host.swap_out(one, [1], 1)
        assert not host.keep(KV, 1, node())
        assert not host.keep(STATE, 1, node())
        assert host.take_swaps_out() == UnitCopies()
        assert set(host.bytes_by_kind().values()) == {0}
        host.check_integrity([one], {}, {})


def test_copies_wait_for_the_next_step_and_are_dropped_with_their_destination() -> None:
    host = HostTier(toy_layout(2), 4)
    one, two = request("one"), request("two")
    assert host.swap_out(one, [5, 6], 3)
    assert host.swap_out(two, [7], 4)
    blocks, slot = one.host_block_ids, one.host_slot
    host.release(two)
    assert host.take_swaps_out() == UnitCopies(
        (UnitCopy(5, blocks[0]), UnitCopy(6, blocks[1])), (UnitCopy(3, slot),)
    )
    assert host.take_swaps_out() == UnitCopies()  # once


def test_a_unit_that_is_read_stays_until_the_step_has_finished() -> None:
    host = HostTier(toy_layout(2), 3)  # a slab of blocks, a slab of one slot
    one, two = request("one"), request("two")
    assert host.swap_out(one, [5], 3)
    host.release(one, step_id=4)
    assert not one.is_swapped_out
    assert host.num_sequences == 0
    host.check_integrity([one], {}, {})
    host.step_finished(3)
    assert not host.swap_out(two, [6], 2)
    host.step_finished(4)
    assert host.swap_out(two, [6], 2)
    host.check_integrity([two], {}, {})


def test_what_a_step_reads_is_not_on_offer() -> None:
    host = HostTier(toy_layout(2), 3)
    gone: list[Node] = []
    host.forget = lambda kind, one: gone.append(one)
    first, second = node(), node()
    units = [host.keep(STATE, 1, first), host.keep(STATE, 2, second)]
    host.withdraw(STATE, units[0])
    third = host.keep(STATE, 3, node())
    assert (third, gone) == (units[1], [second])
    host.offer(STATE, units[0], first)  # now it is the newest
    assert host.keep(STATE, 4, node()) == third
    assert len(gone) == 2
    assert gone[1] is not first


def test_a_step_keeps_so_many_bytes_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostTier(toy_layout(2), 10)
    monkeypatch.setattr(host_tier, "MAX_KEPT_BYTES", 2 * host.layout.block_stride)
    assert [host.keep(KV, unit, node()) > 0 for unit in range(1, 5)] == [True, True, False, False]
    assert host.swap_out(request(), [1, 2, 3], 1)  # sequences are not bounded: there are few of them
    assert len(host.take_swaps_out().blocks) == 5
    assert host.keep(KV, 9, node())


def num_visits(count: int) -> int:
    """How many tenants are looked at to make room, where most are held."""
    layout = toy_layout(2)
    host = HostTier(layout, count // layout.blocks_per_slab + 2)
    for index in range(count):
        assert host.swap_out(request(f"r{index}"), [1], 0)
    visits = 0

    class Counting(dict[tuple[SlabKind, int], Node]):
        def items(self) -> object:  # type: ignore[override]
            nonlocal visits
            for item in super().items():
                visits += 1
                yield item

    host._offered = Counting()
    for _ in range(2 * layout.blocks_per_slab):
        host.keep(KV, 1, node())
    return visits


def test_f042_what_is_held_is_not_visited() -> None:
    assert num_visits(2000) <= 2 * toy_layout(2).blocks_per_slab


def test_f042_sees_its_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostTier, "_evict_oldest", _evict_after_a_look_at_all)
    assert num_visits(2000) > 2 * toy_layout(2).blocks_per_slab


def _evict_after_a_look_at_all(self: HostTier) -> None:
    kind, unit = min((entry for entry, _ in self._offered.items()), key=lambda entry: entry[1])
    self.forget(kind, self._offered[kind, unit])
    self.drop(kind, unit)


def test_integrity_is_checked() -> None:
    host, one = HostTier(toy_layout(2), 6), request("one")
    assert host.swap_out(one, [5, 6], 3)
    kept = node()
    block = host.keep(KV, 9, kept)
    host.check_integrity([one], {block: kept}, {})
    with pytest.raises(IntegrityError, match="miscounted"):
        host.check_integrity([], {block: kept}, {})
    with pytest.raises(IntegrityError, match="differ"):
        host.check_integrity([one], {}, {})
    with pytest.raises(IntegrityError, match="does not know"):
        host.check_integrity([one], {block: node()}, {})
    assert host.slots.owner(one.host_slot) == "one" != OWNER
    host._swaps_out[KV][block + 1] = 1
    with pytest.raises(IntegrityError, match="is free"):
        host.check_integrity([one], {block: kept}, {})
