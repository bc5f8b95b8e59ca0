"""A heap whose items change their keys. Knows nothing but keys."""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class LazyHeap(Generic[T]):
    """The item with the smallest key, when keys change. One that has become smaller must be `put` again; one
    that has become larger is found out when it comes to the top. Amortised O(log n) a change."""

    def __init__(self, key: Callable[[T], Any]) -> None:
        self._key = key
        self._filed: dict[T, Any] = {}  # the key that each item was filed under last
        self._entries: list[tuple[Any, int, T]] = []  # besides those, some that are out of date
        self._num_pushed = 0  # breaks ties, so that items are never compared

    def __len__(self) -> int:
        return len(self._filed)

    def put(self, item: T) -> None:
        key = self._key(item)
        if self._filed.get(item) == key:
            return
        self._filed[item] = key
        heappush(self._entries, self._entry(key, item))
        if len(self._entries) > 2 * len(self._filed) + 16:
            self._entries = [self._entry(key, item) for item, key in self._filed.items()]
            heapify(self._entries)

    def remove(self, item: T) -> None:
        del self._filed[item]

    def first(self) -> T | None:
        while self._entries:
            filed, _, item = self._entries[0]
            if self._filed.get(item) != filed:
                heappop(self._entries)
                continue
            key = self._key(item)
            if key == filed:
                return item
            self._filed[item] = key
            heapreplace(self._entries, self._entry(key, item))
        return None

    def _entry(self, key: Any, item: T) -> tuple[Any, int, T]:
        self._num_pushed += 1
        return key, self._num_pushed, item
