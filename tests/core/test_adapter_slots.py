"""The books of adapter slots, one rule at a time."""

from __future__ import annotations

import pytest

from hybridserve.core.adapter_slots import AdapterSlots
from hybridserve.core.slabs import IntegrityError


def loaded(slots: AdapterSlots, *adapter_ids: str, num_bytes: int = 1) -> AdapterSlots:
    for adapter_id in adapter_ids:
        load = slots.begin_load(adapter_id, num_bytes)
        assert load is not None
        slots.finish_load(load.slot, ok=True)
    slots.check_integrity()
    return slots


def test_slot_zero_is_the_base_model_and_never_handed_out() -> None:
    slots = loaded(AdapterSlots(3), "a", "b", "c")
    assert sorted(slots.slot_of(name) or 0 for name in "abc") == [1, 2, 3]
    with pytest.raises(ValueError, match="too small"):
        AdapterSlots(-1)
    with pytest.raises(ValueError, match="too small"):
        AdapterSlots(1, 0)
    assert AdapterSlots(0).begin_load("a", 1) is None


def test_an_adapter_on_its_way_has_a_slot_and_is_not_ready() -> None:
    slots = AdapterSlots(1)
    load = slots.begin_load("a", 7)
    assert load == ("a", 1, 1, ())
    assert "a" in slots
    assert (slots.slot_of("a"), slots.acquire("a"), slots.num_loading, slots.num_bytes) == (None, None, 1, 7)
    with pytest.raises(ValueError, match="slot already"):
        slots.begin_load("a", 7)
    assert slots.begin_load("b", 7) is None  # what is on its way isn't evicted
    slots.finish_load(1, ok=True)
    assert (slots.slot_of("a"), slots.acquire("a"), slots.num_loading) == (1, 1, 0)
    with pytest.raises(ValueError, match="not being loaded"):
        slots.finish_load(1, ok=True)


def test_a_load_that_fails_frees_its_slot_and_generations_rise() -> None:
    slots = AdapterSlots(1)
    for generation in (1, 2, 3):
        load = slots.begin_load("a", 5)
        assert load is not None
        assert load.generation == slots.generation(load.slot) == generation
        slots.finish_load(load.slot, ok=False)
        assert ("a" in slots, slots.num_bytes) == (False, 0)
        slots.check_integrity({})
    slots.begin_load("a", 5)
    slots.cancel_load("a")
    slots.cancel_load("a")
    assert "a" not in slots


def test_the_least_recently_used_idle_one_is_evicted() -> None:
    slots = loaded(AdapterSlots(3), "a", "b", "c")
    for name in ("a", "b"):
        slots.acquire(name)
    slots.release("b", -1)
    slots.release("a", -1)  # c never, b before a
    evicted = []
    for new in ("d", "e", "f"):
        load = slots.begin_load(new, 1)
        assert load is not None
        evicted += load.evicted
    assert evicted == [3, 2, 1]
    assert slots.begin_load("g", 1) is None


def test_one_in_use_or_used_by_a_step_in_flight_stays() -> None:
    slots = loaded(AdapterSlots(1), "a")
    slots.acquire("a")
    slots.acquire("a")
    slots.release("a", 4)
    assert slots.begin_load("b", 1) is None
    slots.release("a", 5)
    slots.step_finished(4)
    assert slots.begin_load("b", 1) is None
    assert not slots.is_evictable("a")
    slots.step_finished(5)
    assert slots.begin_load("b", 1, keep=["a"]) is None
    assert slots.begin_load("b", 1) == ("b", 1, 2, (1,))
    with pytest.raises(IntegrityError, match="no users"):
        slots.release("a", 5)


def test_bytes_are_counted_as_they_are() -> None:
    slots = loaded(AdapterSlots(8, device_bytes=100), "a", "b", num_bytes=40)
    assert slots.begin_load("c", 30, keep=["a", "b"]) is None
    load = slots.begin_load("c", 30)
    assert load is not None
    assert load.evicted == (1,)  # a slot was free; bytes were not
    assert slots.num_bytes == 70
    slots.finish_load(load.slot, ok=True)
    load = slots.begin_load("d", 100)
    assert load is not None
    assert len(load.evicted) == 2
    slots.check_integrity({})
    assert not slots.can_ever_fit(101)
    with pytest.raises(ValueError, match="needs 101 bytes on the device, device_bytes is 100"):
        slots.begin_load("e", 101)


