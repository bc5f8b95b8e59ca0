"""Which adapter gets a slot next, and whose it was. Knows slots, shares and tokens served; does not know
memory, files or how an adapter is loaded.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridserve.core.slabs import IntegrityError
from hybridserve.core.turns import winner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hybridserve.core.adapter_slots import AdapterLoad, AdapterSlots
    from hybridserve.core.fair_queue import FairQueue
    from hybridserve.core.turns import Lane, Share


QUANTUM_STEPS = 32
"""Short answers are thousands of steps on the way to a quantum of tokens. So after so many steps an adapter
yields as well: enough that a slot doesn't change hands for every request."""


@dataclass(slots=True)
class _Tenure:
    """An adapter's time in its slot."""

    share: Share  # who was served last
    first_step: int
    num_tokens: int = 0


class AdapterTurns:
    """Gives slots to adapters that requests wait for, in the order in which it is their turn.

    One that is ready is evicted at once where nobody uses or wants it. Where all are wanted, the one furthest
    ahead of those that are ahead of whom waits has to yield, `quantum` tokens after it came or
    QUANTUM_STEPS steps after the first of them: no more of its requests are started, and when those that run
    have ended (none is preempted for this) the slot changes hands. So a slot is waited for no longer than
    QUANTUM_STEPS steps and the longest of the requests that run.
    """

    def __init__(
        self,
        slots: AdapterSlots,
        waiting: FairQueue,
        num_bytes: Callable[[str], int] | None,
        quantum: int,
    ) -> None:
        self._slots = slots
        self._waiting = waiting
        self._num_bytes = num_bytes or (lambda adapter_id: 0)
        self._quantum = quantum
        self._step = 0
        self._tenures: dict[str, _Tenure] = {}
        self._yielding: set[str] = set()
        self._loads: list[AdapterLoad] = []

    def check(self, adapter_id: str | None) -> None:
        """ValueError for an adapter that no slot could ever be given to."""
        if adapter_id is None or self._slots.is_pinned(adapter_id):
            return
        if not self._slots.num_slots:
            raise ValueError("adapter: this engine serves the base model only")
        num_bytes = self._num_bytes(adapter_id)
        if not self._slots.can_ever_fit(num_bytes):
            raise ValueError(
                f"adapter: it needs {num_bytes:,} bytes on the device; device_bytes is "
                f"{self._slots.device_bytes:,}, pinned adapters included"
            )

    def check_pin(self, adapter_id: str, needed: Iterable[str | None]) -> None:
        """ValueError where it may not be pinned, be it in a slot or not: no slot would be left for others, or
        no room for one of those that are `needed`."""
        if self._slots.is_pinned(adapter_id):
            return
        if self._slots.num_pinned + 1 >= self._slots.num_slots:
            raise ValueError(f"it would pin the last of {self._slots.num_slots} slots")
        num_bytes = self._num_bytes(adapter_id)
        for one in {*needed} - {adapter_id}:
            if one is None or self._slots.is_pinned(one):
                continue
            if not self._slots.can_ever_fit(num_bytes + self._num_bytes(one)):
                raise ValueError(
                    f"a request is for one that needs {self._num_bytes(one):,} bytes: no room "
                    f"beside its {num_bytes:,}: device_bytes is {self._slots.device_bytes:,}"
                )

    def take_loads(self) -> list[AdapterLoad]:
        loads, self._loads = self._loads, []
        return loads

    def charge(self, adapter_id: str, share: Share, num_tokens: int, step_id: int) -> int:
        """Step `step_id` computes tokens with an adapter that is ready, for `share`. Returns its slot."""
        tenure = self._tenures.get(adapter_id)
        if tenure is None:
            tenure = self._tenures[adapter_id] = _Tenure(share, step_id)
        tenure.num_tokens += num_tokens
        tenure.share = share
        slot = self._slots.slot_of(adapter_id)
        if slot is None:
            raise IntegrityError(f"adapter {adapter_id[:12]!r} is in use and not in a slot")
        return slot

    def refresh(self) -> None:
        """Take in what has happened to the slots."""
        for adapter_id in self._slots.take_changed():
            if self._slots.slot_of(adapter_id) is None:
                self._tenures.pop(adapter_id, None)
                self._admit_again(adapter_id)
            self._waiting.adapter_changed(adapter_id)

    def assign(self, step_id: int) -> None:
        """Before step `step_id` admits anybody: begin as many loads as there are slots to be had; if there
        are too few, let an adapter yield."""
        self._step = step_id
        self.refresh()
        while True:
            lane = self._waiting.first_unready
            for adapter_id in [one for one in self._yielding if lane is None or not self._yields(one, lane)]:
                self._admit_again(adapter_id)
            if lane is None or lane.adapter_id is None:
                return
            wanted = [one for one in self._slots.ready_ids if self._is_wanted(one)]
            load = self._slots.begin_load(lane.adapter_id, self._num_bytes(lane.adapter_id), keep=wanted)
            if load is not None:
                self._loads.append(load)
                self.refresh()
            elif not self._let_one_yield(lane):
                return

    def _is_wanted(self, adapter_id: str) -> bool:
        """By requests that may be admitted yet."""
        return any(
            lane.has_started or adapter_id not in self._yielding
            for lane in self._waiting.waiting_for(adapter_id)
        )

    def _let_one_yield(self, lane: Lane) -> bool:
        """One at a time. True where `begin_load` may have more luck now."""
        if any(self._is_wanted(one) or not self._slots.is_evictable(one) for one in self._yielding):
            return False
        ready = [adapter_id for adapter_id in self._slots.ready_ids if adapter_id not in self._yielding]
        ahead = [adapter_id for adapter_id in ready if self._yields(adapter_id, lane)]
        if not ahead:
            return False
        furthest = max(ahead, key=self._lead)
        self._yielding.add(furthest)
        self._waiting.stop_admitting(furthest)
        return True

    def _yields(self, adapter_id: str, lane: Lane) -> bool:
        """Whether an adapter that is ready has had its quantum and goes after `lane`."""
        tenure = self._tenures.get(adapter_id)
        if tenure is None or self._slots.is_pinned(adapter_id):
            return False
        if tenure.num_tokens < self._quantum and self._step - tenure.first_step < QUANTUM_STEPS:
            return False
        rivals = self._rivals(adapter_id)
        if rivals:
            return winner([lane, *rivals], fair=self._waiting.fair) is lane
        return not self._waiting.fair or tenure.share.served > lane.share.served

    def _rivals(self, adapter_id: str) -> list[Lane]:
        return [lane for lane in self._waiting.waiting_for(adapter_id) if not lane.has_started]

    def _lead(self, adapter_id: str) -> tuple[int, int]:
        """The larger, the further ahead: by tokens served if that counts, then by who would be first."""
        rivals = self._rivals(adapter_id)
        if rivals:
            first = winner(rivals, fair=self._waiting.fair)
            return (first.share.served if self._waiting.fair else 0), first.order[0]
        return (self._tenures[adapter_id].share.served if self._waiting.fair else 0), sys.maxsize

    def _admit_again(self, adapter_id: str) -> None:
        if adapter_id in self._yielding:
            self._yielding.discard(adapter_id)
            self._waiting.admit_again(adapter_id)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless shares, lanes and those that yield agree with the slots."""
        self.refresh()
        self._waiting.check_integrity()
        if not (self._yielding | set(self._tenures)) <= set(self._slots.ready_ids):
            raise IntegrityError("an adapter that isn't ready is taken to be")
