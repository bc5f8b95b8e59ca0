"""Requests in the order in which they are served. Knows `Request.order`; not where it comes from."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter
from typing import TYPE_CHECKING

from hybridserve.core.slabs import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hybridserve.core.request import Request, RequestStatus

_by_order = attrgetter("order")


class RequestQueue:
    """A sorted list: finding a place takes O(log n) comparisons; making room moves n pointers, fast."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def first(self) -> Request:
        return self._requests[0]

    @property
    def last(self) -> Request:
        return self._requests[-1]

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_by_order)

    def discard(self, request: Request) -> bool:
        """Take a request out; whether it was there."""
        index = bisect_left(self._requests, request.order, key=_by_order)
        if index == len(self._requests) or self._requests[index] is not request:
            return False
        del self._requests[index]
        return True

    def check_integrity(self, status: RequestStatus) -> None:
        orders = [request.order for request in self._requests]
        if orders != sorted(set(orders)):
            raise IntegrityError(f"the {status.value} requests are out of order")
        for request in self._requests:
            if request.status is not status:
                raise IntegrityError(f"request {request.id!r} is {request.status.value}, not {status.value}")
