"""A span of each request that changes or generates something, by OpenTelemetry: of the request, and within it
of each prompt's time in the queue, in prefill and in decode.

Knows routes, times and counts. Nothing that a client wrote is in a span, but for the trace that its
`traceparent` names. OpenTelemetry is imported only where `server.tracing` is on; where to send spans, and
which, its own environment variables say (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_TRACES_SAMPLER, ...).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING

from hybridserve.server.security import ROUTES
from hybridserve.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

    from hybridserve.engine.messages import RequestMetrics

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 5.0
"""For the last spans to be sent when the server ends."""
_PROTOCOL = "http/protobuf"


class RequestSpan:
    """Of one HTTP request, while it is being answered."""

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing = tracing
        self._span = span
        self._num_prompt = 0
        self._num_cached = 0
        self._num_generated = 0
        self._endings: list[str] = []

    def start(self, num_prompt_tokens: int, n: int, max_tokens: int) -> None:
        """The engine has taken a prompt."""
        self._num_prompt += num_prompt_tokens
        self._span.set_attribute("gen_ai.usage.input_tokens", self._num_prompt)
        self._span.set_attribute("gen_ai.request.choice.count", n)
        self._span.set_attribute("gen_ai.request.max_tokens", max_tokens)

    def finish(self, times: RequestMetrics, num_generated: int) -> None:
        """A prompt has come to its end: `times` are monotonic seconds."""
        self._num_generated += num_generated
        self._num_cached += times.num_cached_tokens
        self._span.set_attribute("gen_ai.usage.output_tokens", self._num_generated)
        self._span.set_attribute("gen_ai.usage.cache_read.input_tokens", self._num_cached)
        moments = (
            ("queue", times.arrival, times.first_scheduled),
            ("prefill", times.first_scheduled, times.first_token),
            ("decode", times.first_token, times.finished),
        )
        offset = time.time_ns() - time.monotonic_ns()
        for name, begin, end in moments:
            if begin is not None and end is not None:
                self._tracing.phase(self._span, name, int(begin * 1e9) + offset, int(end * 1e9) + offset)

    def finish_sequences(self, reason: str) -> None:
        if reason not in self._endings:
            self._endings.append(reason)

    def end(self, status: int) -> None:
        """`status` of the response; 0 where its client left before there was one."""
        from opentelemetry.trace import StatusCode

        if self._endings:
            self._span.set_attribute("gen_ai.response.finish_reasons", self._endings)
        if status:
            self._span.set_attribute("http.response.status_code", status)
        if status >= 500 or "error" in self._endings:
            self._span.set_attribute("error.type", str(status) if status >= 500 else "error")
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


current: ContextVar[RequestSpan | None] = ContextVar("hybridserve_request_span", default=None)
"""Of the request in whose task, or in a task of whose, this runs; None where nothing is traced."""


class Tracing:
    """Makes the spans of one server."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("hybridserve", __version__)
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def from_environment(cls) -> Tracing:
        """With OTLP over HTTP. ValueError where OpenTelemetry is missing, or its environment asks for what is
        not there."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError as error:
            raise ValueError(
                f"server.tracing: {error.name} is missing: pip install 'hybridserve[otel]'"
            ) from None
        _check_environment(os.environ)
        resource = Resource.create({"service.version": __version__})
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):  # the environment names none
            resource = resource.merge(Resource({SERVICE_NAME: "hybridserve"}))
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider)

    def begin(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> RequestSpan | None:
        """The span of a request; None for one that is not traced: a probe, a scrape, a page."""
        if method != "POST" or path not in ROUTES:
            return None
        from opentelemetry.trace import SpanKind

        carrier = {}
        if (parent := headers.get(b"traceparent")) is not None:
            carrier["traceparent"] = parent.decode("latin-1")
        span = self._tracer.start_span(
            f"{method} {path}",
            self._propagator.extract(carrier),
            SpanKind.SERVER,
            {"http.request.method": method, "http.route": path},
        )
        return RequestSpan(self, span)

    def phase(self, parent: Span, name: str, begin: int, end: int) -> None:
        """A span within another one, of a time that has passed (nanoseconds since 1970)."""
        from opentelemetry.trace import set_span_in_context

        self._tracer.start_span(name, set_span_in_context(parent), start_time=begin).end(end)

    def close(self) -> None:
        """Send what there is, for a while at most: nobody waits for a collector that does not answer."""
        closing = threading.Thread(target=self._provider.shutdown, name="hybridserve-spans", daemon=True)
        closing.start()
        closing.join(FLUSH_SECONDS)
        if closing.is_alive():
            logger.warning("the last spans could not be sent within %g s", FLUSH_SECONDS)


def _check_environment(environment: Mapping[str, str]) -> None:
    for name, known in (
        ("OTEL_TRACES_EXPORTER", "otlp"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", _PROTOCOL),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", _PROTOCOL),
    ):
        if environment.get(name, known) != known:
            raise ValueError(f"server.tracing: {name} is {environment[name]!r}; only {known} is supported")
