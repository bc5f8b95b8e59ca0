"""A stand-in for CUDA graphs: what is recorded is called again, over the same buffers.

Between two replays nobody may count on what the last one left: it is poisoned.
"""

from __future__ import annotations

import weakref
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
        self.poisoned: torch.Tensor | None = None
        """What recordings write: NaN before each replay."""

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1
        call()
        recorded = weakref.ref(call)

        @torch.inference_mode()
        def replay() -> None:
            self.num_replays += 1
            if self.poisoned is not None:
                self.poisoned.fill_(torch.nan)
            again = recorded()
            assert again is not None, "a recording reads tensors that nobody keeps"
            again()

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
        self.recorder.poisoned = self.graphs.logits

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
