"""Many records in few numbers: distributions, throughput, goodput, errors by kind.

Knows records; prints and draws nothing. Seconds and tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hybridserve.bench.record import Record
    from hybridserve.bench.slo import Slo


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of seconds, mostly. `weight`: how many values it is of."""

    weight: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self | None:
        """None of no values."""
        found = sorted(values)
        if not found:
            return None
        p50, p90, p99 = (percentile(found, percent) for percent in (50, 90, 99))
        return cls(len(found), math.fsum(found) / len(found), p50, p90, p99, found[-1])


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Between the two nearest values, linearly (the default of numpy.percentile)."""
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met the objective: their number, their share of all that were sent, and a second."""

    slo: str
    num_requests: int
    share: float
    requests_per_second: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Of some requests. Latencies, tokens and throughput are of those that succeeded.

    seconds: from the first that was sent to the end of the last, of all requests of the run.
    itl: a sample a token, after the first arrival of each request; the tokens of one arrival share the time
    that passed before it. gap: a sample an arrival. late: from when a request was to be sent to when it was.
    """

    num_ok: int
    num_failed: int
    seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int | None
    requests_per_second: float
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    ttft: Distribution | None
    itl: Distribution | None
    gap: Distribution | None
    e2e: Distribution | None
    late: Distribution | None
    tokens_per_arrival: float | None
    num_estimated: int
    """Requests whose target didn't tell the tokens of each arrival."""
    num_ended_early: int
    """Answers that ended by themselves, before the tokens that were asked for."""
    errors: dict[str, int]
    error_examples: dict[str, str]
    goodput: Goodput | None

    @classmethod
    def of(cls, records: Sequence[Record], seconds: float, slo: Slo | None = None) -> Self:
        ok = [record for record in records if record.is_ok]
        failures = [record.error for record in records if record.error is not None]
        cached = [r.usage.num_cached for r in ok if r.usage is not None and r.usage.num_cached is not None]
        num_arrivals = sum(len(record.times) for record in ok)
        num_arrived = sum(sum(record.counts()) for record in ok)

        def rate(count: float) -> float:
            return count / seconds if seconds > 0 else 0.0

        num_prompt = sum(record.num_prompt_tokens for record in ok)
        num_output = sum(record.num_output_tokens for record in ok)
        goodput = None
        if slo is not None:
            num_good = sum(slo.is_met_by(record) for record in records)
            share = num_good / len(records) if records else 0.0
            goodput = Goodput(str(slo), num_good, share, rate(num_good))
        return cls(
            num_ok=len(ok),
            num_failed=len(failures),
            seconds=seconds,
            num_prompt_tokens=num_prompt,
            num_output_tokens=num_output,
            num_cached_tokens=sum(cached) if cached else None,
            requests_per_second=rate(len(ok)),
            prompt_tokens_per_second=rate(num_prompt),
            output_tokens_per_second=rate(num_output),
            ttft=Distribution.of(record.ttft for record in ok if record.ttft is not None),
            itl=Distribution.of(token_times(ok)),
            gap=Distribution.of(gap for record in ok for gap in record.gaps()),
            e2e=Distribution.of(record.e2e for record in ok),
            late=Distribution.of(record.start - record.due for record in records),
            tokens_per_arrival=num_arrived / num_arrivals if num_arrivals else None,
            num_estimated=sum(not record.is_exact for record in ok),
            num_ended_early=sum(record.finish_reason == "stop" for record in ok),
            errors=dict(Counter(error.kind for error in failures).most_common()),
            error_examples={error.kind: error.detail for error in reversed(failures)},
            goodput=goodput,
        )


def token_times(records: Iterable[Record]) -> Iterable[float]:
    """Seconds that each token after a request's first arrival took."""
    for record in records:
        for seconds, count in record.intervals():
            for _ in range(count):
                yield seconds / count


def span(records: Sequence[Record]) -> tuple[float, float]:
    """When the first was sent and the last ended; nothing for no records."""
    if not records:
        return 0.0, 0.0
    return min(record.start for record in records), max(record.end for record in records)


def by_adapter(records: Sequence[Record]) -> dict[str | None, list[Record]]:
    """In the order of the names, the base model's first."""
    names = sorted({record.adapter for record in records}, key=lambda name: (name is not None, name or ""))
    return {name: [record for record in records if record.adapter == name] for name in names}
