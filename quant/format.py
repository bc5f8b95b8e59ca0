"""What a weight format owns: how weights are created, loaded, sharded and applied (D10).

Models, LoRA and tensor parallelism see only this interface. Knows tensors; knows no model and no checkpoint
names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:
    from hybridserve.quant.unquantized import UnquantizedFormat

Weights = dict[str, torch.Tensor]
"""The tensors that hold one projection (or one layer's experts) in some format; keys are the format's own."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a checkpoint tensor lands in which part of a weight as this rank holds it.

    `source` indexes the checkpoint's tensor [out, in], `destination` the unquantized local weight [out, in].
    A format that computes scales does so from the whole tensor, so codes do not depend on the cut.
    """

    source: tuple[slice, slice]
    destination: tuple[slice, slice]


class WeightFormat(ABC):
    """Create, load, finish, apply. `finish` is called once, when everything has been loaded."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def plain(self) -> UnquantizedFormat:
        """The format of weights that are never quantized: routers and the output head."""

    @abstractmethod
    def create_linear(
        self, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
    ) -> Weights: ...

    @abstractmethod
    def load_linear(self, weights: Weights, tensor: torch.Tensor, shard: Shard) -> None: ...

    @abstractmethod
    def finish_linear(self, weights: Weights) -> None: ...

    @abstractmethod
    def apply_linear(self, x: torch.Tensor, weights: Weights, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, in] -> [T, out]."""

    @abstractmethod
    def create_experts(
        self, num_experts: int, hidden: int, intermediate: int, dtype: torch.dtype, device: torch.device
    ) -> Weights: ...

    @abstractmethod
    def load_expert(
        self, weights: Weights, expert: int, part: str, tensor: torch.Tensor, shard: Shard
    ) -> None:
        """`part` is "gate", "up" or "down"; the shard's destination is within that part."""

    @abstractmethod
    def finish_experts(self, weights: Weights) -> None: ...

    @abstractmethod
    def apply_experts(
        self, x: torch.Tensor, weights: Weights, routing_weights: torch.Tensor, expert_ids: torch.Tensor
    ) -> torch.Tensor:
        """x [T, hidden], routing_weights and expert_ids [T, k] -> [T, hidden]."""
