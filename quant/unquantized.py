"""Plain weights: stored in the model's dtype, multiplied by the backends chosen at start-up."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hybridserve.kernels.gemm.interface import ScaledWeight
from hybridserve.quant.format import Shard, Source, WeightError, WeightFormat, Weights, part_of, settle

if TYPE_CHECKING:
    import torch

    from hybridserve.kernels.moe.interface import ExpertDelta


class UnquantizedFormat(WeightFormat):
    """A projection is {"weight": [out, in]}; experts are {"gate_up": [E, 2 I, H], "down": [E, H, I]}.

    `finish` replaces them by what the backend's `pack` returns.
    """

    name: ClassVar[str] = "none"

    def wrap_linear(self, weight: torch.Tensor) -> Weights:
        """A projection over a weight [out, in] that somebody else creates, loads and reads: never
        finished."""
        return {"weight": weight}

    def create_linear(
        self, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
    ) -> Weights:
        return {"weight": self.allocate(out_features, in_features, dtype=dtype, device=device)}

    def load_linear(self, weights: Weights, source: Source, shard: Shard) -> None:
        weights["weight"][shard.destination].copy_(plain(source)[shard.source])

    def finish_linear(self, weights: Weights) -> None:
        weights["weight"] = settle(weights["weight"], self.gemm.pack(weights["weight"]))

    def apply_linear(self, x: torch.Tensor, weights: Weights, bias: torch.Tensor | None) -> torch.Tensor:
        return self.gemm.linear(x, weights["weight"], bias)

    def dequantize_linear(self, weights: Weights) -> torch.Tensor:
        return self.gemm.unpack(weights["weight"])

    def create_experts(
        self, num_experts: int, hidden: int, intermediate: int, dtype: torch.dtype, device: torch.device
    ) -> Weights:
        return {
            "gate_up": self.allocate(num_experts, 2 * intermediate, hidden, dtype=dtype, device=device),
            "down": self.allocate(num_experts, hidden, intermediate, dtype=dtype, device=device),
        }

    def load_expert(self, weights: Weights, expert: int, part: str, source: Source, shard: Shard) -> None:
        weight = part_of(weights["gate_up"][expert], weights["down"][expert], part)
        weight[shard.destination].copy_(plain(source)[shard.source])

    def finish_experts(self, weights: Weights) -> None:
        weights["gate_up"], weights["down"] = self.moe.pack(weights["gate_up"], weights["down"])

    def apply_experts(
        self,
        x: torch.Tensor,
        weights: Weights,
        routing_weights: torch.Tensor,
        expert_ids: torch.Tensor,
        delta: ExpertDelta | None = None,
    ) -> torch.Tensor:
        return self.moe.experts(x, routing_weights, expert_ids, weights["gate_up"], weights["down"], delta)

    def dequantize_expert(self, weights: Weights, expert: int, part: str) -> torch.Tensor:
        one = slice(expert, expert + 1)
        gate_up, down = self.moe.unpack(weights["gate_up"][one], weights["down"][one])
        return part_of(gate_up[0], down[0], part)


def plain(source: Source) -> torch.Tensor:
    """WeightError if the checkpoint has quantized a tensor that isn't to be."""
    if isinstance(source, ScaledWeight):
        raise WeightError("is quantized, but the checkpoint's quantization_config does not say so")
    return source
