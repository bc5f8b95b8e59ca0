"""The queue of work of the device that steps run on: when what was put into it is done, and memory of the
host that the device can reach by itself.

Knows a device; does not know what is computed. A CPU has no queue: what is called has run.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

import torch

_cuda: Any = torch.cuda
"""Much of it has no types."""


class Mark(ABC):
    """A place in the queue."""

    @abstractmethod
    def wait(self) -> None:
        """Until all that was queued before it is done."""

    @abstractmethod
    def seconds_since(self, earlier: Mark) -> float:
        """Between two marks of a queue, both of which have been waited for."""


class DeviceQueue(ABC):
    """What runs on it runs in the order in which it was queued."""

    device: torch.device

    @abstractmethod
    def mark(self) -> Mark: ...

    @abstractmethod
    def host_bytes(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8 on the host, which copies to the device and back need not wait for."""

    @abstractmethod
    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its content on the host, to be read once a mark that is set now has been waited for."""


class _Moment(Mark):
    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def wait(self) -> None:
        return

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _Moment)
        return self.seconds - earlier.seconds


class CPUQueue(DeviceQueue):
    device = torch.device("cpu")

    def mark(self) -> Mark:
        return _Moment()

    def host_bytes(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class _Event(Mark):
    def __init__(self, device: torch.device) -> None:
        self.event = _cuda.Event(enable_timing=True)
        self.event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _Event)
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class CUDAQueue(DeviceQueue):
    """The current stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Mark:
        return _Event(self.device)

    def host_bytes(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)


def queue_of(device: torch.device) -> DeviceQueue:
    return CUDAQueue(device) if device.type == "cuda" else CPUQueue()
