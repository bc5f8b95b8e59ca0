"""One HTTP request and its response, between the router and a route. Knows bodies and errors; no engine."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request  # noqa: TC002 - FastAPI looks for it in the annotations
from starlette.responses import Response

from hybridserve.server.errors import ApiError, internal_error, report
from hybridserve.server.fields import HARMLESS, read_fields
from hybridserve.server.limits import ClientDisconnected, parse_object, read_body
from hybridserve.server.sse import send_json
from hybridserve.server.tenants import NOBODY

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    import msgspec

    from hybridserve.server.limits import Receive
    from hybridserve.server.service import Service
    from hybridserve.server.sse import Send

    Endpoint = Callable[[Service, "Exchange"], Awaitable[None]]

logger = logging.getLogger(__name__)

Body = TypeVar("Body", bound=BaseModel)

LARGE_BODY = 64 * 1024
"""Bytes from which a body is read in a worker thread: a smaller one takes less time than that takes."""
IGNORED_HEADER = b"x-hybridserve-ignored-fields"
UNKNOWN = "(unknown)"
"""In the metrics, every field that nobody knows."""
TENANT = "hybridserve.tenant"
"""In a request's scope: who asks, as `security` knows them."""
NOTES = "hybridserve.notes"
"""What the log's line about a request says besides: numbers alone."""
MAX_UNKNOWN = 16
"""Of them, the names that a response's header has."""


@dataclass(slots=True)
class Exchange:
    """`response_headers` go with a response of any status. `named` is what the path names, where it does."""

    service: Service
    headers: dict[bytes, bytes]
    receive: Receive
    send: Send
    response_headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    named: str = ""
    tenant: str = NOBODY
    notes: list[str] = field(default_factory=list)
    """For the log's line about it."""
    _ignored: list[str] = field(default_factory=list)

    async def read(self, model: type[Body]) -> Body:
        """The body. Raises ApiError, and ClientDisconnected."""
        limit = self.service.config.limits.body_bytes
        body = await read_body(self.receive, self.headers, limit)
        refuses = self.service.config.unknown_fields == "refuse"
        if len(body) < LARGE_BODY:
            request, ignored = _parse(model, body, refuses)
        else:
            request, ignored = await self.service.engine.in_worker(_parse, model, body, refuses)
        self.ignore([name for name in ignored if name in HARMLESS])
        self._tell_unknown([name for name in ignored if name not in HARMLESS])
        return request

    def _tell_unknown(self, names: list[str]) -> None:
        """There may be many, and a client may make them up."""
        if names:
            self.service.metrics.ignore([UNKNOWN] * len(names))
            self.service.warn_unknown_fields(names)
            self._tell([*names[:MAX_UNKNOWN], *(["..."] if len(names) > MAX_UNKNOWN else [])])

    def ignore(self, names: list[str]) -> None:
        """Tell the client, and count, that these fields have no effect."""
        if names:
            self.service.metrics.ignore(names)
            self._tell(sorted(names))

    def _tell(self, names: list[str]) -> None:
        self._ignored += names
        others = [each for each in self.response_headers if each[0] != IGNORED_HEADER]
        self.response_headers[:] = [*others, (IGNORED_HEADER, ", ".join(self._ignored).encode())]

    async def reply(self, content: msgspec.Struct, status: int = 200) -> None:
        await send_json(self.send, status, content, self.response_headers)


def _parse(model: type[Body], body: bytes, refuses_unknown: bool) -> tuple[Body, list[str]]:
    return read_fields(model, parse_object(body), refuse_unknown=refuses_unknown)


class EndpointResponse(Response):
    """Lets a route of FastAPI write its response itself."""

    def __init__(self, service: Service, endpoint: Endpoint) -> None:
        super().__init__()
        self._service = service
        self._endpoint = endpoint

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        has_started = False

        async def watched(message: MutableMapping[str, Any]) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        named = scope.get("path_params", {}).get("id", "")
        exchange = Exchange(
            self._service,
            dict(scope["headers"]),
            receive,
            watched,
            named=named,
            tenant=scope[TENANT],
            notes=scope[NOTES],
        )
        try:
            await self._endpoint(self._service, exchange)
        except ClientDisconnected:
            logger.debug("the client left")
        except ApiError as error:
            await send_error(send, error, exchange.response_headers)
        except Exception as error:
            report(error)
            if not has_started:  # else the connection is closed, for nothing more can be said
                await send_error(send, internal_error(), exchange.response_headers)


async def send_error(send: Send, error: ApiError, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    own = [(name.encode(), value.encode()) for name, value in error.headers.items()]
    await send_json(send, error.status, error.body, [*own, *(headers or [])])


def endpoint_route(service: Service, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """What FastAPI is to call for a route."""

    async def route(request: Request) -> Response:
        return EndpointResponse(service, endpoint)

    route.__name__ = getattr(endpoint, "__name__", "route")
    route.__doc__ = endpoint.__doc__
    return route
