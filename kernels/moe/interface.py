"""What a mixture-of-experts backend is given and must do. Knows tensors; knows no request and no model."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from hybridserve.kernels.registry import Backend

if TYPE_CHECKING:
    import torch


class MoEBackend(Backend):
    """Routing and grouped expert projections with SwiGLU."""

    @abstractmethod
    def route(
        self, logits: torch.Tensor, top_k: int, *, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Softmax in float32 over all experts, then the top k: weights [T, k] float32 and ids [T, k] int64.

        Jamba keeps the weights as they are (their sum is below 1); other families renormalize them.
        """

    def pack(self, gate_up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Lay loaded weights out as `experts` likes them. Called once; the results replace them."""
        return gate_up, down

    @abstractmethod
    def experts(
        self,
        x: torch.Tensor,  # [T, H]
        weights: torch.Tensor,  # [T, k] float32
        ids: torch.Tensor,  # [T, k] int64
        gate_up: torch.Tensor,  # [E, 2 I, H] packed: gate rows first
        down: torch.Tensor,  # [E, H, I] packed
    ) -> torch.Tensor:
        """sum_k weights[t, k] * down[e] @ (silu(gate[e] @ x[t]) * (up[e] @ x[t])), e = ids[t, k].

        [T, H] in x's dtype.
        """
