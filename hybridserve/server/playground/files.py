"""The files of the page. They are the same for everybody and say nothing about this server, so they need no
key; what the page then asks for does.

Knows bytes and headers. A browser is told to run, load and connect to nothing but what comes from here, and
to make no markup of text.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from hybridserve.server.exchange import Exchange
    from hybridserve.server.service import Service

_PREFIX = "/playground/"
FILES: Mapping[str, str] = {
    "/": "index.html",
    **{
        _PREFIX + name: name
        for name in (
            "style.css",
            "icon.svg",
            "main.js",
            "api.js",
            "chat.js",
            "settings.js",
            "engine.js",
            "arena.js",
            "charts.js",
            "dom.js",
            "fonts/source-serif-4.woff2",
            "fonts/plex-mono.woff2",
            "vendor/uPlot.iife.min.js",
            "vendor/uPlot.min.css",
        )
    },
}
"""Path -> the file in `static`."""

_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
    ".woff2": b"font/woff2",
}
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "font-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = (
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"cache-control", b"no-cache"),  # ask each time: the answer is most often that nothing changed
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


def sender(name: str) -> Callable[[Service, Exchange], Awaitable[None]]:
    """A route that sends the file of this name in `static`, which is read now."""
    content = files("hybridserve.server.playground").joinpath("static", name).read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'.encode()
    headers = [*_HEADERS, (b"content-type", _TYPES[PurePosixPath(name).suffix]), (b"etag", etag)]

    async def send_file(service: Service, exchange: Exchange) -> None:
        known = etag in exchange.headers.get(b"if-none-match", b"")
        body = b"" if known else content
        length = [] if known else [(b"content-length", str(len(body)).encode())]
        start = {"type": "http.response.start", "status": 304 if known else 200}
        await exchange.send({**start, "headers": [*headers, *length]})
        await exchange.send({"type": "http.response.body", "body": body, "more_body": False})

    return send_file
