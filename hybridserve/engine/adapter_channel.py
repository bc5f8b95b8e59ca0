"""Brings adapters from rank 0 to the others, in pieces, and finds out whether every rank could take them.

Knows the tensors of an `Adapter` and how they are shared among its modules. A loader's thread on each rank
uses it, beside steps.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from hybridserve.distributed.process_group import wait_for
from hybridserve.lora.adapter import Adapter, ModuleDelta
from hybridserve.lora.report import LoadReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hybridserve.distributed.process_group import ProcessGroup

PIECE_BYTES = 4 << 20
"""Of a broadcast: so small that steps, which share the network, don't wait for long."""
ALIGNMENT = 16
VERDICT_BYTES = 512
"""Of a rank's reason to refuse an adapter, at most."""
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}


class Delivery(NamedTuple):
    """An adapter, and what rank 0 will call it by."""

    number: int
    adapter: Adapter
    is_trial: bool
    """It is to be checked only."""


class AdapterChannel:
    """One end. Rank 0 delivers and the others receive; then all agree on what came of it."""

    def __init__(self, group: ProcessGroup, size: int) -> None:
        self._group = group
        self._size = size

    def deliver(self, number: int, adapter: Adapter, pause: Callable[[], None], *, is_trial: bool) -> None:
        """To all other ranks. `pause` is called between pieces."""
        tensors = _Tensors()
        header = {
            "number": number,
            "is_trial": is_trial,
            "identity": adapter.identity,
            "path": str(adapter.path),
            "max_rank": adapter.max_rank,
            "invocation_tokens": adapter.invocation_tokens,
            "adapter_bytes": adapter.num_bytes,
            "deltas": {name: tensors.add_all(delta) for name, delta in adapter.deltas.items()},
            "tensors": tensors.places,
            "num_bytes": tensors.num_bytes,
        }
        self._broadcast_bytes(bytearray(msgspec.json.encode(header)))
        for piece in tensors.pieces():
            wait_for(self._group.broadcast, piece, 0)
            pause()

    def close(self) -> None:
        """Rank 0 will deliver no more."""
        self._broadcast_bytes(bytearray())

    def receive(self) -> Delivery | None:
        """Waits for as long as rank 0 is there; None when it has closed."""
        size = torch.zeros(1, dtype=torch.int64)
        wait_for(self._group.broadcast, size, 0)
        if not size:
            return None
        encoded = bytearray(int(size))
        wait_for(self._group.broadcast, torch.frombuffer(encoded, dtype=torch.uint8), 0)
        header = msgspec.json.decode(encoded)
        memory = torch.empty(header["num_bytes"], dtype=torch.uint8)
        for piece in torch.split(memory, PIECE_BYTES) if len(memory) else ():
            wait_for(self._group.broadcast, piece, 0)
        return Delivery(header["number"], _adapter(header, memory), header["is_trial"])

    def agree(self, refusal: str | None) -> str | None:
        """Every rank calls this with its own reason to refuse what was delivered, if it has one; returns the
        first rank's that has one."""
        verdict = (refusal or "").encode()[:VERDICT_BYTES].ljust(VERDICT_BYTES, b"\0")
        mine = torch.frombuffer(bytearray(verdict), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(self._size)]
        wait_for(self._group.allgather, [everyone], [mine])
        for their in everyone:
            if text := bytes(their.tolist()).rstrip(b"\0").decode(errors="replace"):
                return text
        return None

    def _broadcast_bytes(self, payload: bytearray) -> None:
        wait_for(self._group.broadcast, torch.tensor([len(payload)]), 0)
        if payload:
            wait_for(self._group.broadcast, torch.frombuffer(payload, dtype=torch.uint8), 0)


class _Tensors:
    """Tensors laid one after the other, those that several modules share once."""

    def __init__(self) -> None:
        self.places: list[tuple[str, tuple[int, ...], int]] = []
        """(dtype, shape, first byte)"""
        self.num_bytes = 0
        self._tensors: list[torch.Tensor] = []
        self._known: dict[tuple[Any, ...], int] = {}

    def add_all(self, delta: ModuleDelta) -> list[Any]:
        tensors = (delta.A, delta.B, delta.bias, delta.magnitude)
        return [delta.scale, *(None if tensor is None else self._add(tensor) for tensor in tensors)]

    def _add(self, tensor: torch.Tensor) -> int:
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in self._known:
            self._known[key] = len(self.places)
            self.places.append(
                (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), self.num_bytes)
            )
            self._tensors.append(tensor)
            self.num_bytes += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return self._known[key]

    def pieces(self) -> Iterator[torch.Tensor]:
        """All bytes, PIECE_BYTES at a time, in memory that the next piece overwrites."""
        memory = torch.zeros(min(PIECE_BYTES, self.num_bytes), dtype=torch.uint8)
        begin = 0  # of the piece in the making
        for (_, _, start), tensor in zip(self.places, self._tensors, strict=True):
            flat, done = tensor.contiguous().view(-1).view(torch.uint8), 0
            while done < len(flat):
                place = start + done - begin
                if place >= len(memory):
                    yield memory
                    begin += len(memory)
                    continue
                count = min(len(flat) - done, len(memory) - place)
                memory[place : place + count] = flat[done : done + count]
                done += count
        if begin < self.num_bytes:
            yield memory[: self.num_bytes - begin]


def _adapter(header: dict[str, Any], memory: torch.Tensor) -> Adapter:
    tensors = []
    for name, shape, start in header["tensors"]:
        dtype = _DTYPES[name]
        num_bytes = math.prod(shape) * dtype.itemsize
        tensors.append(memory[start : start + num_bytes].view(dtype).view(shape))

    def tensor(index: int | None) -> torch.Tensor | None:
        return None if index is None else tensors[index]

    deltas = {
        name: ModuleDelta(tensors[A], tensors[B], scale, tensor(bias), tensor(magnitude))
        for name, (scale, A, B, bias, magnitude) in header["deltas"].items()
    }
    return Adapter(
        identity=header["identity"],
        path=Path(header["path"]),
        deltas=deltas,
        max_rank=header["max_rank"],
        invocation_tokens=tuple(header["invocation_tokens"]),
        report=LoadReport({}, {}),
        num_bytes=header["adapter_bytes"],
    )