def test_nothing_is_evicted_in_vain() -> None:
    slots = loaded(AdapterSlots(3, device_bytes=90), "a", "b", "c", num_bytes=30)
    slots.acquire("c")
    assert slots.begin_load("d", 70) is None
    assert slots.ready_ids == ["a", "b", "c"]


def test_pins() -> None:
    slots = loaded(AdapterSlots(2, device_bytes=10), "a", "b", num_bytes=4)
    slots.pin("a")
    slots.pin("a")
    with pytest.raises(ValueError, match="'b' would pin the last of 2 slots"):
        slots.pin("b")
    with pytest.raises(ValueError, match="'c' has no slot"):
        slots.pin("c")
    assert (slots.can_ever_fit(6), slots.can_ever_fit(7)) == (True, False)
    load = slots.begin_load("c", 4)
    assert load is not None
    assert slots.slot_of("a") is not None
    slots.unpin("a")
    slots.unpin("nobody")
    slots.pin("c")  # on its way
    slots.finish_load(load.slot, ok=True)
    assert slots.is_pinned("c")
    assert not slots.is_evictable("c")
    with pytest.raises(ValueError, match="pin the last"):
        loaded(AdapterSlots(1), "a").pin("a")


@pytest.mark.parametrize("pinned", [False, True])
def test_drop(pinned: bool) -> None:
    slots = loaded(AdapterSlots(2), "a", "b")
    if pinned:
        slots.pin("a")
    assert slots.drop("a") == 1
    assert slots.drop("a") is None
    assert slots.take_dropped() == []
    slots.acquire("b")
    assert slots.drop("b") is None
    assert slots.slot_of("b") == 2  # those who use it go on
    slots.release("b", 3)
    assert slots.take_dropped() == []
    slots.step_finished(3)
    assert "b" not in slots
    assert slots.take_dropped() == [2]
    assert slots.take_dropped() == []
    slots.check_integrity({})


def test_one_dropped_on_its_way_is_gone_when_it_arrives() -> None:
    slots = AdapterSlots(1)
    slots.begin_load("a", 1)
    assert slots.drop("a") is None
    slots.finish_load(1, ok=True)
    assert "a" not in slots
    assert slots.begin_load("b", 1) == ("b", 1, 2, (1,))  # it still has to be cleared, and once
    assert slots.take_dropped() == []


def test_reset() -> None:
    slots = loaded(AdapterSlots(2), "a", "b")
    slots.acquire("a")
    slots.acquire("b")
    slots.release("b", 9)
    slots.drop("a")
    slots.reset()
    assert slots.ready_ids == ["b"]
    assert slots.is_evictable("b")
    assert slots.take_dropped() == [1]
    slots.check_integrity({})


def test_changes_are_told_once() -> None:
    slots = AdapterSlots(1)
    slots.begin_load("a", 1)
    assert slots.take_changed() == {"a"}
    slots.finish_load(1, ok=True)
    assert slots.take_changed() == {"a"}
    slots.begin_load("b", 1)
    assert slots.take_changed() == {"a", "b"}
    assert slots.take_changed() == set()


@pytest.mark.parametrize("corruption", ["lost slot", "bytes", "users", "idle", "wrong id", "over"])
def test_check_integrity_sees_corruption(corruption: str) -> None:
    slots = loaded(AdapterSlots(3, device_bytes=10), "a", "b")
    slots.acquire("a")
    slots.check_integrity({"a": 1})
    match corruption:
        case "lost slot":
            slots._free.pop()
        case "bytes":
            slots.num_bytes += 1
        case "users":
            slots._by_id["a"].num_users += 1
        case "idle":
            slots._idle.clear()
        case "wrong id":
            slots._by_id["a"].adapter_id = "c"
        case "over":
            slots.device_bytes = 1
    with pytest.raises(IntegrityError):
        slots.check_integrity({"a": 1})
