"""Spans: what is in them, what never is, and that there are none unless they are asked for."""

from __future__ import annotations

import asyncio
import http.server
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hybridserve.config.schema import EngineConfig
from hybridserve.server.app import create_app
from hybridserve.server.tracing import Tracing
from tests.harness.asgi import Client, serving
from tests.harness.serve_process import server

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

ROOT = Path(__file__).parents[2]
SECRET = "xylophone"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


class Spans:
    """Of a server that is being asked."""

    def __init__(self, client: Client) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        client.service.spans = Tracing(provider)
        client.app = create_app(client.service)

    def take(self) -> list[Any]:
        """Those that have ended, in the order in which they began."""
        spans = sorted(
            self._exporter.get_finished_spans(), key=lambda span: (span.parent is not None, span.start_time)
        )
        self._exporter.clear()
        return spans


def test_a_request_and_the_phases_of_its_prompt():
    async def scenario(client: Client) -> None:
        spans = Spans(client)
        begin = time.time_ns()
        answer = await client.complete(prompt="hello", max_tokens=6)
        end = time.time_ns()
        assert answer.status == 200
        request, *phases = spans.take()
        assert (request.name, request.kind) == ("POST /v1/completions", SpanKind.SERVER)
        assert dict(request.attributes) == {
            "http.request.method": "POST",
            "http.route": "/v1/completions",
            "http.response.status_code": 200,
            "gen_ai.usage.input_tokens": 4,
            "gen_ai.usage.output_tokens": 6,
            "gen_ai.usage.cache_read.input_tokens": 0,
            "gen_ai.request.choice.count": 1,
            "gen_ai.request.max_tokens": 6,
            "gen_ai.response.finish_reasons": ("length",),
        }
        assert [span.name for span in phases] == ["queue", "prefill", "decode"]
        assert all(span.parent.span_id == request.context.span_id for span in phases)
        slack = 1_000_000_000  # the two clocks are not read at the same moment
        moments = [phases[0].start_time, *(span.end_time for span in phases)]
        assert moments == sorted(moments)
        assert begin - slack < moments[0]
        assert moments[-1] < end + slack
        for one, other in itertools.pairwise(phases):
            assert one.end_time == other.start_time

    serving(scenario, step_seconds=0.01)


def test_several_prompts_and_a_stream():
    async def scenario(client: Client) -> None:
        spans = Spans(client)
        await client.complete(prompt=["hello", "world"], max_tokens=3, n=2, stream=True)
        request, *phases = spans.take()
        assert [span.name for span in phases].count("decode") == 2
        assert request.attributes["gen_ai.usage.output_tokens"] == 12
        assert request.attributes["gen_ai.request.choice.count"] == 2

    serving(scenario)


def test_a_trace_goes_on():
    async def scenario(client: Client) -> None:
        spans = Spans(client)
        headers = [("traceparent", f"00-{TRACE}-{PARENT}-01"), ("tracestate", f"x={SECRET}")]
        await client.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers)
        request, *phases = spans.take()
        assert f"{request.context.trace_id:032x}" == TRACE
        assert f"{request.parent.span_id:016x}" == PARENT
        assert {span.context.trace_id for span in phases} == {request.context.trace_id}
        assert not request.context.trace_state
        for wrong in ("", "x", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{PARENT}", "\xff" * 500):
            await client.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, [("traceparent", wrong)])
            request, *_ = spans.take()
            assert request.parent is None

    serving(scenario)


def test_nothing_that_a_client_wrote_is_in_a_span():
    async def scenario(client: Client) -> None:
        spans = Spans(client)
        named = [("x-request-id", SECRET), ("user-agent", SECRET), ("tracestate", f"a={SECRET}")]
        bodies = (
            {"prompt": SECRET, "max_tokens": 3, "stop": [SECRET], "user": SECRET},
            {"prompt": SECRET, "model": SECRET},
            {"prompt": SECRET, SECRET: 1},
            {"prompt": SECRET, "response_format": {"type": SECRET}},
        )
        for body in bodies:
            await client.post("/v1/completions", body, named)
        await client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}]}, named)
        await client.post(f"/{SECRET}", {"prompt": SECRET})
        await client.post("/tokenize", {"prompt": SECRET})
        await client.post("/v1/load_lora_adapter", {"lora_name": SECRET, "lora_path": SECRET})
        taken = spans.take()
        assert len([span for span in taken if span.parent is None]) == len(bodies) + 3
        for span in taken:
            assert SECRET not in span.to_json()
            assert not span.events

    serving(scenario)


