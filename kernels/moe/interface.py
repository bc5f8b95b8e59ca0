"""What a mixture-of-experts backend is given and must do. Knows tensors; knows no request and no model."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hybridserve.kernels.gemm.interface import ScaledWeight, Weight
from hybridserve.kernels.registry import Backend

if TYPE_CHECKING:
    import torch


class ExpertGroups(NamedTuple):
    """The (token, expert) pairs of a call, P = T * k, grouped by expert, in the order of tokens within an
    expert."""

    tokens: torch.Tensor  # [P] int64: the row of x that a pair reads
    experts: torch.Tensor  # [P] int64, ascending


class ExpertDelta(Protocol):
    """What adapters add inside the experts, before each nonlinearity.

    y is in the model's dtype or float32, as the backend keeps it; rows that no adapter concerns are left as
    they are.
    """

    def add_gate_up(self, y: torch.Tensor, x: torch.Tensor, groups: ExpertGroups) -> None:
        """y [P, 2 I] += what adapters make of x [T, H]; gate columns first."""

    def add_down(self, y: torch.Tensor, x: torch.Tensor, groups: ExpertGroups) -> None:
        """y [P, H] += what adapters make of x [P, I], the activations."""


def expert_weight(weights: Weight, expert: int) -> Weight:
    """The weight [out, in] of one of several experts."""
    return weights.expert(expert) if isinstance(weights, ScaledWeight) else weights[expert]


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

    def unpack(self, gate_up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights [E, 2 I, H] and [E, H, I] that were packed; may share their memory."""
        return gate_up, down

    def pack_scaled(self, gate_up: ScaledWeight, down: ScaledWeight) -> tuple[ScaledWeight, ScaledWeight]:
        """The same for one-byte weights."""
        return gate_up, down

    def unpack_scaled(self, gate_up: ScaledWeight, down: ScaledWeight) -> tuple[ScaledWeight, ScaledWeight]:
        return gate_up, down

    @abstractmethod
    def experts(
        self,
        x: torch.Tensor,  # [T, H]
        weights: torch.Tensor,  # [T, k] float32
        ids: torch.Tensor,  # [T, k] int64
        gate_up: Weight,  # [E, 2 I, H] packed: gate rows first
        down: Weight,  # [E, H, I] packed
        delta: ExpertDelta | None = None,
    ) -> torch.Tensor:
        """sum_k weights[t, k] * down[e] @ (silu(gate[e] @ x[t]) * (up[e] @ x[t])), e = ids[t, k].

        [T, H] in x's dtype. A token that a delta leaves alone has (in float32) the bits that the same call
        without it gives.
        """
