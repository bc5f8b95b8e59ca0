"""How long the device takes for a call, without the host's share. Knows no operator.

A call is captured as a CUDA graph, so that launching it costs the host nothing while it is timed, and before
each replay the cache is filled with something else: what is measured has its weights and states in memory, as
a layer of a model finds them.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

REPEATS = 20

FLUSH_BYTES = 256 * 2**20
"""More than any GPU's cache."""


class Clock:
    """Times calls on one device; on a CPU as they come, which is only good to see that they run."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        size = FLUSH_BYTES if device == "cuda" else 1024
        self._flush = torch.empty(size, dtype=torch.int8, device=device)

    def captured(self, call: Callable[[], object]) -> float:
        """Seconds of the device, median. RuntimeError if the call can't be captured, as one that waits for
        the device can't."""
        if self.device.type != "cuda":
            return self.eager(call)
        call()  # compiles, and makes what is made once
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graph.replay()
        return self._elapsed(graph.replay)

    def eager(self, call: Callable[[], object]) -> float:
        """Seconds of calls one after another, as the host can launch them."""
        repeats = 1
        if self.device.type == "cuda":
            call()
            repeats = REPEATS
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / repeats

    def _elapsed(self, call: Callable[[], object]) -> float:
        pairs = []
        for _ in range(REPEATS):
            self._flush.zero_()
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            call()
            pair[1].record()
            pairs.append(pair)
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1000
