"""What rank 0 tells the others, in order, over one process group; and what the sampling rank answers.

Knows bytes and counts; what is in a step is `engine.wire`'s.
"""

from __future__ import annotations

import enum
import struct
from typing import TYPE_CHECKING, NamedTuple

import torch

from hybridserve.distributed.failure import RankDisagreement
from hybridserve.distributed.process_group import wait_for

if TYPE_CHECKING:
    from hybridserve.distributed.process_group import ProcessGroup

_HEADER = struct.Struct("<4sIQQ")  # magic, kind, number, bytes; a multiple of 8, so that columns are aligned
_MAGIC = b"HSCM"
_GRAIN = 4096
MAX_ROOM = 1 << 17
"""Bytes that travel with the header, at most; what is larger follows in a broadcast of its own."""
ANSWER_TAG = 1


class Kind(enum.IntEnum):
    CLOSE = 0
    STEP = 1
    PLACE = 2
    CLEAR = 3
    FORGET = 4
    FINISH = 5


class Message(NamedTuple):
    kind: Kind
    payload: memoryview
    """Writable, and the receiver's alone."""


class Channel:
    """One end. `rank` 0 sends and all others receive; one thread uses it.

    A message travels in one broadcast if it isn't much longer than the step before: both ends derive the room
    from what has gone by.
    """

    def __init__(self, group: ProcessGroup, rank: int) -> None:
        self._group = group
        self._rank = rank
        self._number = 0
        self._room = _GRAIN
        self.num_bytes = 0
        """Of all broadcasts, headers and room included."""

    def send(self, kind: Kind, payload: bytes | bytearray = b"") -> None:
        """Returns when this rank's part is done, not when everybody has read it."""
        size = len(payload)
        frame = bytearray(_HEADER.size + self._room)
        _HEADER.pack_into(frame, 0, _MAGIC, kind, self._number, size)
        fits = size <= self._room
        if fits:
            frame[_HEADER.size : _HEADER.size + size] = payload
        self._broadcast(frame)
        if not fits:
            self._broadcast(bytearray(payload))
        self._count(kind, size)

    def receive(self) -> Message:
        """Waits for as long as rank 0 is there. RankDisagreement if a message is missing or is none."""
        frame = bytearray(_HEADER.size + self._room)
        self._broadcast(frame)
        magic, kind, number, size = _HEADER.unpack_from(frame)
        if magic != _MAGIC or kind not in set(Kind):
            raise RankDisagreement(f"expected message {self._number} of rank 0, got something else")
        if number != self._number:
            raise RankDisagreement(f"expected message {self._number} of rank 0, got message {number}")
        if size <= self._room:
            payload = memoryview(frame)[_HEADER.size : _HEADER.size + size]
        else:
            longer = bytearray(size)
            self._broadcast(longer)
            payload = memoryview(longer)
        self._count(kind, size)
        return Message(Kind(kind), payload)

    def answer(self, payload: bytearray) -> None:
        """To rank 0, which expects it."""
        size = torch.tensor([len(payload)])
        wait_for(self._group.send, [size], 0, ANSWER_TAG)
        wait_for(self._group.send, [torch.frombuffer(payload, dtype=torch.uint8)], 0, ANSWER_TAG)

    def receive_answer(self, rank: int) -> memoryview:
        size = torch.zeros(1, dtype=torch.int64)
        wait_for(self._group.recv, [size], rank, ANSWER_TAG)
        payload = bytearray(int(size))
        wait_for(self._group.recv, [torch.frombuffer(payload, dtype=torch.uint8)], rank, ANSWER_TAG)
        return memoryview(payload)

    def _broadcast(self, buffer: bytearray) -> None:
        self.num_bytes += len(buffer)
        wait_for(self._group.broadcast, torch.frombuffer(buffer, dtype=torch.uint8), 0)

    def _count(self, kind: int, size: int) -> None:
        self._number += 1
        if kind == Kind.STEP:
            self._room = min(max(-(-(size + size // 8) // _GRAIN), 1) * _GRAIN, MAX_ROOM)
