"""How long each part of a run may take, so that all of it ends in time. Knows seconds; knows no work."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LEAST_SECONDS = 5.0
"""With less than that, a part is not begun: it would end before it has measured anything."""


@dataclass(frozen=True, slots=True)
class Part:
    """One process of a run. `seconds` is what it is promised, whatever the parts before it do."""

    name: str
    module: str  # of benchmarks.gpu
    seconds: float
    options: tuple[str, ...] = ()


class Budget:
    """What is left of `seconds`, divided among `parts` in their order.

    A part that ends early leaves its time to the next; a part that was killed can't take the others'.
    """

    def __init__(
        self, seconds: float, parts: Sequence[Part], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """ValueError if more is promised than there is."""
        promised = sum(part.seconds for part in parts)
        if promised > seconds:
            raise ValueError(f"the parts need {promised:g} seconds, and there are {seconds:g}")
        self._parts = list(parts)
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        """Seconds; never negative."""
        return max(0.0, self._end - self._clock())

    def limit(self, part: Part) -> float:
        """Seconds that `part` may take if it begins now: all but what is promised to those after it; 0 if it
        should not begin."""
        after = self._parts[self._parts.index(part) + 1 :]
        seconds = self.left - sum(each.seconds for each in after)
        return seconds if seconds >= min(LEAST_SECONDS, part.seconds) else 0.0
