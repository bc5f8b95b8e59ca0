"""Reads a request's body: bounded in bytes, time, number of values and depth, and JSON to the letter.

Knows bytes; knows no fields. What it refuses was never made into objects.
"""

from __future__ import annotations

import asyncio
import re
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from hybridserve.server.errors import ApiError, bad_request, shown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping

    Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

BODY_SECONDS = 60.0
"""For the whole body to arrive: at the 16 MiB that it has by default, a slow 2 Mbit/s."""
MAX_VALUES = 1_000_000
"""Commas in one field that is no string: making objects of more would keep everybody else waiting."""
MAX_PARTS = 30_000
"""Strings (names as well), objects and lists in one field: each costs more than a number does, and again when
it is checked."""
MAX_DEPTH = 64
MAX_FIELDS = 256
_PART = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{\[]', re.DOTALL)


class ClientDisconnected(Exception):
    """Nobody is there any more to be answered."""


async def read_body(receive: Receive, headers: Mapping[bytes, bytes], limit: int) -> bytes:
    """The body, of at most `limit` bytes. Raises ApiError 400, 408, 413 or 415, and ClientDisconnected."""
    if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        raise ApiError(415, "a body can't be compressed", code="unsupported_encoding")
    declared = headers.get(b"content-length")
    if declared is not None and (not declared.isdigit() or int(declared) > limit):
        raise _too_large(limit)
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise ClientDisconnected
                pieces.append(message.get("body", b""))
                size += len(pieces[-1])
                if size > limit:
                    raise _too_large(limit)
                if not message.get("more_body", False):
                    return b"".join(pieces)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:.0f} seconds") from None


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than server.limits.body_bytes ({limit})", code="body_too_large")


def parse_object(body: bytes) -> dict[str, Any]:
    """The fields of a JSON object. Raises ApiError 400 for what is not JSON (NaN, half a surrogate pair and
    numbers beyond a float are not), and 413 for too many values."""
    try:
        raw = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError) as error:
        raise _not_json(error) from None
    if len(raw) > MAX_FIELDS:
        raise bad_request(None, f"the body has more than {MAX_FIELDS} fields")
    return {name: _value(name, bytes(value)) for name, value in raw.items()}


def _value(name: str, raw: bytes) -> Any:
    if not raw.lstrip().startswith(b'"') and raw.count(b",") >= MAX_VALUES:
        raise ApiError(
            413,
            f"{shown(name)}: holds more than {MAX_VALUES} values",
            param=shown(name),
            code="body_too_large",
        )
    if _has_many_parts(raw):
        raise ApiError(
            413,
            f"{shown(name)}: holds more than {MAX_PARTS} strings, objects and lists",
            param=shown(name),
            code="body_too_large",
        )
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _not_json(error) from None
    if _is_deep(value):
        raise bad_request(shown(name), f"is nested more than {MAX_DEPTH} levels deep")
    return value


def _has_many_parts(raw: bytes) -> bool:
    """Looks closely only where there may be: quotes and brackets are part of texts, too."""
    if raw.count(b'"') // 2 + raw.count(b"{") + raw.count(b"[") <= MAX_PARTS:
        return False
    return next(islice(_PART.finditer(raw), MAX_PARTS, None), None) is not None


def _not_json(error: Exception) -> ApiError:
    if isinstance(error, RecursionError):
        return bad_request(None, "the body is nested too deep", "invalid_json")
    if isinstance(error, msgspec.ValidationError):
        return bad_request(
            None, "the body must be a JSON object, with numbers that a float can hold", "invalid_json"
        )
    return bad_request(
        None, "the body is not valid JSON in UTF-8 (nor are NaN and half of a surrogate pair)", "invalid_json"
    )


def _is_deep(value: Any) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer) if isinstance(inner, dict | list)]
        if not level:
            return False
    return True


def _inside(value: dict[str, Any] | list[Any]) -> Iterator[Any]:
    return iter(value.values() if isinstance(value, dict) else value)
