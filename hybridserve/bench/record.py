"""What happened to one request, by the clock of the event loop, and what follows from it.

Knows times and counts; not where they come from, nor other requests. Times are seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hybridserve.bench.target import RequestFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hybridserve.bench.target import Arrival, Target, TargetRequest, Usage


@dataclass(slots=True)
class Record:
    """due: when it was to be sent; start: when it was; end: when its answer was complete, or it failed."""

    due: float
    start: float
    adapter: str | None = None
    turn: int = 0
    end: float = 0.0
    times: list[float] = field(default_factory=list)
    """Of each arrival that brought tokens."""
    told: list[int | None] = field(default_factory=list)
    """Tokens in each arrival, where the target tells."""
    num_events: list[int] = field(default_factory=list)
    """Pieces that each arrival came in."""
    usage: Usage | None = None
    finish_reason: str | None = None
    error: RequestFailed | None = None
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def add(self, now: float, arrival: Arrival) -> None:
        self.usage = arrival.usage or self.usage
        self.finish_reason = arrival.finish_reason or self.finish_reason
        if arrival.num_events:
            self.times.append(now)
            self.told.append(arrival.num_tokens)
            self.num_events.append(arrival.num_events)
            self.text.append(arrival.text)
            self.token_ids += arrival.token_ids

    @property
    def is_ok(self) -> bool:
        return self.error is None

    @property
    def is_exact(self) -> bool:
        """Whether the target told how many tokens were in each arrival."""
        return None not in self.told

    @property
    def num_prompt_tokens(self) -> int:
        return 0 if self.usage is None else self.usage.num_prompt

    @property
    def num_output_tokens(self) -> int:
        return 0 if self.usage is None else self.usage.num_output

    def counts(self) -> list[int]:
        """Tokens in each arrival: as told, or else those of the request, by events, as evenly as whole
        numbers allow."""
        if self.is_exact:
            return [count or 0 for count in self.told]
        return apportion(self.num_output_tokens, self.num_events)

    @property
    def ttft(self) -> float | None:
        """Until the first arrival."""
        return self.times[0] - self.start if self.times else None

    @property
    def e2e(self) -> float:
        return self.end - self.start

    def gaps(self) -> list[float]:
        """Between one arrival and the next."""
        return [later - earlier for earlier, later in pairwise(self.times)]

    def intervals(self) -> list[tuple[float, int]]:
        """(seconds, tokens) of each arrival after the first: what it waited for, and for how many. The time
        before one that holds no whole token is part of the next one's."""
        found, waited = [], 0.0
        for gap, count in zip(self.gaps(), self.counts()[1:], strict=True):
            waited += gap
            if count:
                found.append((waited, count))
                waited = 0.0
        return found

    @property
    def mean_itl(self) -> float | None:
        """Seconds a token, after the first arrival. None where all came at once."""
        intervals = self.intervals()
        num_tokens = sum(count for _, count in intervals)
        return sum(seconds for seconds, _ in intervals) / num_tokens if num_tokens else None

    def to_dict(self, begin: float) -> dict[str, Any]:
        """For JSON; moments count from `begin`."""
        return {
            "start_seconds": self.start - begin,
            "late_seconds": self.start - self.due,
            "end_seconds": self.end - begin,
            "adapter": self.adapter,
            "turn": self.turn,
            "ttft_seconds": self.ttft,
            "mean_itl_seconds": self.mean_itl,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "num_cached_tokens": None if self.usage is None else self.usage.num_cached,
            "num_arrivals": len(self.times),
            "finish_reason": self.finish_reason,
            "error": None if self.error is None else str(self.error),
        }


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Whole numbers in the ratio of the weights, whose sum is `total`."""
    whole = sum(weights)
    ends = [0]
    passed = 0
    for weight in weights:
        passed += weight
        ends.append(round(total * passed / whole))
    return [later - earlier for earlier, later in pairwise(ends)]


async def measure(
    target: Target, request: TargetRequest, *, due: float, limit: float | None, turn: int = 0
) -> Record:
    """Send a request and write down what comes. `limit`: seconds. A failure is in the record, not
    raised."""
    clock = asyncio.get_running_loop().time
    record = Record(due, clock(), request.adapter, turn)
    try:
        async with asyncio.timeout(limit), contextlib.aclosing(target.stream(request)) as stream:
            async for arrival in stream:
                record.add(clock(), arrival)
        if record.usage is None:
            raise RequestFailed("protocol", "the answer came without usage")
        if not record.times and record.usage.num_output:
            raise RequestFailed("protocol", "the answer has tokens, but none came")
    except RequestFailed as error:
        record.error = error
    except TimeoutError:
        record.error = RequestFailed("timeout", f"no whole answer in {limit:g} s")
    record.end = clock()
    return record
