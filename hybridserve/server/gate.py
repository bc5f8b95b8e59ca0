"""What every request passes before any route sees it: names, hosts, origins, keys. Pure ASGI.

Adds to every response the id of its request and what browsers have to know. Knows headers only.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import TYPE_CHECKING, Any

from hybridserve.server import tracing
from hybridserve.server.errors import ApiError, internal_error, report, shown
from hybridserve.server.exchange import NOTES, TENANT, send_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    from hybridserve.server.limits import Receive
    from hybridserve.server.metrics import ServerMetrics
    from hybridserve.server.security import Policy
    from hybridserve.server.sse import Send
    from hybridserve.server.tracing import Tracing

    Scope = MutableMapping[str, Any]
    App = Callable[[Scope, Receive, Send], Awaitable[None]]

logger = logging.getLogger(__name__)

ID_LENGTH = 128
REQUEST_ID = b"x-request-id"


class Gate:
    """In front of an application."""

    def __init__(
        self, app: App, policy: Policy, metrics: ServerMetrics, spans: Tracing | None = None
    ) -> None:
        self._app = app
        self._policy = policy
        self._metrics = metrics
        self._spans = spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] != "http":
            await self._app(scope, receive, send)
        else:
            await self._http(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin = time.monotonic()
        method, path = scope["method"], scope["path"]
        headers = dict(scope["headers"])
        added = [(REQUEST_ID, request_id(headers)), (b"x-content-type-options", b"nosniff")]
        if (origin := self._policy.allowed_origin(headers)) is not None:
            added += [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
        status = 0
        notes: list[str] = []
        scope[NOTES] = notes
        span = None if self._spans is None else self._spans.begin(method, path, headers)
        token = tracing.current.set(span)

        async def named(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *added]
                self._metrics.respond(path, status)
            await send(message)

        try:
            preflight = self._policy.preflight(method, headers)
            if preflight is None:
                scope[TENANT] = self._policy.check(method, path, headers)
                await self._app(scope, receive, named)
            else:
                await named({"type": "http.response.start", "status": 204, "headers": preflight})
                await named({"type": "http.response.body", "body": b""})
        except ApiError as error:
            await send_error(named, error)
        except Exception as error:
            report(error)
            if not status:  # else the connection is closed, for nothing more can be said
                await send_error(named, internal_error())
        finally:
            tracing.current.reset(token)
            if span is not None:
                span.end(status)
            if logger.isEnabledFor(logging.DEBUG):
                said = ", ".join([added[0][1].decode(), *notes])
                logger.debug(
                    "%s %s %d %.3f s %s", method, shown(path), status, time.monotonic() - begin, said
                )


def request_id(headers: MutableMapping[bytes, bytes]) -> bytes:
    """The client's name for its request, made harmless, or a new one. It is for logs alone."""
    given = headers.get(REQUEST_ID)
    if not given:
        return uuid.uuid4().hex.encode()
    return re.sub(rb"[^\x21-\x7e]", b"?", given[:ID_LENGTH])
