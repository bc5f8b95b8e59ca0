"""Whose turn it is among waiting requests, and what each adapter's requests have been served. Knows requests
and which adapters are ready; does not know memory, budgets or who shall get a slot.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from hybridserve.core.lazy_heap import LazyHeap
from hybridserve.core.request import RequestStatus
from hybridserve.core.slabs import IntegrityError
from hybridserve.core.turns import Lane, Place, Share, Turns

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from hybridserve.core.adapter_slots import AdapterSlots
    from hybridserve.core.request import Request

MAX_NAMES = 64
"""Names of adapters without requests are remembered as long as there are no more names than this."""

BASE, OTHERS = "(base)", "(other)"
"""Where `counters()` reports requests for no adapter, and those of names that were forgotten. Neither could
name an adapter."""


class AdapterCounters(NamedTuple):
    """What has become of the requests for one adapter; sequences, since the name was first seen."""

    num_running: int
    num_waiting: int
    num_finished: int
    num_computed_tokens: int
    num_generated_tokens: int


class FairQueue:
    """Waiting requests, of which `first` is admitted next; and a share for each adapter that requests name.

    A request is `open`ed when it comes and `close`d when it ends; meanwhile it is in the queue, running, or
    neither. One whose adapter isn't ready, or of whose adapter `max_running` run, never stands in the way of
    another. A share that had nothing in the queue comes back with no more claim than the neediest of those
    that are there: idling earns nothing. Everything costs O(log n) in what is waiting; an adapter that nobody
    asks for costs nothing.
    """

    def __init__(
        self,
        adapters: AdapterSlots,
        *,
        fair: bool = True,
        max_running: int | None = None,
    ) -> None:
        self.fair = fair
        self._adapters = adapters
        self._max_running = max_running
        self.shares: dict[str | None, Share] = {}
        self._idle: dict[Share, None] = {}  # without requests; longest idle first
        self._running: dict[Share, None] = {}
        self._floor = 0  # no claim is better than that of the last who left, where nobody is left to compare
        self._forgotten = Share(OTHERS)
        self._lanes: dict[tuple[str | None, str | None, int, bool], Lane] = {}
        self._by_adapter: dict[str, dict[Lane, None]] = {}
        self._stopped: set[str] = set()
        self._clear_turns()

    def __len__(self) -> int:
        return self._num_queued

    def __iter__(self) -> Iterator[Request]:
        """All requests in the queue, in no order."""
        return (request for lane in self._lanes.values() for request in lane.requests)

    @property
    def first(self) -> Request | None:
        """Whose turn it is, among requests that may be admitted."""
        lane = self._turns[Place.READY].first()
        return None if lane is None else lane.requests.first

    @property
    def first_unready(self) -> Lane | None:
        """Whose turn it is, among those that wait for a slot for their adapter."""
        return self._turns[Place.UNREADY].first()

    def waiting_for(self, adapter_id: str) -> Collection[Lane]:
        return self._by_adapter.get(adapter_id, ())

    # ---- requests come and go

    def open(self, request: Request) -> None:
        share = self.shares.get(request.adapter)
        if share is None:
            share = self.shares[request.adapter] = Share(request.adapter)
            self._forget()
        self._idle.pop(share, None)
        share.num_requests += 1

    def close(self, request: Request) -> None:
        """A request that is neither queued nor running ends."""
        share = self.shares[request.adapter]
        share.num_requests -= 1
        share.num_finished += 1
        if not share.num_requests:
            self._became_idle(share)

    def _became_idle(self, share: Share) -> None:
        self._floor = max(self._floor, share.served)
        if share.name is not None:  # the base is never forgotten
            self._idle[share] = None
            self._forget()

    def add(self, request: Request) -> None:
        share = self.shares[request.adapter]
        if not share.num_queued:
            self._level_up(share)
        self._queue(request, share)

    def put_back(self, request: Request) -> None:
        """One that was in the queue, and was out of it through no wish of its own: its share keeps its
        claim."""
        self._queue(request, self.shares[request.adapter])

    def _queue(self, request: Request, share: Share) -> None:
        key = self._key(request)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(share, *key[1:])
            share.lanes[lane] = None
            if request.adapter_id is not None:
                self._by_adapter.setdefault(request.adapter_id, {})[lane] = None
        lane.requests.add(request)
        self._num_queued += 1
        share.num_queued += 1
        if share.num_queued == 1:
            self._queued.put(share)
        self._file(lane)

    def begin_again(self, requests: Iterable[Request]) -> None:
        """These are all requests that there are, and none runs: queue them, whatever the books say now. What
        each share was served stays."""
        for share in self.shares.values():
            share.num_requests = share.num_running = share.num_queued = 0
            share.lanes.clear()
        self._running.clear()
        self._lanes.clear()
        self._by_adapter.clear()
        self._clear_turns()
        for request in requests:
            self.open(request)
            self._queue(request, self.shares[request.adapter])
        for share in list(self.shares.values()):
            if not share.num_requests and share not in self._idle:
                self._became_idle(share)

    def _clear_turns(self) -> None:
        self._queued = LazyHeap[Share](attrgetter("served"))
        self._turns = {place: Turns(fair=self.fair) for place in (Place.READY, Place.UNREADY)}
        self._num_queued = 0

    def discard(self, request: Request) -> None:
        key = self._key(request)
        lane = self._lanes.get(key)
        if lane is None or not lane.requests.discard(request):
            return
        share = lane.share
        self._num_queued -= 1
        share.num_queued -= 1
        if not share.num_queued:
            self._queued.remove(share)
        if lane.requests:
            return  # its first has become later, if that: the heaps find out
        self._move(lane, None)
        del self._lanes[key], share.lanes[lane]
        if request.adapter_id is not None:
            lanes = self._by_adapter[request.adapter_id]
            del lanes[lane]
            if not lanes:
                del self._by_adapter[request.adapter_id]

    def _key(self, request: Request) -> tuple[str | None, str | None, int, bool]:
        return request.adapter, request.adapter_id, request.priority, request.has_started

    def may_run(self, request: Request) -> bool:
        """Whether one more sequence of its share may run."""
        return not self._is_full(self.shares[request.adapter])

    def _is_full(self, share: Share) -> bool:
        return (
            self._max_running is not None
            and share.name is not None
            and share.num_running >= self._max_running
        )

    def start(self, request: Request) -> None:
        share = self.shares[request.adapter]
        share.num_running += 1
        self._running[share] = None
        if self._is_full(share):
            self._file_all(share.lanes)

    def stop(self, request: Request) -> None:
        share = self.shares[request.adapter]
        was_full = self._is_full(share)
        share.num_running -= 1
        if not share.num_running:
            del self._running[share]
        if was_full:
            self._file_all(share.lanes)

    def _level_up(self, share: Share) -> None:
        """It had nothing in the queue: what it could have had meanwhile is gone."""
        if (neediest := self._queued.first()) is not None:
            least = neediest.served
        else:
            least = min((one.served for one in self._running if one is not share), default=self._floor)
        share.handicap += max(0, least - share.served)

    def _forget(self) -> None:
        while len(self.shares) > MAX_NAMES and self._idle:
            share = next(iter(self._idle))
            del self._idle[share], self.shares[share.name]
            self._forgotten.num_finished += share.num_finished
            self._forgotten.num_computed_tokens += share.num_computed_tokens
            self._forgotten.num_generated_tokens += share.num_generated_tokens

    # ---- adapters come and go

    def stop_admitting(self, adapter_id: str) -> None:
        """Hold the requests of an adapter that is ready and have not started, until `admit_again`."""
        self._stopped.add(adapter_id)
        self.adapter_changed(adapter_id)

    def admit_again(self, adapter_id: str) -> None:
        self._stopped.discard(adapter_id)
        self.adapter_changed(adapter_id)

    def adapter_changed(self, adapter_id: str) -> None:
        """It has come, gone or become ready."""
        self._file_all(self._by_adapter.get(adapter_id, ()))

    def _place(self, lane: Lane) -> Place:
        if self._is_full(lane.share):
            return Place.HELD
        adapter_id = lane.adapter_id
        if adapter_id is None:
            return Place.READY
        if self._adapters.slot_of(adapter_id) is not None:
            return Place.HELD if adapter_id in self._stopped and not lane.has_started else Place.READY
        return Place.HELD if adapter_id in self._adapters else Place.UNREADY

    def _file_all(self, lanes: Iterable[Lane]) -> None:
        for lane in lanes:
            self._file(lane)

    def _file(self, lane: Lane) -> None:
        place = self._place(lane)
        if place is not lane.place:
            self._move(lane, place)
        elif place in self._turns:
            self._turns[place].put(lane)  # its first may have become an earlier one

    def _move(self, lane: Lane, place: Place | None) -> None:
        if lane.place in self._turns:
            self._turns[lane.place].remove(lane)
        lane.place = None
        if place in self._turns:
            self._turns[place].put(lane)
        lane.place = place

    # ---- books

    def counters(self) -> dict[str, AdapterCounters]:
        """By name; of names that have no requests now, at most so many that there are MAX_NAMES in all."""
        shares = [*self.shares.values()]
        if self._forgotten.num_finished:
            shares.append(self._forgotten)
        return {
            BASE if share.name is None else share.name: AdapterCounters(
                share.num_running,
                share.num_requests - share.num_running,
                share.num_finished,
                share.num_computed_tokens,
                share.num_generated_tokens,
            )
            for share in shares
        }

    def check_integrity(self) -> None:
        """Raise IntegrityError unless lanes, shares and turns agree. Costs O(requests in the queue)."""
        filed: dict[Place, int] = dict.fromkeys(Place, 0)
        queued: dict[str | None, int] = {}
        for lane in self._lanes.values():
            lane.requests.check_integrity(RequestStatus.WAITING)
            if not lane.requests or lane.place is not self._place(lane):
                raise IntegrityError(f"a lane of {lane.share.name!r} is empty or in the wrong place")
            filed[lane.place] += 1
            queued[lane.share.name] = queued.get(lane.share.name, 0) + len(lane.requests)
        if any(filed[place] != len(turns) for place, turns in self._turns.items()):
            raise IntegrityError("a lane that is gone still has its turn")
        if queued != {share.name: share.num_queued for share in self.shares.values() if share.num_queued}:
            raise IntegrityError("what the shares have in the queue is not what is there")
        if sum(queued.values()) != self._num_queued or len(self._queued) != len(queued):
            raise IntegrityError("the waiting requests don't add up")
        for share in self.shares.values():
            if share.num_running < 0 or share.num_running + share.num_queued > share.num_requests:
                raise IntegrityError(f"the requests of {share.name!r} don't add up")
            if self._is_full(share) and share.num_running != self._max_running:
                raise IntegrityError(f"{share.num_running} of {share.name!r} run, {self._max_running} may")
            if (share in self._running) != (share.num_running > 0):
                raise IntegrityError(f"{share.name!r} is taken to run, or not to, and is mistaken")
            if (share in self._idle) != (share.num_requests == 0 and share.name is not None):
                raise IntegrityError(f"{share.name!r} is taken to be idle, or not to be, and is mistaken")
