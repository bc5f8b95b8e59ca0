"""What a matrix-multiplication backend is given and must do. Knows tensors; knows no request and no model."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from hybridserve.kernels.registry import Backend

if TYPE_CHECKING:
    import torch


class GemmBackend(Backend):
    """Dense projections of unquantized weights."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Lay a loaded weight [out, in] out as `linear` likes it. Called once; the result replaces it."""
        return weight

    @abstractmethod
    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, in] times a packed weight, plus bias [out]; [T, out] in x's dtype."""