@pytest.mark.parametrize(
    "path", ["/health", "/health/live", "/metrics", "/v1/models", "/", "/version", "/playground/state"]
)
def test_probes_and_scrapes_make_no_spans(path):
    async def scenario(client: Client) -> None:
        spans = Spans(client)
        assert (await client.get(path)).status == 200
        assert (await client.post("/nothing", {})).status == 404
        assert spans.take() == []

    serving(scenario)


async def in_flight(client: Client) -> None:
    while not client.engine.num_in_flight:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.01)


def test_refused_failed_and_left():
    async def scenario(client: Client) -> None:
        spans = Spans(client)
        await client.complete(prompt="a", max_tokens=0, n=1000)
        (refused,) = spans.take()
        assert refused.attributes["http.response.status_code"] == 400
        assert refused.status.status_code is StatusCode.UNSET
        client.engine.hold()
        call = client.start("POST", "/v1/completions", {"prompt": "a", "stream": True})
        await in_flight(client)
        call.leave()
        await call.task
        (left, *_) = spans.take()
        assert left.attributes["gen_ai.response.finish_reasons"] == ("abort",)
        assert left.status.status_code is StatusCode.UNSET
        call = client.start("POST", "/v1/completions", {"prompt": "a", "stream": True})
        await in_flight(client)
        client.engine.die()
        await call.answer()
        (failed, *_) = spans.take()
        assert failed.attributes["gen_ai.response.finish_reasons"] == ("error",)
        assert failed.status.status_code is StatusCode.ERROR

    serving(scenario)


def test_requests_at_the_same_time_do_not_mix():
    async def scenario(client: Client) -> None:
        spans = Spans(client)
        bodies = [{"prompt": [5] * (3 + i), "max_tokens": 2 + i} for i in range(8)]
        await asyncio.gather(*(client.post("/v1/completions", body) for body in bodies))
        taken = spans.take()
        requests = [span for span in taken if span.parent is None]
        found = {
            (span.attributes["gen_ai.usage.input_tokens"], span.attributes["gen_ai.usage.output_tokens"])
            for span in requests
        }
        assert found == {(3 + i, 2 + i) for i in range(8)}
        for request in requests:
            inner = [span for span in taken if span.parent and span.parent.span_id == request.context.span_id]
            assert sorted(span.name for span in inner) == ["decode", "prefill", "queue"]

    serving(scenario, step_seconds=0.005)


def test_off_there_are_no_spans_whatever_else_is_set_up_in_the_process():
    """FastAPI would make some by itself, for a provider of the whole process."""
    assert not EngineConfig(model="demo").server.tracing
    code = """
import sys
from tests.harness.asgi import Client, serving
assert "opentelemetry.sdk" not in sys.modules, "imported though it is off"
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
async def scenario(client):
    assert (await client.complete(prompt="a", max_tokens=1)).status == 200
    await client.complete(prompt="a", wrong=1)
serving(scenario)
assert not exporter.get_finished_spans()
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FASTAPI_OTEL_AUTO_CONFIGURE": "true"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_without_opentelemetry_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ValueError, match=r"server.tracing: .* is missing: pip install 'hybridserve\[otel\]'"):
        Tracing.from_environment()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_TRACES_EXPORTER", "jaeger"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
    ],
)
def test_an_exporter_that_is_not_there_is_refused(monkeypatch, name, value):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"server.tracing: {name} is '{value}'; only "):
        Tracing.from_environment()


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes what is sent to it."""

    received: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.received.append((self.path, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    received: list[tuple[str, bytes]] = []
    handler = type("Handler", (Collector,), {"received": received})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as listener:
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.server_port}", received
        finally:
            listener.shutdown()
            thread.join()


@pytest.mark.slow
def test_a_real_server_sends_its_spans_to_a_collector(monkeypatch, collector):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    url, received = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "jamba-here")
    with server("--server.tracing", "true") as one:
        assert one.post("/v1/completions", {"prompt": SECRET, "max_tokens": 2})[0] == 200
        one.signal(signal.SIGTERM)
        assert one.wait_exit() == 0
    paths, bodies = zip(*received, strict=True)
    assert set(paths) == {"/v1/traces"}
    sent = b"".join(bodies)
    for word in (b"POST /v1/completions", b"prefill", b"jamba-here"):
        assert word in sent
    assert SECRET.encode() not in sent


@pytest.mark.slow
def test_a_collector_that_is_not_there_holds_nobody_up(monkeypatch):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    with server("--server.tracing", "true") as one:
        assert one.post("/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
        one.signal(signal.SIGTERM)
        assert one.wait_exit(60) == 0
        assert "Traceback" not in "\n".join(one.log)
