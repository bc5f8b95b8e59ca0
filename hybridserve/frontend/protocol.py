"""What passes between an engine's process and its client: msgpack in frames over a socket pair.

Knows messages and bytes; does not know who sends them or why. A frame is MAGIC, the length of the payload
(4 bytes, little endian) and the payload, one message.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from pathlib import Path
from typing import Any

import msgspec

from hybridserve.engine.messages import EngineRequest, SequenceOutput

MAGIC = b"hsv1"
MAX_FRAME_BYTES = 1 << 30
READ_BYTES = 1 << 20
_HEADER = struct.Struct("<4sI")


class ProtocolError(RuntimeError):
    """What came is not a message; the connection is of no more use."""


class PeerGone(ConnectionError):
    """The other end is closed: its process has ended, or has hung up."""


class _Message(msgspec.Struct, array_like=True, tag=True):
    pass


# ---- to the engine


class Start(_Message):
    """The first message. `beat_seconds` is the time between two `Beat`s."""

    config: str  # JSON
    model_path: str
    beat_seconds: float


class Add(_Message):
    """Answered in an `Admitted`."""

    request: EngineRequest


class Abort(_Message):
    """One continuation of a request, or all of them. An unknown one is left alone."""

    request_id: str
    index: int | None = None


class LoadAdapter(_Message):
    call_id: int
    name: str
    path: str


class UnloadAdapter(_Message):
    call_id: int
    name: str


class PinAdapter(_Message):
    call_id: int
    name: str


class UnpinAdapter(_Message):
    call_id: int
    name: str


class ListAdapters(_Message):
    call_id: int


class GetStats(_Message):
    call_id: int


class GetView(_Message):
    call_id: int


class Close(_Message):
    """The last message."""


Call = LoadAdapter | UnloadAdapter | PinAdapter | UnpinAdapter | ListAdapters | GetStats | GetView
"""Each is answered by a `Result` or a `CallFailed`, not always in order."""

ToEngine = Start | Add | Abort | Call | Close


# ---- from the engine


class Phase(_Message):
    """A part of starting up begins (`seconds` None) or has passed."""

    name: str
    seconds: float | None = None


class Ready(_Message):
    """The engine takes requests. `plan` is `EnginePlan.to_dict`, `table` the same to be read."""

    plan: dict[str, Any]
    table: str
    max_model_len: int
    vocab_size: int


class Beat(_Message):
    """The process lives. `step_seconds` is how long its loop has been in the same step, `stalled_seconds` how
    long without any sign of getting on."""

    step_seconds: float
    stalled_seconds: float


class Admitted(_Message):
    """What became of `Add`s: the ids of those that are queued, and why others can't be (ValueError)."""

    accepted: list[str]
    refused: list[tuple[str, str]]


class Outputs(_Message):
    """Of one step."""

    outputs: list[SequenceOutput]


class Result(_Message):
    call_id: int
    value: msgspec.Raw


class CallFailed(_Message):
    """`is_value_error`: it was the caller's mistake."""

    call_id: int
    reason: str
    is_value_error: bool


class Failed(_Message):
    """The last message of an engine that can't go on: the whole reason, root cause last. `is_value_error`:
    the configuration, or what it names, is to blame."""

    reason: str
    details: str  # traceback
    is_value_error: bool


FromEngine = Phase | Ready | Beat | Admitted | Outputs | Result | CallFailed | Failed


# ---- bytes


def _to_plain(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} can't be sent")


def _from_plain(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(f"{kind.__name__} can't be received")


def encode(message: object) -> bytes:
    """ValueError for text or a number that can't be sent, ProtocolError for what is too large."""
    try:
        payload = msgspec.msgpack.encode(message, enc_hook=_to_plain)
    except (UnicodeEncodeError, OverflowError) as error:
        raise ValueError(f"can't be sent to the engine: {error}") from None
    if len(payload) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a {type(message).__name__} of {len(payload):,} bytes is too large to be sent")
    return payload


def decode(payload: bytes | msgspec.Raw, kind: Any) -> Any:
    """A message, or another value, of type `kind` (a union, perhaps). ProtocolError for anything else."""
    try:
        return msgspec.msgpack.decode(payload, type=kind, dec_hook=_from_plain)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"what came is not a message: {error}") from None


class Channel:
    """One end of a socket pair. Any thread may send; one receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        self._received = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, payload: bytes) -> None:
        """Send what `encode` has made. Blocks while the peer doesn't read. PeerGone."""
        with self._sending:
            try:
                self._socket.sendall(_HEADER.pack(MAGIC, len(payload)) + payload)
            except OSError as error:
                raise PeerGone from error

    def receive(self) -> list[bytes]:
        """Wait for bytes; returns the payloads that are complete now, if any. PeerGone; ProtocolError
        for what no peer of ours sends."""
        try:
            piece = self._socket.recv(READ_BYTES)
        except OSError:
            piece = b""
        if not piece:
            raise PeerGone
        self._received += piece
        payloads, start = [], 0
        while len(self._received) - start >= _HEADER.size:
            magic, length = _HEADER.unpack_from(self._received, start)
            if magic != MAGIC or length > MAX_FRAME_BYTES:
                raise ProtocolError("what came is not a frame")
            end = start + _HEADER.size + length
            if len(self._received) < end:
                break
            payloads.append(bytes(self._received[start + _HEADER.size : end]))
            start = end
        del self._received[:start]
        return payloads

    def hang_up(self) -> None:
        """The peer, and whoever waits in `receive` or `send` here, sees the end. Any thread may call it."""
        with contextlib.suppress(OSError):  # the peer has gone already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """For the thread that receives."""
        self.hang_up()
        self._socket.close()
