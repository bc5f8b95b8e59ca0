"""Lanes of waiting requests, and whose turn it is among them. Knows what each share has been served; does not
know what a request waits for.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

from hybridserve.core.lazy_heap import LazyHeap
from hybridserve.core.request_queue import RequestQueue

if TYPE_CHECKING:
    from collections.abc import Collection


@dataclass(slots=True, eq=False)
class Share:
    """All requests that name one adapter: a class that shares the engine fairly with the others."""

    name: str | None
    num_requests: int = 0
    num_running: int = 0
    num_queued: int = 0
    num_finished: int = 0
    num_computed_tokens: int = 0
    num_generated_tokens: int = 0
    handicap: int = 0
    """Tokens that it had no claim to while it asked for nothing."""
    lanes: dict[Lane, None] = field(default_factory=dict)

    @property
    def served(self) -> int:
        """Tokens computed for it. Who has been served least goes first."""
        return self.num_computed_tokens + self.handicap


class Place(enum.Enum):
    READY = "ready"  # may be admitted
    UNREADY = "unready"  # needs its adapter in a slot
    HELD = "held"  # has to wait for something else: a load, a running request of its share, another's turn


@dataclass(slots=True, eq=False)
class Lane:
    """Waiting requests of one share that need the same content, have the same priority and have started, or
    have not; in order."""

    share: Share
    adapter_id: str | None
    level: int
    has_started: bool
    requests: RequestQueue = field(default_factory=RequestQueue)
    place: Place | None = None

    @property
    def order(self) -> tuple[int, int, int]:
        return self.requests.first.order

    @property
    def turn(self) -> tuple[bool, int, tuple[int, int, int]]:
        return not self.has_started, self.share.served, self.requests.first.order


def winner(lanes: Collection[Lane], *, fair: bool) -> Lane:
    """Whose turn it would be among these few lanes: what `Turns` finds among many."""
    oldest = min(lanes, key=lambda lane: lane.order)
    if not fair:
        return oldest
    return min((lane for lane in lanes if lane.level == oldest.level), key=lambda lane: lane.turn)


class Turns:
    """Lanes, and whose turn it is among them.

    Priority comes first: the level of the request that goes first by `Request.order`, which is priority with
    its aging. Within that level, requests that had started come before others: their turn has been. Then it
    is the turn of the share that has been served least, and within the share of its first request. Not
    `fair`: simply the request that goes first.
    """

    def __init__(self, *, fair: bool) -> None:
        self._fair = fair
        self._by_order = LazyHeap[Lane](attrgetter("order"))
        self._levels: dict[int, LazyHeap[Lane]] = {}

    def __len__(self) -> int:
        return len(self._by_order)

    def put(self, lane: Lane) -> None:
        self._by_order.put(lane)
        if self._fair:
            if lane.level not in self._levels:
                self._levels[lane.level] = LazyHeap[Lane](attrgetter("turn"))
            self._levels[lane.level].put(lane)

    def remove(self, lane: Lane) -> None:
        self._by_order.remove(lane)
        if self._fair:
            self._levels[lane.level].remove(lane)
            if not len(self._levels[lane.level]):
                del self._levels[lane.level]

    def first(self) -> Lane | None:
        oldest = self._by_order.first()
        return self._levels[oldest.level].first() if self._fair and oldest else oldest
