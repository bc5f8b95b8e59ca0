"""Which adapter is in which device slot. Knows identities, bytes and steps in flight; does not know tensors,
names, files or who should be served next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hybridserve.core.slabs import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


class AdapterLoad(NamedTuple):
    """An adapter that has been given a slot, which is to be filled."""

    adapter_id: str
    slot: int
    generation: int
    evicted: tuple[int, ...]
    """Slots to be cleared first: those that lost their adapters for it, and those of `take_dropped`."""


@dataclass(slots=True)
class _Slot:
    index: int
    generation: int = 0
    adapter_id: str | None = None
    num_bytes: int = 0
    is_ready: bool = False  # else it is free, or being filled
    num_users: int = 0
    last_step: int = -1  # the newest step that was planned with what the slot holds
    is_pinned: bool = False
    is_dropped: bool = False  # to be cleared when nobody uses it


class AdapterSlots:
    """Device slots 1 .. num_slots (0 of them: an engine for the base model only); slot 0 is the base model,
    which is always there and never handed out.

    An adapter in a slot is evictable when nobody uses it, no step in flight was planned with it, and it isn't
    pinned. `device_bytes` bounds the bytes of all that are in slots or on their way. Everything costs O(1) or
    O(slots), however many adapters are registered.
    """

    def __init__(self, num_slots: int, device_bytes: int | None = None) -> None:
        if num_slots < 0 or (device_bytes is not None and device_bytes < 1):
            raise ValueError(f"num_slots ({num_slots}) or device_bytes ({device_bytes}) is too small")
        self.num_slots = num_slots
        self.device_bytes = device_bytes
        self.finished_step = -1
        self.num_bytes = 0
        self._slots = [_Slot(index) for index in range(num_slots + 1)]
        self._by_id: dict[str, _Slot] = {}
        self._free = list(range(num_slots, 0, -1))
        self._idle: dict[int, None] = {}  # ready and without users; least recently used first
        self._dropped: list[int] = []
        self._changed: set[str] = set()

    def __contains__(self, adapter_id: str) -> bool:
        """Whether an adapter is in a slot or on its way into one."""
        return adapter_id in self._by_id

    @property
    def num_loading(self) -> int:
        return sum(not slot.is_ready for slot in self._by_id.values())

    @property
    def ready_ids(self) -> list[str]:
        return [adapter_id for adapter_id, slot in self._by_id.items() if slot.is_ready]

    def slot_of(self, adapter_id: str) -> int | None:
        """The slot of an adapter that is ready, else None."""
        slot = self._by_id.get(adapter_id)
        return slot.index if slot is not None and slot.is_ready else None

    def generation(self, slot: int) -> int:
        """How many loads the slot has seen, the present one included."""
        return self._slots[slot].generation

    def take_changed(self) -> set[str]:
        """The adapters that have come, gone or become ready since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    # ---- users

    def acquire(self, adapter_id: str) -> int | None:
        """Count one more user; returns the slot, or None where the adapter isn't ready."""
        slot = self._by_id.get(adapter_id)
        if slot is None or not slot.is_ready:
            return None
        slot.num_users += 1
        self._idle.pop(slot.index, None)
        return slot.index

    def release(self, adapter_id: str, last_step: int) -> None:
        """Count one user less; `last_step` is the newest step that was planned with it."""
        slot = self._by_id.get(adapter_id)
        if slot is None or not slot.num_users:
            raise IntegrityError(f"adapter {adapter_id[:12]!r} is released and has no users")
        slot.num_users -= 1
        slot.last_step = max(slot.last_step, last_step)
        if not slot.num_users:
            self._idle[slot.index] = None
            self._clear_if_dropped(slot)

    def step_finished(self, step_id: int) -> None:
        """Nothing up to and including this step runs any more."""
        self.finished_step = step_id
        self._clear_all_dropped()

    def reset(self) -> None:
        """Nothing runs any more: no users, no steps in flight. What the slots hold stays."""
        for slot in self._by_id.values():
            slot.num_users, slot.last_step = 0, -1
            if slot.is_ready:
                self._idle[slot.index] = None
        self._clear_all_dropped()

    # ---- coming

    def can_ever_fit(self, num_bytes: int) -> bool:
        """Whether an adapter of this size fits beside the pinned ones, were the others gone."""
        pinned = sum(slot.num_bytes for slot in self._by_id.values() if slot.is_pinned)
        return self.num_slots > 0 and (self.device_bytes is None or pinned + num_bytes <= self.device_bytes)

    def begin_load(
        self, adapter_id: str, num_bytes: int, *, keep: Collection[str] = ()
    ) -> AdapterLoad | None:
        """Give an adapter a slot, evicting as few as it takes, the least recently used first; None, and
        nothing changes, where that is impossible now. `keep` are adapters that shall not be evicted.

        Raises ValueError for one that is in a slot already or is larger than `device_bytes`.
        """
        if adapter_id in self._by_id:
            raise ValueError(f"adapter {adapter_id[:12]!r} has a slot already")
        room = num_bytes if self.device_bytes is None else self.device_bytes - self.num_bytes
        if self.device_bytes is not None and num_bytes > self.device_bytes:
            raise ValueError(
                f"adapter {adapter_id[:12]!r} needs {num_bytes:,} bytes on the device, "
                f"device_bytes is {self.device_bytes:,}"
            )
        victims: list[_Slot] = []
        for slot in map(self._slots.__getitem__, self._idle):
            if num_bytes <= room and (victims or self._free):
                break
            if self._is_evictable(slot) and slot.adapter_id not in keep:
                victims.append(slot)
                room += slot.num_bytes
        if num_bytes > room or not (victims or self._free):
            return None
        for slot in victims:
            self._clear(slot)
        slot = self._slots[self._free.pop()]
        slot.adapter_id, slot.num_bytes, slot.last_step = adapter_id, num_bytes, -1
        slot.generation += 1
        self._by_id[adapter_id] = slot
        self.num_bytes += num_bytes
        self._changed.add(adapter_id)
        evicted = (*self.take_dropped(), *[victim.index for victim in victims])
        return AdapterLoad(adapter_id, slot.index, slot.generation, evicted)

    def finish_load(self, slot: int, *, ok: bool) -> None:
        """The load of a slot has succeeded: its adapter is ready. Or failed: the slot is free again."""
        loading = self._slots[slot]
        if loading.adapter_id is None or loading.is_ready:
            raise ValueError(f"slot {slot} is not being loaded")
        if not ok:
            self._clear(loading)
            return
        loading.is_ready = True
        self._idle[slot] = None
        self._changed.add(loading.adapter_id)
        self._clear_if_dropped(loading)

    def cancel_load(self, adapter_id: str) -> None:
        """The load of an adapter, if there is one, has failed."""
        slot = self._by_id.get(adapter_id)
        if slot is not None and not slot.is_ready:
            self._clear(slot)

    # ---- staying and going

    def is_evictable(self, adapter_id: str) -> bool:
        return self._is_evictable(self._by_id[adapter_id])

    def is_pinned(self, adapter_id: str) -> bool:
        return adapter_id in self._by_id and self._by_id[adapter_id].is_pinned

    @property
    def num_pinned(self) -> int:
        return sum(slot.is_pinned for slot in self._slots)

    def pin(self, adapter_id: str) -> None:
        """Keep an adapter, in a slot or on its way, until `unpin` or `drop`. ValueError where it has no slot,
        or would pin the last slot: no other adapter could ever be served."""
        slot = self._by_id.get(adapter_id)
        if slot is None:
            raise ValueError(f"adapter {adapter_id[:12]!r} has no slot, so it can't be pinned")
        if not slot.is_pinned and self.num_pinned + 1 == self.num_slots:
            raise ValueError(f"adapter {adapter_id[:12]!r} would pin the last of {self.num_slots} slots")
        slot.is_pinned = True

    def unpin(self, adapter_id: str) -> None:
        if slot := self._by_id.get(adapter_id):
            slot.is_pinned = False

    def drop(self, adapter_id: str) -> int | None:
        """Clear an adapter's slot, pinned or not: at once, and it is returned, or when nobody uses it any
        more (`take_dropped`)."""
        slot = self._by_id.get(adapter_id)
        if slot is None:
            return None
        slot.is_pinned, slot.is_dropped = False, True
        if not self._is_evictable(slot):
            return None
        self._clear(slot)
        return slot.index

    def take_dropped(self) -> list[int]:
        """Slots that were emptied later than their `drop`, and that no load has named as evicted since."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def _is_evictable(self, slot: _Slot) -> bool:
        return slot.is_ready and not slot.num_users and not slot.is_pinned and not self._is_fenced(slot)

    def _is_fenced(self, slot: _Slot) -> bool:
        return slot.last_step > self.finished_step

    def _clear_all_dropped(self) -> None:
        for slot in [slot for slot in self._by_id.values() if slot.is_dropped]:
            self._clear_if_dropped(slot)

    def _clear_if_dropped(self, slot: _Slot) -> None:
        if slot.is_dropped and self._is_evictable(slot):
            self._clear(slot)
            self._dropped.append(slot.index)

    def _clear(self, slot: _Slot) -> None:
        assert slot.adapter_id is not None
        del self._by_id[slot.adapter_id]
        self._changed.add(slot.adapter_id)
        self.num_bytes -= slot.num_bytes
        slot.adapter_id, slot.num_bytes = None, 0
        slot.is_ready = slot.is_pinned = slot.is_dropped = False
        self._idle.pop(slot.index, None)
        self._free.append(slot.index)

    def check_integrity(self, users: Mapping[str, int] | None = None) -> None:
        """Raise IntegrityError unless the books agree. `users`: how many use each adapter, told by those who
        hold them."""
        taken = {slot.index: slot for slot in self._by_id.values()}
        if sorted([*taken, *self._free]) != list(range(1, self.num_slots + 1)):
            raise IntegrityError("an adapter slot is lost, free twice, or free and in use")
        if any(slot.adapter_id != adapter_id for adapter_id, slot in self._by_id.items()):
            raise IntegrityError("a slot holds another adapter than the one that it is filed under")
        if sum(slot.num_bytes for slot in self._slots) != self.num_bytes:
            raise IntegrityError("the bytes of the slots don't add up")
        if self.device_bytes is not None and self.num_bytes > self.device_bytes:
            raise IntegrityError(f"adapters hold {self.num_bytes} bytes, device_bytes is {self.device_bytes}")
        if set(self._idle) != {i for i, slot in taken.items() if slot.is_ready and not slot.num_users}:
            raise IntegrityError("the idle slots are not those without users")
        if any(slot.num_users and not slot.is_ready for slot in self._slots):
            raise IntegrityError("an adapter is used that isn't ready")
        if users is not None:
            counted = {name: slot.num_users for name, slot in self._by_id.items() if slot.num_users}
            if counted != dict(users):
                raise IntegrityError("the users of adapters differ from those who hold them")
        if any(slot.is_dropped and self._is_evictable(slot) for slot in taken.values()):
            raise IntegrityError("a dropped adapter is still there, though nobody uses it")
