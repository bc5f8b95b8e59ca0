"""A stand-in for CUDA graphs: what is recorded is called again, over the same buffers.

As with those, a result is where it was, whatever a replay is given; and between two replays nobody may count
on it: it is poisoned. Results of all recordings share their memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hybridserve.engine.graphs import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable


class StandInRecorder(Recorder):
    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replays = 0
        self._memory: torch.Tensor | None = None

    def record(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.num_recorded += 1
        first = call()
        if first is None:
            return self._counted(call), None
        if self._memory is None:  # the largest comes first
            self._memory = torch.empty_like(first)
        result = self._memory[: len(first)]

        def replay() -> None:
            assert self._memory is not None
            self._memory.fill_(torch.nan)
            result.copy_(call())

        return self._counted(replay), result

    def _counted(self, call: Callable[[], Any]) -> Callable[[], None]:
        @torch.inference_mode()
        def replay() -> None:
            self.num_replays += 1
            call()

        return replay
