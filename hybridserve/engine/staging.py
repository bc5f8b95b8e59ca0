"""How a step's arrays reach the device: all of them in one copy.

Knows bytes; does not know what is in them. On a CPU a tensor is the array's own memory, and nothing is
copied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from hybridserve.engine.device_queue import DeviceQueue, Mark

Put = Callable[[np.ndarray], torch.Tensor]
"""Gives an array's place on the device."""

ALIGNMENT = 16
"""Bytes: kernels are compiled for addresses that are multiples of it."""

INITIAL_BYTES = 1 << 20
"""A decode step of 256 sequences of 8,192 tokens takes half of it."""


class Staging(ABC):
    """`begin`, any number of `put`, `flush`; more of both, if need be. What a step has put is there until the
    next one but one begins."""

    @abstractmethod
    def begin(self) -> None:
        """A step begins."""

    @abstractmethod
    def put(self, array: np.ndarray) -> torch.Tensor:
        """A tensor of the array's shape and dtype, which holds its content for all that is queued after the
        next `flush`."""

    @abstractmethod
    def flush(self) -> None:
        """Queue the copy of what was put."""

    def send(self, array: np.ndarray) -> torch.Tensor:
        """Put and flush: for what was not known before."""
        tensor = self.put(array)
        self.flush()
        return tensor


class NoStaging(Staging):
    """Where device and host are one."""

    def begin(self) -> None:
        return

    def put(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array)

    def flush(self) -> None:
        return


@dataclass(slots=True)
class _Half:
    host: torch.Tensor  # [n] uint8, pinned
    device: torch.Tensor  # [n] uint8
    array: np.ndarray  # the host's
    used: int = 0
    sent: int = 0
    done: Mark | None = None
    """When the device has read what was sent of `host`."""


class PinnedStaging(Staging):
    """Two buffers of pinned memory and two of the device's, used in turns: while one step runs, the next can
    be put. A step that doesn't fit gets larger ones, and they are kept."""

    def __init__(self, queue: DeviceQueue, num_bytes: int = INITIAL_BYTES) -> None:
        self._queue = queue
        self._halves = [self._allocate(num_bytes) for _ in range(2)]
        self._turn = 0

    def begin(self) -> None:
        self._turn = 1 - self._turn
        half = self._halves[self._turn]
        if half.done is not None:
            half.done.wait()
            half.done = None
        half.used = half.sent = 0

    def put(self, array: np.ndarray) -> torch.Tensor:
        half = self._halves[self._turn]
        start = -(-half.used // ALIGNMENT) * ALIGNMENT
        end = start + array.nbytes
        if end > len(half.host):
            self.flush()  # tensors that were handed out keep the buffers that they lie in
            half = self._halves[self._turn] = self._allocate(2 * max(len(half.host), array.nbytes))
            start, end = 0, array.nbytes
        half.used = end
        if not array.size:
            return torch.empty(array.shape, dtype=_dtype(array), device=self._queue.device)
        np.ndarray(array.shape, array.dtype, half.array, start)[...] = array
        return half.device[start:end].view(_dtype(array)).view(array.shape)

    def flush(self) -> None:
        half = self._halves[self._turn]
        if half.sent < half.used:
            half.device[half.sent : half.used].copy_(half.host[half.sent : half.used], non_blocking=True)
            half.sent = half.used
            half.done = self._queue.mark()  # now: whoever puts may fail before the step is complete

    def _allocate(self, num_bytes: int) -> _Half:
        host = self._queue.host_bytes(num_bytes)
        device = torch.empty(num_bytes, dtype=torch.uint8, device=self._queue.device)
        return _Half(host, device, host.numpy())


def _dtype(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype


def staging_for(queue: DeviceQueue) -> Staging:
    return PinnedStaging(queue) if queue.device.type == "cuda" else NoStaging()
