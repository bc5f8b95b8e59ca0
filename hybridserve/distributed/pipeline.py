"""A pipeline stage as a model sees it: which layers are its own, and how hidden states come and go. Passed as
an argument, never global (D12)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from hybridserve.distributed.process_group import wait_for

if TYPE_CHECKING:
    from hybridserve.distributed.process_group import Connection


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """One stage of several. This class has nobody to talk to: it is the only stage, or one that is only
    planned."""

    stage: int = 0
    num_stages: int = 1

    @classmethod
    def single(cls) -> PipelineStage:
        return PipelineStage()

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def layers(self, num_layers: int) -> range:
        """This stage's share. ValueError where there are fewer layers than stages."""
        if num_layers < self.num_stages:
            raise ValueError(
                f"parallel.pipeline: {self.num_stages} stages can't share {num_layers} layers: sizes that "
                f"work here: 1 to {num_layers}"
            )
        first, last = (stage * num_layers // self.num_stages for stage in (self.stage, self.stage + 1))
        return range(first, last)

    def send(self, hidden: torch.Tensor) -> None:
        """To the next stage."""
        raise RuntimeError("there is no stage after this one")

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """From the stage before."""
        raise RuntimeError("there is no stage before this one")

    def feed_back(self, x: torch.Tensor) -> torch.Tensor:
        """The last stage's, on the first one, whose own has its shape; elsewhere `x`. All stages call it."""
        return x


@dataclass(slots=True)
class TransferCounters:
    """What one rank has passed on."""

    num_sends: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ProcessGroupStage(PipelineStage):
    """One process of a pipeline of several: connected are, in the order of stages, the ranks that have the
    same place in theirs. Raises PeerLost where another one is gone or too late."""

    connection: Connection | None = None
    counters: TransferCounters = field(default_factory=TransferCounters)

    def send(self, hidden: torch.Tensor) -> None:
        assert self.connection is not None
        hidden = hidden.contiguous()
        self.counters.num_sends += 1
        self.counters.num_bytes += hidden.nbytes
        wait_for(self.connection.group.send, [hidden], self.stage + 1, 0)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert self.connection is not None
        hidden = torch.empty(shape, dtype=dtype, device=device)
        wait_for(self.connection.group.recv, [hidden], self.stage - 1, 0)
        return hidden

    def feed_back(self, x: torch.Tensor) -> torch.Tensor:
        assert self.connection is not None
        if self.is_last:
            x = x.contiguous()
            self.counters.num_sends += 1
            self.counters.num_bytes += x.nbytes
            wait_for(self.connection.group.send, [x], 0, 0)
        elif self.is_first:
            x = torch.empty_like(x)
            wait_for(self.connection.group.recv, [x], self.num_stages - 1, 0)
        return x
