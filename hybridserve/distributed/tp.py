"""A tensor-parallel group as layers see it: who am I, and two collectives. Passed as an argument, never
global (D12)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TPGroup:
    """One rank of a group. This class is the group of one rank, whose collectives do nothing."""

    rank: int = 0
    size: int = 1

    @classmethod
    def single(cls) -> TPGroup:
        return TPGroup()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, on every rank."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors side by side along the last axis, on every rank."""
        return x
