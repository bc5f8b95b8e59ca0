"""How long a call takes. Knows nothing of what it calls."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def microseconds(call: Callable[[], object], seconds: float) -> float:
    """Median of at least 5 calls, and of as many as fit into `seconds`, after one that is not counted."""
    call()
    taken: list[float] = []
    stop = time.perf_counter() + seconds
    while len(taken) < 5 or time.perf_counter() < stop:
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return round(statistics.median(taken) * 1e6, 1)
