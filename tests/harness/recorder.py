"""A stand-in for CUDA graphs: what is recorded is called again, over the same buffers.

As with those, a result is where it was, whatever a replay is given; and between two replays nobody may count
on it: it is poisoned. Results of all recordings share their memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from hybridserve.engine.graphs import Recorder
from hybridserve.kernels import attention
from hybridserve.kernels.attention.reference import Reference
from tests.harness.engine import Guarded

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hybridserve.engine.graphs import DecodeGraphs
    from hybridserve.kernels.attention.interface import AttentionBackend, AttentionMetadata


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


class Bounded(Reference):
    """Attention that reads lengths where they are when it runs, and sees to it that none is longer than what
    was recorded: a GPU would have launched nothing for the rest."""

    def forward(self, *arguments: Any, **options: Any) -> torch.Tensor:
        metadata: AttentionMetadata = arguments[4]
        if metadata.query_lens and max(metadata.query_lens) == 1:
            assert int(metadata.seq_lens.max()) <= max(metadata.context_lens) + 1, "longer than was recorded"
        return super().forward(*arguments, **options)


class GraphGuarded(Guarded):
    """A guarded engine whose decode steps are recorded and replayed, over backends that may be."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.recorder = StandInRecorder()
        kernels = {f"kernels.{op}": "reference" for op in ("attention", "ssm")}
        super().__init__(path, recorder=self.recorder, **{"max_num_seqs": 8, **kernels, **options})

    @property
    def graphs(self) -> DecodeGraphs:
        graphs = self.executor.runner.graphs
        assert graphs is not None
        return graphs


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BACKENDS", tuple(_bounded(each) for each in attention.BACKENDS))


def _bounded(backend: type[AttentionBackend]) -> type[AttentionBackend]:
    return Bounded if backend is Reference else backend
