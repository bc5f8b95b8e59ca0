"""Which part of a model a rank has: numbers only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Topology:
    """One rank of `tensor` x `pipeline`. The ranks of a stage follow each other, so that a stage's
    collectives stay on one machine where the ranks of a machine follow each other."""

    tensor: int = 1
    pipeline: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} of {self.tensor} x {self.pipeline} ranks")

    @property
    def size(self) -> int:
        return self.tensor * self.pipeline

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor

    @property
    def stage(self) -> int:
        return self.rank // self.tensor

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.pipeline - 1

    @property
    def sampler(self) -> int:
        """The rank that has the logits: the first of the last stage."""
        return (self.pipeline - 1) * self.tensor
