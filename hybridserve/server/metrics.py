"""What `/metrics` shows, in Prometheus' text format; every name begins with `hybridserve_`.

Counts requests as clients see them; what the engine counts is for `engine_metrics`. Lives in the event loop,
so that nothing here needs a lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily

from hybridserve.server import tracing
from hybridserve.server.engine_metrics import counter, gauge, labelled, of_engine
from hybridserve.server.security import route_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from prometheus_client.core import Metric

    from hybridserve.engine.messages import RequestMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OTHER = "(other)"
"""All paths that are not served."""

_SECONDS = tuple(step * 10.0**power for power in range(-3, 3) for step in (1, 2.5, 5))
_TOKENS = tuple(2**power for power in range(21))
_FEW = (1, 2, 5, 10, 20, 50, 128)
_HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("from arrival to the first token", _SECONDS),
    "inter_token_latency_seconds": ("between pieces of one continuation", _SECONDS),
    "e2e_request_latency_seconds": ("from arrival to the last token, or until it was cut short", _SECONDS),
    "request_queue_time_seconds": ("from arrival to the first step", _SECONDS),
    "request_prefill_time_seconds": ("from the first step to the first token", _SECONDS),
    "request_decode_time_seconds": ("from the first to the last token", _SECONDS),
    "request_prompt_tokens": ("tokens of a request's prompt", _TOKENS),
    "request_generation_tokens": ("tokens that were generated for a request", _TOKENS),
    "request_params_n": ("continuations that were asked for", _FEW),
    "request_params_max_tokens": ("tokens that were asked for at most", _TOKENS),
}
_SERVER_GAUGES: Mapping[str, str] = {
    "ready": "whether requests are served",
    "start_time_seconds": "when the server started, in seconds since 1970",
    "server_sequences": "sequences that were accepted and have not ended",
    "server_sequences_max": "the most that are accepted: max_queue and max_num_seqs",
}


class _Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def total(self) -> tuple[int, float]:
        return sum(self._counts), self._sum

    def family(self, name: str, about: str) -> HistogramMetricFamily:
        labels = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(labels, accumulate(self._counts), strict=True))
        return HistogramMetricFamily(name, about, buckets=buckets, sum_value=self._sum)


class ServerMetrics:
    """Counters and histograms since the start."""

    def __init__(self) -> None:
        self._histograms = {name: _Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._responses: Counter[tuple[str, str]] = Counter()
        self._rejections: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._ignored: Counter[str] = Counter()
        self._num_prompt_tokens = 0
        self._num_corrupted = 0
        self.observe_gap = self._histograms["inter_token_latency_seconds"].observe

    def respond(self, path: str, status: int) -> None:
        self._responses[route_of(path) or OTHER, str(status)] += 1

    def reject(self, reason: str) -> None:
        """A request for which there was no room."""
        self._rejections[reason] += 1

    def ignore(self, names: Iterable[str]) -> None:
        """Fields that were accepted without effect: of a list, so that they are few."""
        self._ignored.update(names)

    def take(self, num_prompt_tokens: int, n: int, max_tokens: int) -> None:
        """The engine has taken a prompt; whoever asked may have left."""
        self._num_prompt_tokens += num_prompt_tokens
        self._observe("request_prompt_tokens", num_prompt_tokens)
        self._observe("request_params_n", n)
        self._observe("request_params_max_tokens", max_tokens)

    def finish_sequences(self, reason: str, count: int) -> None:
        """stop, length, abort (its client left, or the deadline passed), error, or refused by the engine."""
        if count:
            self._finished[reason] += count
            if (span := tracing.current.get()) is not None:
                span.finish_sequences(reason)

    def corrupt(self) -> None:
        """The engine gave a sequence up."""
        self._num_corrupted += 1

    def finish(self, times: RequestMetrics, num_generated: int) -> None:
        """A prompt of which the engine has nothing more to say."""
        self._observe("request_generation_tokens", num_generated)
        self._observe("e2e_request_latency_seconds", times.finished - times.arrival)
        if times.first_scheduled is not None:
            self._observe("request_queue_time_seconds", times.first_scheduled - times.arrival)
        if times.first_token is not None:
            self._observe("time_to_first_token_seconds", times.first_token - times.arrival)
            self._observe("request_decode_time_seconds", times.finished - times.first_token)
            if times.first_scheduled is not None:
                self._observe("request_prefill_time_seconds", times.first_token - times.first_scheduled)
        if (span := tracing.current.get()) is not None:
            span.finish(times, num_generated)

    def cut(self, seconds: float, seconds_to_first: float | None, num_generated: int) -> None:
        """A prompt that the engine took and did not bring to its end, as its client left, its deadline passed
        or the engine failed, after so many seconds. Without these, latencies look best when nobody gets an
        answer in time."""
        self._observe("request_generation_tokens", num_generated)
        self._observe("e2e_request_latency_seconds", seconds)
        if seconds_to_first is not None:
            self._observe("time_to_first_token_seconds", seconds_to_first)

    def total(self, name: str) -> tuple[int, float]:
        """How often something was measured, and the sum."""
        return self._histograms[name].total()

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def render(
        self,
        stats: Mapping[str, Any] | None,
        plan: Mapping[str, Any] | None,
        max_loras: int,
        step_seconds: float,
        gauges: Mapping[str, float],
        startup: Mapping[str, float],
    ) -> bytes:
        """The page. `stats` None: the engine can't be asked now, and its numbers are left out. `gauges` are
        the server's, `startup` the seconds of each part of starting up."""
        registry = CollectorRegistry(auto_describe=False)
        families = [*self._own(gauges, startup), *of_engine(stats, plan, max_loras, step_seconds)]
        registry.register(_Families(families))
        return generate_latest(registry)

    def _own(self, gauges: Mapping[str, float], startup: Mapping[str, float]) -> Iterator[Metric]:
        for name, about in _SERVER_GAUGES.items():
            yield gauge(name, about, gauges[name])
        phases = GaugeMetricFamily(
            "hybridserve_startup_seconds", "how long each part of starting up took", labels=["phase"]
        )
        for phase, seconds in startup.items():
            phases.add_metric([phase], seconds)
        yield phases
        for name, (about, _) in _HISTOGRAMS.items():
            yield self._histograms[name].family(f"hybridserve_{name}", about)
        yield counter("prompt_tokens", "tokens of prompts that the engine took", self._num_prompt_tokens)
        yield counter("corrupted_requests", "sequences that the engine gave up", self._num_corrupted)
        yield labelled("request_success", "sequences that have ended", ["finished_reason"], self._finished)
        yield labelled("admission_rejections", "requests that found no room", ["reason"], self._rejections)
        yield labelled("ignored_fields", "fields accepted without effect", ["field"], self._ignored)
        yield labelled("http_responses", "responses begun", ["path", "status"], self._responses)


class _Families:
    """What prometheus_client collects from."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
