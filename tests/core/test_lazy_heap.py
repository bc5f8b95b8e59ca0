"""The heap against sorting."""

from __future__ import annotations

import random

from hybridserve.core.lazy_heap import LazyHeap


def test_lazy_heap() -> None:
    rng, keys = random.Random(0), {}
    heap = LazyHeap[int](lambda item: keys[item])
    for step in range(20_000):
        item = rng.randrange(30)
        if item in keys and rng.random() < 0.2:
            heap.remove(item)
            del keys[item]
        elif item in keys and rng.random() < 0.5:
            keys[item] += rng.randrange(5)  # larger: the heap finds out
        else:
            keys[item] = min(keys.get(item, 1 << 30), rng.randrange(10 + step // 10))
            heap.put(item)
        first = heap.first()
        assert (first is None) == (not keys)
        assert first is None or keys[first] == min(keys.values())
        assert len(heap) == len(keys)
        assert len(heap._entries) <= 2 * 30 + 17
