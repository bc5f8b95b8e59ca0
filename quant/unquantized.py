"""Plain weights: stored in the model's dtype, multiplied by the backends chosen at start-up."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from hybridserve.quant.format import Shard, WeightFormat, Weights

if TYPE_CHECKING:
    from hybridserve.kernels.gemm.interface import GemmBackend
    from hybridserve.kernels.moe.interface import MoEBackend


class UnquantizedFormat(WeightFormat):
    """A projection is {"weight": [out, in]}; experts are {"gate_up": [E, 2 I, H], "down": [E, H, I]}.

    `finish` replaces them by what the backend's `pack` returns.
    """

    name: ClassVar[str] = "none"

    def __init__(self, gemm: GemmBackend, moe: MoEBackend) -> None:
        self.gemm = gemm
        self.moe = moe

    @property
    def plain(self) -> UnquantizedFormat:
        return self

    def wrap_linear(self, weight: torch.Tensor) -> Weights:
        """A projection over a weight [out, in] that somebody else creates and loads."""
        return {"weight": weight}

    def create_linear(
        self, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
    ) -> Weights:
        return {"weight": torch.empty(out_features, in_features, dtype=dtype, device=device)}

    def load_linear(self, weights: Weights, tensor: torch.Tensor, shard: Shard) -> None:
        weights["weight"][shard.destination].copy_(tensor[shard.source])

    def finish_linear(self, weights: Weights) -> None:
        weights["weight"] = self.gemm.pack(weights["weight"])

    def apply_linear(self, x: torch.Tensor, weights: Weights, bias: torch.Tensor | None) -> torch.Tensor:
        return self.gemm.linear(x, weights["weight"], bias)

    def create_experts(
        self, num_experts: int, hidden: int, intermediate: int, dtype: torch.dtype, device: torch.device
    ) -> Weights:
        return {
            "gate_up": torch.empty(num_experts, 2 * intermediate, hidden, dtype=dtype, device=device),
            "down": torch.empty(num_experts, hidden, intermediate, dtype=dtype, device=device),
        }

    def load_expert(
        self, weights: Weights, expert: int, part: str, tensor: torch.Tensor, shard: Shard
    ) -> None:
        if part == "down":
            weight = weights["down"][expert]
        else:
            gate, up = weights["gate_up"][expert].chunk(2)
            weight = gate if part == "gate" else up
        weight[shard.destination].copy_(tensor[shard.source])

    def finish_experts(self, weights: Weights) -> None:
        weights["gate_up"], weights["down"] = self.moe.pack(weights["gate_up"], weights["down"])

    def apply_experts(
        self, x: torch.Tensor, weights: Weights, routing_weights: torch.Tensor, expert_ids: torch.Tensor
    ) -> torch.Tensor:
        return self.moe.experts(x, routing_weights, expert_ids, weights["gate_up"], weights["down"])
