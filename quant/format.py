"""What a weight format owns: how weights are created, loaded, sharded and applied (D10).

Models, LoRA and tensor parallelism see only this interface. Knows tensors; knows no model and no checkpoint
names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from hybridserve.kernels.gemm.interface import ScaledWeight
from hybridserve.kernels.huge_pages import WeightMemory

if TYPE_CHECKING:
    from hybridserve.kernels.gemm.interface import GemmBackend
    from hybridserve.kernels.moe.interface import ExpertDelta, MoEBackend
    from hybridserve.kernels.registry import Capabilities

Weights = dict[str, torch.Tensor]
"""The tensors that hold one projection (or one layer's experts) in some format; keys are the format's own."""

Source = torch.Tensor | ScaledWeight
"""A checkpoint's tensor [out, in], whole: plain, or quantized by whoever made the checkpoint."""


class WeightError(ValueError):
    """What is wrong with a checkpoint's tensor; the text continues a sentence that begins with its name."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a checkpoint tensor lands in which part of a weight as this rank holds it.

    `source` indexes the checkpoint's tensor [out, in], `destination` the unquantized local weight [out, in].
    A format that computes scales does so from the whole tensor, so codes do not depend on the cut.
    """

    source: tuple[slice, slice]
    destination: tuple[slice, slice]


def settle(weight: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """A packed weight in the memory of the weight, if it takes as much: what is given back while a model is
    loaded may stay with the process."""
    is_plain = packed.layout is torch.strided and packed.dtype == weight.dtype and packed.is_contiguous()
    if not is_plain or packed.numel() != weight.numel() or packed.data_ptr() == weight.data_ptr():
        return packed
    return weight.view(-1).copy_(packed.view(-1)).view(packed.shape)


class WeightFormat(ABC):
    """Create, load, finish, apply. `finish` is called once, when everything has been loaded."""

    name: ClassVar[str]
    inputs_together: ClassVar[int] = 1
    """Inputs of a row that share a scale: ranks divide a row between them, never within."""
    depends_on_threads: ClassVar[bool] = False
    """Whether a result's last bits may be others with another number of threads, whatever runs products."""
    can_be_recorded: ClassVar[bool] = True
    """As of a backend (kernels/registry.py)."""

    @classmethod
    def why_not(cls, capabilities: Capabilities) -> str | None:
        """Why this format can't be used here, or None if it can."""
        return None

    def __init__(self, gemm: GemmBackend, moe: MoEBackend, *, stored: bool = False) -> None:
        """`stored`: the checkpoint holds weights in this format already."""
        self.gemm = gemm
        self.moe = moe
        self.stored = stored
        self.keeps_weights = True
        """Whether weights stay as long as the format; else they are given back one by one."""
        self._memory = WeightMemory()

    def allocate(self, *shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """For a weight or its codes; on a CPU in large pages."""
        if device.type == "cpu" and self.keeps_weights:
            return self._memory.empty(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=device)

    def note(self, *, projections: bool, experts: bool) -> str:
        """How what is quantized is computed, for whoever must judge its speed and its accuracy."""
        return ""

    @abstractmethod
    def create_linear(
        self, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
    ) -> Weights: ...

    @abstractmethod
    def load_linear(self, weights: Weights, source: Source, shard: Shard) -> None:
        """Raises WeightError for a tensor that can't be had in this format."""

    @abstractmethod
    def finish_linear(self, weights: Weights) -> None: ...

    @abstractmethod
    def apply_linear(self, x: torch.Tensor, weights: Weights, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, in] -> [T, out]."""

    @abstractmethod
    def dequantize_linear(self, weights: Weights) -> torch.Tensor:
        """The finished weight [out, in] as plain numbers, for those who must know its norms; not to be
        changed."""

    @abstractmethod
    def create_experts(
        self, num_experts: int, hidden: int, intermediate: int, dtype: torch.dtype, device: torch.device
    ) -> Weights: ...

    @abstractmethod
    def load_expert(self, weights: Weights, expert: int, part: str, source: Source, shard: Shard) -> None:
        """`part` is "gate", "up" or "down"; the shard's destination is within that part. Raises
        WeightError."""

    @abstractmethod
    def finish_experts(self, weights: Weights) -> None: ...

    @abstractmethod
    def apply_experts(
        self,
        x: torch.Tensor,
        weights: Weights,
        routing_weights: torch.Tensor,
        expert_ids: torch.Tensor,
        delta: ExpertDelta | None = None,
    ) -> torch.Tensor:
        """x [T, hidden], routing_weights and expert_ids [T, k] -> [T, hidden]; `delta` is what adapters add
        inside the experts."""

    @abstractmethod
    def dequantize_expert(self, weights: Weights, expert: int, part: str) -> torch.Tensor:
        """The finished weight [out, in] of one expert's "gate", "up" or "down", like `dequantize_linear`."""


def part_of(gate_up: torch.Tensor, down: torch.Tensor, part: str) -> torch.Tensor:
    """What one expert's "gate", "up" or "down" has of the tensors [2 I, ...] and [H, ...]."""
    if part == "down":
        return down
    gate, up = gate_up.chunk(2)
    return gate if part == "gate" else up
