"""uvicorn's HTTP/1.1 protocol with bounds in front of the application: on headers (bytes, and the time until
they are complete) and on how finely a body is cut. Knows bytes on a connection; knows no routes.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from hybridserve.server.errors import ApiError

HEADER_SECONDS = 20.0
"""From the first byte of a request, or from connecting, until its headers are complete."""
FAREWELL_SECONDS = 5.0
DISCARDED_BODIES = 4
"""A client that is told that its body is too large may go on sending: so many times the limit, which is read
and dropped."""
FREE_CHUNKS = 1024
MIN_CHUNK_BYTES = 64
"""Average of a body's chunks beyond the first FREE_CHUNKS: each costs time, whatever it holds."""


class _Connection(h11.Connection):
    """Refuses, as a mistake in the protocol, what is out of bounds."""

    def __init__(self, header_bytes: int, body_bytes: int) -> None:
        super().__init__(h11.SERVER, header_bytes)
        self._header_bytes = header_bytes
        self._body_bytes = body_bytes
        self._num_chunks = 0
        self._num_bytes = 0
        self.refusal: ApiError | None = None

    def next_event(self) -> Any:
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == 431:
                self.refusal = self._headers_too_large()
            raise
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
            size = len(event.target) + sum(len(name) + len(value) + 4 for name, value in event.headers)
            if size > self._header_bytes:  # complete in one piece, which h11 lets through
                self._refuse(self._headers_too_large())
            names = {name for name, _ in event.headers}
            if {b"content-length", b"transfer-encoding"} <= names:  # a proxy before this may see another end
                self._refuse(ApiError(400, "Content-Length and Transfer-Encoding contradict each other"))
        elif isinstance(event, h11.Data):
            self._num_chunks += 1
            self._num_bytes += len(event.data)
            if self._num_bytes > DISCARDED_BODIES * self._body_bytes:
                self._refuse(ApiError(413, "the body goes on after it was refused"))
            if self._num_chunks > FREE_CHUNKS and self._num_bytes < MIN_CHUNK_BYTES * self._num_chunks:
                self._refuse(ApiError(413, "the body comes in too many small chunks"))
        return event

    def _headers_too_large(self) -> ApiError:
        return ApiError(
            431,
            f"the headers are larger than server.limits.header_bytes ({self._header_bytes})",
            code="headers_too_large",
        )

    def _refuse(self, refusal: ApiError) -> None:
        self.refusal = refusal
        raise h11.RemoteProtocolError(str(refusal), error_status_hint=refusal.status)


class _Farewell(asyncio.Protocol):
    """Reads and drops what a client still sends: a connection that is closed with something unread takes the
    answer with it that the client should see."""

    def __init__(self, protocol: H11Protocol) -> None:
        transport = protocol.transport
        protocol.connections.discard(protocol)
        transport.set_protocol(self)
        transport.resume_reading()
        if transport.can_write_eof():
            transport.write_eof()
        self._timer = protocol.loop.call_later(FAREWELL_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()


class _Transport:
    """A connection as a response sees it: closing one whose request is still coming is a `_Farewell`."""

    def __init__(self, protocol: H11Protocol) -> None:
        self._protocol = protocol
        self.write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing

    def close(self) -> None:
        if self._protocol.conn.their_state is h11.SEND_BODY:
            _Farewell(self._protocol)
        else:
            self._protocol.transport.close()


def bounded_protocol(header_bytes: int, body_bytes: int) -> type[H11Protocol]:
    """The protocol of a server with these limits."""

    class BoundedH11Protocol(H11Protocol):
        _header_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.conn = _Connection(header_bytes, body_bytes)
            self._watch_headers()

        def data_received(self, data: bytes) -> None:
            before = self.cycle
            super().data_received(data)
            if self.cycle is not before:  # a request has begun; what answers it has not
                self.cycle.transport = _Transport(self)  # type: ignore[assignment]
            self._watch_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_watching()
            super().connection_lost(exc)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch_headers()

        def _watch_headers(self) -> None:
            """The timer runs while headers are awaited: of the first request, or of one that has begun."""
            is_waiting = self.conn.their_state is h11.IDLE
            has_begun = self.cycle is None or bool(self.conn.trailing_data[0])
            if not is_waiting or not has_begun:
                self._stop_watching()
            elif self._header_timer is None:
                self._header_timer = self.loop.call_later(HEADER_SECONDS, self._give_up)

        def _stop_watching(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def _give_up(self) -> None:
            self._header_timer = None
            if not self.transport.is_closing():
                self._answer(ApiError(408, f"the headers did not arrive within {HEADER_SECONDS:.0f} seconds"))

        def send_400_response(self, msg: str) -> None:
            refusal = self.conn.refusal if isinstance(self.conn, _Connection) else None
            self._answer(refusal or ApiError(400, "this is not valid HTTP/1.1"))

        def _answer(self, error: ApiError) -> None:
            """Outside of any request's cycle, and the connection's last words."""
            self._stop_watching()
            if self.cycle is not None and not self.cycle.response_complete:
                self.cycle.disconnected = True  # for whoever still waits for the rest of a body
                self.cycle.message_event.set()
            if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE) or (
                self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
            ):
                self.transport.close()
                return
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            for event in (
                h11.Response(status_code=error.status, headers=headers, reason=b""),
                h11.Data(data=error.body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
            _Farewell(self)

    return BoundedH11Protocol
