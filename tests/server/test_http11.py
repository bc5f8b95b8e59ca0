"""What comes over a socket before any application sees it: headers and bodies without bounds, slow ones,
broken ones; and a client that hangs up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn

from hybridserve.server import http11
from hybridserve.server.app import create_app
from hybridserve.server.http11 import bounded_protocol
from hybridserve.server.service import Service
from tests.harness.fake_engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

HEADERS, BODY = 4096, 65536
PROMPT = {"prompt": [263, 688, 83, 1282], "max_tokens": 2}


class Site:
    """A server with a scripted engine at a port of its own."""

    def __init__(self, engine: FakeEngine, service: Service, port: int) -> None:
        self.engine = engine
        self.service = service
        self.port = port

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def exchange(self, *pieces: bytes, pause: float = 0.0) -> bytes:
        """Everything that comes back until the server hangs up."""
        async with asyncio.timeout(20), self.connect() as (reader, writer):
            reading = asyncio.create_task(reader.read(-1))
            with contextlib.suppress(ConnectionError):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(pause)
            try:
                return await reading
            except ConnectionError:
                return b""


def on_a_socket(scenario: Callable[[Site], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        async with FakeEngine(**options) as engine:
            service = Service(engine, engine.config)
            await service.prepare()
            with socket.create_server(("127.0.0.1", 0)) as listener:
                config = uvicorn.Config(
                    create_app(service),
                    http=bounded_protocol(HEADERS, BODY),
                    ws="none",
                    lifespan="off",
                    log_config=None,
                    access_log=False,
                    h11_max_incomplete_event_size=HEADERS,
                )
                server = uvicorn.Server(config)
                serving = asyncio.create_task(server._serve(sockets=[listener]))
                while not server.started:  # noqa: ASYNC110 - it tells nobody
                    await asyncio.sleep(0.01)
                await scenario(Site(engine, service, listener.getsockname()[1]))
                server.should_exit = True
                await serving

    asyncio.run(run())


def request(body: bytes, *headers: bytes, method: bytes = b"POST", path: bytes = b"/v1/completions") -> bytes:
    lines = [
        method + b" " + path + b" HTTP/1.1",
        b"host: localhost",
        b"content-length: %d" % len(body),
        b"connection: close",
        *headers,
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def status_of(answer: bytes) -> int:
    assert answer.startswith(b"HTTP/1.1 "), answer[:100]
    return int(answer.split()[1])


def test_s020_headers_at_the_limit_and_past_it():
    good = request(json.dumps(PROMPT).encode())
    names = ("/v1/completions", "host", "localhost", "content-length", "46", "connection", "close", "x-pad")
    room = HEADERS - sum(map(len, names)) - 4 * 4  # a header is its name, its value and four bytes

    async def scenario(site: Site) -> None:
        assert status_of(await site.exchange(good)) == 200
        for size, status in [(room, 200), (room + 1, 431), (10 * HEADERS, 431), (2_000_000, 431)]:
            body = json.dumps(PROMPT).encode()
            assert len(b"%d" % len(body)) == 2
            answer = await site.exchange(request(body, b"x-pad: " + b"a" * size))
            assert status_of(answer) == status, size
            if status == 431:
                assert b'"headers_too_large"' in answer
        many = await site.exchange(request(b"{}", *[b"x%d: a" % i for i in range(1000)]))
        assert status_of(many) == 431
        assert status_of(await site.exchange(request(b"", path=b"/" + b"a" * HEADERS, method=b"GET"))) == 431
        endless = await site.exchange(b"GET / HTTP/1.1\r\nx: ", *[b"a" * 1000] * 50)
        assert status_of(endless) == 431

    on_a_socket(scenario)


def test_a_body_with_two_lengths_is_refused():
    """A proxy that believes the other one would take the rest of a body for a request of its own."""
    hidden = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"

    async def scenario(site: Site) -> None:
        for first, second in itertools.permutations(
            [b"content-length: %d" % (len(hidden) + 5), b"transfer-encoding: chunked"]
        ):
            lines = [b"POST /v1/completions HTTP/1.1", b"host: localhost", first, second, b"", b"0", b"", b""]
            answer = await site.exchange(b"\r\n".join(lines) + hidden)
            assert status_of(answer) == 400
            assert answer.count(b"HTTP/1.1 ") == 1
            assert b"Transfer-Encoding" in answer

    on_a_socket(scenario)


def test_head_has_no_body():
    async def scenario(site: Site) -> None:
        for path in (b"/health", b"/v1/models"):
            answer = await site.exchange(request(b"", method=b"HEAD", path=path))
            head, _, body = answer.partition(b"\r\n\r\n")
            assert status_of(answer) == 200
            assert b"content-length: " in head
            assert body == b""

    on_a_socket(scenario)


@pytest.mark.parametrize("first", [b"", b"GET /version HTTP/1.1\r\nhost: x"], ids=["silent", "half"])
def test_s020_headers_that_do_not_come(first, monkeypatch):
    monkeypatch.setattr(http11, "HEADER_SECONDS", 0.3)

    async def scenario(site: Site) -> None:
        answer = await site.exchange(first)
        assert status_of(answer) == 408
        drip = await site.exchange(*[b"GET / HTTP/1.1\r\n", *[b"x: y\r\n"] * 20], pause=0.05)
        assert status_of(drip) == 408

    on_a_socket(scenario)


def test_a_connection_that_is_kept_has_time_between_requests(monkeypatch):
    monkeypatch.setattr(http11, "HEADER_SECONDS", 0.2)
    ask = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"

    async def scenario(site: Site) -> None:
        async with site.connect() as (reader, writer):
            for _ in range(3):
                writer.write(ask)
                assert b"200 OK" in await reader.readuntil(b"}")
                await asyncio.sleep(0.3)
            writer.write(ask[:20])  # a second one that begins and does not go on
            assert b"408" in await reader.read(-1)

    on_a_socket(scenario)


def test_a_stream_may_last_longer_than_headers_may(monkeypatch):
    monkeypatch.setattr(http11, "HEADER_SECONDS", 0.1)

    async def scenario(site: Site) -> None:
        body = json.dumps({**PROMPT, "max_tokens": 40, "stream": True}).encode()
        answer = await site.exchange(request(body))
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")

    on_a_socket(scenario, step_seconds=0.01)


def test_s020_bodies_over_a_socket():
    head = request(b"").partition(b"content-length")[0]
    chunked = head + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"

    async def scenario(site: Site) -> None:
        body = json.dumps(PROMPT).encode()
        pieces = [b"%x\r\n%b\r\n" % (len(body), body), b"0\r\n\r\n"]
        assert status_of(await site.exchange(chunked, *pieces)) == 200
        tiny = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
        assert status_of(await site.exchange(chunked, tiny)) == 200
        many = await site.exchange(chunked, *[b"1\r\nx\r\n" * 1000] * 50)
        assert status_of(many) == 413
        assert b"small chunks" in many
        assert status_of(await site.exchange(request(b"x" * (20 * BODY)))) == 413
        long = await site.exchange(chunked, *[b"%x\r\n%b\r\n" % (BODY, b"x" * BODY)] * 20)
        assert status_of(long) == 413

    on_a_socket(scenario, server={"limits": {"body_bytes": BODY}})


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # no host
        b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nbad header\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    ],
)
def test_what_is_not_http_is_answered_in_json_and_closed(raw):
    async def scenario(site: Site) -> None:
        answer = await site.exchange(raw)
        assert status_of(answer) in (400, 505)
        assert b"application/json" in answer
        assert b'"invalid_request_error"' in answer
        assert status_of(await site.exchange(request(json.dumps(PROMPT).encode()))) == 200

    on_a_socket(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_b009_a_socket_that_is_closed(stream):
    async def scenario(site: Site) -> None:
        body = json.dumps({**PROMPT, "max_tokens": 2000, "stream": stream}).encode()
        async with site.connect() as (reader, writer):
            writer.write(request(body))
            if stream:
                await reader.readuntil(b'"he"')
            while not site.engine.num_in_flight:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        async with asyncio.timeout(5):
            while site.engine.num_in_flight or site.service.num_sequences:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    on_a_socket(scenario, step_seconds=0.01)


def test_a_websocket_is_not_opened():
    async def scenario(site: Site) -> None:
        upgrade = [b"connection: upgrade", b"upgrade: websocket", b"sec-websocket-version: 13"]
        answer = await site.exchange(
            request(b"", *upgrade, b"sec-websocket-key: eA==", method=b"GET", path=b"/version")
        )
        assert status_of(answer) == 200  # as any other request: the upgrade is not taken

    on_a_socket(scenario)
