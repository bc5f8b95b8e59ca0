"""Writes responses straight to the ASGI server: JSON whole, or server-sent events.

Knows bytes; knows no engine. On the hot path: one write for all that a step adds to a stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, MutableMapping

    from hybridserve.server.errors import ApiError

    Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
    Headers = Iterable[tuple[bytes, bytes]]

DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not collect it
]


async def send_json(send: Send, status: int, content: msgspec.Struct | bytes, headers: Headers = ()) -> None:
    """A response; `content` may be JSON already."""
    body = content if isinstance(content, bytes) else msgspec.json.encode(content)
    all_headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


class EventStream:
    """Events, each one line of JSON; the last one is [DONE], after an error too."""

    def __init__(self, send: Send, headers: Headers = ()) -> None:
        self._send = send
        self._headers = [*_STREAM_HEADERS, *headers]
        self._encoder = msgspec.json.Encoder()
        self.has_started = False

    async def start(self) -> None:
        """From now on, the status is 200."""
        self.has_started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})

    async def send(self, events: Iterable[msgspec.Struct]) -> None:
        """All at once; without events, nothing happens."""
        if data := self._encoded(events):
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, events: Iterable[msgspec.Struct] = ()) -> None:
        body = self._encoded(events) + DONE
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def fail(self, error: ApiError) -> None:
        body = b"data: " + error.body + b"\n\n" + DONE
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _encoded(self, events: Iterable[msgspec.Struct]) -> bytes:
        encode = self._encoder.encode
        return b"".join([b"data: %b\n\n" % encode(event) for event in events])
