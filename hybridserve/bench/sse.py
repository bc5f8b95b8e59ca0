"""Server-sent events out of bytes, however a network cuts them. Knows the format; not what the data mean."""

from __future__ import annotations

MAX_EVENT = 16 * 2**20
"""Bytes; what is larger is no stream of tokens."""


class EventParser:
    """`feed` takes the next bytes and returns the data of each event that they complete.

    Lines end in CR LF, LF or CR. Comments, events without data and fields other than data are left out;
    several data lines are one text of as many lines. An event that is not complete at the end of the stream
    is none (HTML standard, 9.2.6).
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._after_cr = False
        self._is_first = True

    def feed(self, block: bytes) -> list[bytes]:
        """Raises ValueError for an event that is too large."""
        if self._after_cr and block[:1] == b"\n":
            block = block[1:]
        if block:
            self._after_cr = block.endswith(b"\r")
        lines = (self._rest + block).splitlines(keepends=True)
        self._rest = lines.pop() if lines and not lines[-1].endswith((b"\n", b"\r")) else b""
        events: list[bytes] = []
        for line in lines:
            if self._is_first:
                line, self._is_first = line.removeprefix(b"\xef\xbb\xbf"), False
            self._take(line.rstrip(b"\r\n"), events)
        if len(self._rest) + sum(map(len, self._data)) > MAX_EVENT:
            raise ValueError(f"an event of more than {MAX_EVENT} bytes")
        return events

    def _take(self, line: bytes, events: list[bytes]) -> None:
        if not line:
            if self._data:
                events.append(b"\n".join(self._data))
                self._data = []
            return
        name, _, value = line.partition(b":")  # a comment's name is empty
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
