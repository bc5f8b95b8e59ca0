"""A tensor-parallel group as layers see it: who am I, and four collectives. Passed as an argument, never
global (D12)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from hybridserve.distributed.process_group import wait_for

if TYPE_CHECKING:
    from hybridserve.distributed.process_group import Connection


@dataclass(frozen=True, slots=True)
class TPGroup:
    """One rank of a group. This class is the group of one rank, whose collectives do nothing."""

    rank: int = 0
    size: int = 1

    @classmethod
    def single(cls) -> TPGroup:
        return TPGroup()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, on every rank. The result may be in the memory of `x`."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors side by side along the last axis, on every rank."""
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """The ranks' tensors side by side along the last axis on rank 0, None elsewhere."""
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's, on every rank, whose own has its shape. The result may be in the memory of `x`."""
        return x


@dataclass(slots=True)
class CollectiveCounters:
    """What one rank has taken part in."""

    num_all_reduces: int = 0
    num_all_gathers: int = 0
    num_gathers: int = 0
    num_broadcasts: int = 0
    num_bytes: int = 0
    """Of the tensors that this rank put in, whatever the algorithm sends of them."""

    @property
    def num_collectives(self) -> int:
        return self.num_all_reduces + self.num_all_gathers + self.num_gathers + self.num_broadcasts


@dataclass(frozen=True, slots=True)
class ProcessGroupTP(TPGroup):
    """One process of a group of several. Raises PeerLost where another one is gone or too late."""

    connection: Connection | None = None
    counters: CollectiveCounters = field(default_factory=CollectiveCounters)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        assert self.connection is not None
        x = x.contiguous()
        self.counters.num_all_reduces += 1
        self.counters.num_bytes += x.nbytes
        wait_for(self.connection.group.allreduce, [x])
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        assert self.connection is not None
        x = x.contiguous()
        self.counters.num_all_gathers += 1
        self.counters.num_bytes += x.nbytes
        parts = [torch.empty_like(x) for _ in range(self.size)]
        wait_for(self.connection.group.allgather, [parts], [x])
        return torch.cat(parts, -1)

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        assert self.connection is not None
        x = x.contiguous()
        self.counters.num_gathers += 1
        self.counters.num_bytes += x.nbytes
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        wait_for(self.connection.group.gather, [parts] if parts else [], [x])
        return torch.cat(parts, -1) if parts else None

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        assert self.connection is not None
        x = x.contiguous()
        self.counters.num_broadcasts += 1
        self.counters.num_bytes += x.nbytes if self.rank == 0 else 0
        wait_for(self.connection.group.broadcast, x, 0)
        return x
