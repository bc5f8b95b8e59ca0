"""A run as text for a person and as JSON for a program. Knows summaries; computes none of them."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hybridserve.bench.summary import Summary, by_adapter, span
from hybridserve.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hybridserve.bench.record import Record
    from hybridserve.bench.slo import Slo
    from hybridserve.bench.summary import Distribution

LATE_SECONDS = 0.02
"""With more at the 99th percentile, the client could not keep up with its own schedule."""
COLUMNS = ("mean", "p50", "p90", "p99", "max")
LATENCIES = {
    "ttft": "TTFT, until the first token",
    "itl": "ITL, between tokens",
    "gap": "between arrivals",
    "e2e": "E2E, the whole answer",
}


@dataclass(frozen=True, slots=True)
class Context:
    """What was measured, and how; begin_time as ISO 8601 has it."""

    target: dict[str, Any]
    counts: str
    workload: str
    form: str
    seed: int
    num_turns: int
    load: dict[str, Any]
    load_text: str
    num_warmup: int
    begin_time: str
    was_interrupted: bool = False
    num_skipped: int = 0


@dataclass(frozen=True)
class Report:
    context: Context
    records: Sequence[Record]
    slo: Slo | None = None

    @property
    def summary(self) -> Summary:
        begin, end = span(self.records)
        return Summary.of(self.records, end - begin, self.slo)

    def adapters(self) -> dict[str, Summary]:
        """Each adapter's part of a run that had several."""
        groups = by_adapter(self.records)
        begin, end = span(self.records)
        if len(groups) < 2:
            return {}
        return {name or "base": Summary.of(group, end - begin, self.slo) for name, group in groups.items()}

    def to_dict(self) -> dict[str, Any]:
        """For JSON. Every number of seconds, tokens or a second; requests in the order of their sending."""
        begin, _ = span(self.records)
        return {
            **asdict(self.context),
            "machine": {
                "hybridserve": __version__,
                "python": platform.python_version(),
                "platform": platform.platform(),
                "cpu_count": os.cpu_count(),
            },
            "summary": asdict(self.summary),
            "adapters": {name: asdict(summary) for name, summary in self.adapters().items()},
            "requests": [
                record.to_dict(begin) for record in sorted(self.records, key=lambda record: record.start)
            ],
        }

    def text(self) -> str:
        """About 20 lines."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        context, summary = self.context, self.summary
        name = context.target["model"]
        yield _row("target", f"{context.target['url']}  {name}" if "url" in context.target else name)
        turns = f", {context.num_turns} turns each" if context.num_turns > 1 else ""
        yield _row("workload", f"{context.workload} as {context.form}, seed {context.seed}{turns}")
        yield _row("load", f"{context.load_text}; {context.num_warmup} before it to warm up")
        if context.was_interrupted:
            yield _row("", "interrupted: what was under way is not counted")
        yield ""
        yield _row("requests", _amount(summary.num_ok, summary.requests_per_second))
        cached = (
            "" if summary.num_cached_tokens is None else f"  {summary.num_cached_tokens:,} from the cache"
        )
        yield _row(
            "prompt tokens", _amount(summary.num_prompt_tokens, summary.prompt_tokens_per_second) + cached
        )
        yield _row("output tokens", _amount(summary.num_output_tokens, summary.output_tokens_per_second))
        yield _row("seconds", f"{summary.seconds:>10.2f}")
        if summary.num_failed or context.num_skipped:
            skipped = f", and {context.num_skipped} later turns not sent" if context.num_skipped else ""
            yield _row("failed", f"{summary.num_failed:>10,}{skipped}")
            for kind, count in summary.errors.items():
                yield _row("", f"{count:>10,}  {kind}: {summary.error_examples[kind]}")
        yield ""
        yield f"{'milliseconds':<30}" + "".join(f"{column:>10}" for column in COLUMNS)
        for key, title in LATENCIES.items():
            yield f"{title:<30}" + _cells(getattr(summary, key))
        yield from self._notes(summary)
        if summary.goodput is not None:
            good = summary.goodput
            yield ""
            yield _row(
                "goodput", f"{_amount(good.num_requests, good.requests_per_second)}  {good.share:.1%} of all"
            )
            yield _row("", f"  {good.slo}")
        if adapters := self.adapters():
            yield ""
            yield from _adapter_rows(adapters)

    def _notes(self, summary: Summary) -> Iterator[str]:
        each = summary.tokens_per_arrival
        if each is not None:
            yield f"  {each:.2f} tokens an arrival ({self.context.counts}), which share the time before it"
        if summary.num_ended_early:
            yield f"  {summary.num_ended_early:,} answers ended by themselves, before the tokens asked for"
        if summary.late is not None and summary.late.p99 > LATE_SECONDS:
            late = f"{summary.late.p99 * 1000:,.0f} ms"
            yield f"  this client sent 1 % of the requests {late} late or more: it was too slow for the load"


def _row(name: str, text: str) -> str:
    return f"{name:<14}{text}".rstrip()


def _amount(count: int, rate: float) -> str:
    return f"{count:>10,}  {rate:>10,.2f} a second"


def _cells(found: Distribution | None) -> str:
    if found is None:
        return "".join(f"{'-':>10}" for _ in COLUMNS)
    return "".join(f"{getattr(found, column) * 1000:>10,.1f}" for column in COLUMNS)


def _adapter_rows(adapters: dict[str, Summary]) -> Iterator[str]:
    width = max(len("adapter"), *map(len, adapters))
    heads = ("requests", "failed", "output/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99")
    yield f"{'adapter':<{width}}" + "".join(f"{head:>10}" for head in heads)
    for name, summary in adapters.items():
        times = [
            "-" if found is None else f"{getattr(found, column) * 1000:,.1f}"
            for found in (summary.ttft, summary.itl)
            for column in ("p50", "p99")
        ]
        numbers = [
            f"{summary.num_ok:,}",
            f"{summary.num_failed:,}",
            f"{summary.output_tokens_per_second:,.1f}",
        ]
        yield f"{name:<{width}}" + "".join(f"{cell:>10}" for cell in [*numbers, *times])
