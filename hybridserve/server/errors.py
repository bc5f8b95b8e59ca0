"""What a client is told when something is wrong, in the shape that OpenAI's clients parse.

Knows status codes. A message names fields, numbers and limits; it never repeats a prompt. Names that a client
made up are repeated as `shown` has them.
"""

from __future__ import annotations

import logging
import re
import traceback
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

NAME_LENGTH = 64
"""Characters of a client's own words (such as an unknown field's name) that a message repeats, at most."""


class ErrorDetail(msgspec.Struct, frozen=True):
    """What an error is about. `param` is the field, dotted where it is nested."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every response but 2xx, and the last event but one of a stream that failed."""

    error: ErrorDetail


class ApiError(Exception):
    """Ends a request with an error of this status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> bytes:
        detail = ErrorDetail(str(self), _kind(self.status), self.param, self.code)
        return msgspec.json.encode(ErrorBody(detail))


def _kind(status: int) -> str:
    named = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    return named.get(status, "server_error" if status >= 500 else "invalid_request_error")


def bad_request(param: str | None, message: str, code: str | None = None) -> ApiError:
    """`message` is what is wrong with the field `param`."""
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=code)


def unavailable(message: str) -> ApiError:
    """The server can't serve now, and may later."""
    return ApiError(503, message, code="unavailable", headers={"retry-after": "1"})


def internal_error() -> ApiError:
    """A fault of the server; what it was is in its log."""
    return ApiError(500, "something went wrong in the server", code="internal_error")


def of_status(status: int) -> ApiError:
    """Of the router: no such path, or not with this method."""
    return ApiError(status, HTTPStatus(status).phrase.lower())


_FIELD = re.compile(r"([a-z_]+(?:\[\d+\])*(?:\.[a-z_]+)*): (.*)", re.DOTALL)


def from_value_error(error: ValueError, renamed: Mapping[str, str] | None = None) -> ApiError:
    """Of a ValueError that begins with the name of an argument, which clients may know by another name."""
    match = _FIELD.fullmatch(str(error))
    if match is None:
        return ApiError(400, str(error))
    name, message = match[1], match[2]
    if name == "adapter":
        return ApiError(404, f"model: {message}", param="model", code="model_not_found")
    return bad_request((renamed or {}).get(name, name), message)


def shown(name: str) -> str:
    """A client's own word in a message or a log: one line, printable, not long."""
    return ascii(name[:NAME_LENGTH])[1:-1] + ("..." if len(name) > NAME_LENGTH else "")


def report(error: BaseException) -> None:
    """Log a fault of the server: where, and of which kind. What it says may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    where = " < ".join(f"{frame.name} ({frame.filename}:{frame.lineno})" for frame in reversed(frames[-4:]))
    logger.error("%s in %s", type(error).__name__, where)
    logger.debug("in full", exc_info=error)
