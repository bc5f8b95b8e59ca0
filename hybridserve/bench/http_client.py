"""HTTP/1.1 as a measurement needs it: what one read of a connection brings is one block, at once.

Libraries hand on a server's chunks one by one, which hides that several came together, and spend a multiple
of the time on each. Knows connections and messages; not what they say. No proxies, no redirects.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

CONNECT_SECONDS = 10.0
BLOCK_BYTES = 2**18
MAX_LINE = 2**12


class HttpFailure(Exception):
    """A connection or a message that is broken, and how, in few words."""


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    blocks: AsyncIterator[bytes]
    """The body, read by read."""

    async def read(self) -> bytes:
        """All of the body that has not been taken."""
        return b"".join([block async for block in self.blocks])


class HttpClient:
    """Keeps connections for the next request. `headers` go with each."""

    def __init__(self, host: str, port: int, *, is_secure: bool, headers: Mapping[str, str]) -> None:
        self._host, self._port = host, port
        self._tls = ssl.create_default_context() if is_secure else None
        default_port = 443 if is_secure else 80
        name = f"[{host}]" if ":" in host else host
        self._headers = {"host": name if port == default_port else f"{name}:{port}", **headers}
        self._idle: list[_Connection] = []

    def close(self) -> None:
        """End the connections that no request uses."""
        while self._idle:
            self._idle.pop().close()

    @contextlib.asynccontextmanager
    async def request(self, method: str, path: str, body: bytes = b"") -> AsyncIterator[Response]:
        """Send it; yields when the head of the response is there. Whoever leaves before the end of the body
        hangs up. Raises HttpFailure, also out of the blocks."""
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in self._headers.items())]
        lines += [f"content-length: {len(body)}"] if body else []
        message = "\r\n".join([*lines, "", ""]).encode() + body
        connection = self._idle.pop() if self._idle else None
        try:
            if connection is not None and not await connection.send(message):
                connection.close()  # by the other end, while nobody used it
                connection = None
            if connection is None:
                connection = await self._connect()
                if not await connection.send(message):
                    raise HttpFailure("it hung up without an answer")
            yield Response(connection.status, connection.headers, connection.blocks())
        finally:
            if connection is not None and connection.is_reusable:
                self._idle.append(connection)
            elif connection is not None:
                connection.close()

    async def _connect(self) -> _Connection:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return _Connection(*await asyncio.open_connection(self._host, self._port, ssl=self._tls))
        except TimeoutError:
            raise HttpFailure(f"no connection in {CONNECT_SECONDS:g} s") from None
        except OSError as error:
            raise HttpFailure(_reason(error)) from None


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_reusable = False

    def close(self) -> None:
        self._writer.transport.abort()

    async def send(self, message: bytes) -> bool:
        """False where the other end hung up before it said anything."""
        self.is_reusable = False
        try:
            self._writer.write(message)
            await self._writer.drain()
            head = await self._reader.readuntil(b"\r\n\r\n")
            while head.split(maxsplit=2)[1].startswith(b"1"):  # more will come
                head = await self._reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise HttpFailure("it hung up within the head of its answer") from None
            return False
        except ConnectionError:
            return False
        except OSError as error:
            raise HttpFailure(_reason(error)) from None
        except (asyncio.LimitOverrunError, IndexError):
            raise HttpFailure("its answer is no HTTP") from None
        self._read_head(head)
        return True

    def _read_head(self, head: bytes) -> None:
        try:
            first, *lines = head.decode("latin-1").splitlines()
            version, status = first.split()[:2]
            self.status = int(status)
        except ValueError:
            raise HttpFailure("its answer is no HTTP") from None
        if not version.startswith("HTTP/1."):
            raise HttpFailure("its answer is no HTTP")
        pairs = (line.partition(":") for line in lines)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}

    async def blocks(self) -> AsyncIterator[bytes]:
        """The body of the answer whose head `send` has read."""
        is_chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        length = self.headers.get("content-length", "")
        if not is_chunked and length and not length.isdecimal():
            raise HttpFailure("its answer is no HTTP")
        left = int(length) if length and not is_chunked else None
        chunks = Chunks()
        while not chunks.has_ended and left != 0:
            try:
                data = await self._reader.read(BLOCK_BYTES)
            except OSError as error:
                raise HttpFailure(_reason(error)) from None
            if not data:
                if is_chunked or left is not None:
                    raise HttpFailure("it hung up within its answer")
                return  # where nothing tells the length, the end of the connection does
            if left is not None:
                left -= len(data)
            if block := chunks.feed(data) if is_chunked else data:
                yield block
        self.is_reusable = self.headers.get("connection", "").lower() != "close"


class Chunks:
    """The chunked transfer coding, however it is cut: `feed` takes bytes, returns those of the body."""

    def __init__(self) -> None:
        self.has_ended = False
        self._rest = b""
        self._left = 0
        """Bytes of the current chunk, its line end with it, that have not come."""
        self._in_trailer = False

    def feed(self, data: bytes) -> bytes:
        """Raises HttpFailure for what is no such coding."""
        data = self._rest + data
        self._rest = b""
        body = []
        at = 0
        while not self.has_ended:
            if self._left:
                piece = data[at : at + self._left]
                at += len(piece)
                body.append(piece[: max(0, self._left - 2)])
                self._left -= len(piece)
                if self._left:
                    break
            end = data.find(b"\r\n", at)
            if end < 0:
                self._rest = data[at:]
                if len(self._rest) > MAX_LINE:
                    raise HttpFailure("its answer is no HTTP")
                break
            self._take_line(data[at:end])
            at = end + 2
        return b"".join(body)

    def _take_line(self, line: bytes) -> None:
        """A chunk's size, or what follows the last chunk."""
        if self._in_trailer:
            self.has_ended = not line
            return
        try:
            size = int(line.partition(b";")[0], 16)
        except ValueError:
            raise HttpFailure("its answer is no HTTP") from None
        if size:
            self._left = size + 2
        else:
            self._in_trailer = True


def _reason(error: OSError) -> str:
    """What the system said, not what was made of it."""
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    number = error.errno
    if number is None and (found := re.search(r"\[Errno (\d+)\]", str(error))):  # of several addresses
        number = int(found[1])
    if number is not None and number > 0:  # those of names are negative
        return os.strerror(number)
    return error.strerror or str(error) or type(error).__name__
