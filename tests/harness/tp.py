"""Tensor-parallel ranks as threads of one process: collectives that really sum, and nothing to launch."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hybridserve.distributed.tp import TPGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

T = TypeVar("T")


class Meeting:
    """Where the ranks of a group exchange tensors. `num_reduced` counts the sums."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.tensors: list[torch.Tensor] = [torch.empty(0)] * size
        self.num_reduced = 0

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self.tensors[rank] = x
        self.barrier.wait()
        everyone = list(self.tensors)
        self.barrier.wait()
        return everyone


@dataclass(frozen=True, slots=True)
class ThreadTPGroup(TPGroup):
    """One rank of a group of threads."""

    meeting: Meeting | None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        assert self.meeting is not None
        tensors = self.meeting.exchange(self.rank, x)
        if self.rank == 0:
            self.meeting.num_reduced += 1
        return torch.stack(tensors).sum(0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        assert self.meeting is not None
        return torch.cat(self.meeting.exchange(self.rank, x), -1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        assert self.meeting is not None
        return self.meeting.exchange(self.rank, x)[0].clone()

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        gathered = self.all_gather(x)
        return gathered if self.rank == 0 else None


def run_ranks(size: int, work: Callable[[TPGroup], T]) -> list[T]:
    """`work(group)` on every rank at once; the results in the order of the ranks."""
    meeting = Meeting(size)

    def rank(index: int) -> T:
        try:
            return work(ThreadTPGroup(index, size, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(rank, index) for index in range(size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        broken = threading.BrokenBarrierError
        for error in sorted(errors, key=lambda error: isinstance(error, broken)):
            raise error
        return [future.result() for future in futures]


def joined_states(
    ranks: Sequence[Sequence[tuple[torch.Tensor, ...]]], config: Mapping[str, Any]
) -> list[tuple[torch.Tensor, ...]]:
    """The state tensors of each recurrent layer [channels, ...] of the whole model, out of every rank's: side
    by side, but for Mamba-2's convolution, which on each rank is its x, B and C."""
    layers = []
    for parts in zip(*ranks, strict=True):
        whole = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
        if config["model_type"] == "bamba":
            inner = config["mamba_expand"] * config["hidden_size"]
            whole[0] = _joined_conv([conv for conv, _ in parts], inner, config["mamba_n_groups"])
        layers.append(tuple(whole))
    return layers


def _joined_conv(parts: Sequence[torch.Tensor], inner: int, num_groups: int) -> torch.Tensor:
    """Where there are fewer groups than ranks, neighbours have the same one: each is taken once."""
    own = inner // len(parts)
    shared = (len(parts[0]) - own) // 2
    x, B, C = zip(*(part.split([own, shared, shared]) for part in parts), strict=True)
    every = max(1, len(parts) // num_groups)
    for copies in (B, C):
        assert all(torch.equal(part, copies[rank // every * every]) for rank, part in enumerate(copies))
    return torch.cat([*x, *B[::every], *C[::every]])
