"""What a backend for operators on rows is given and must do. Knows tensors; knows no layer and no model."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from hybridserve.kernels.registry import Backend

if TYPE_CHECKING:
    import torch


class PointwiseBackend(Backend):
    """Operators that read a row and write it, and are bound by the number of calls and of passes."""

    @abstractmethod
    def rms_norm(
        self,
        x: torch.Tensor,  # [T, n]
        weight: torch.Tensor,  # [n], of any dtype
        eps: float,
        sizes: tuple[int, ...],  # of the segments that make up a row; their sum is n
    ) -> torch.Tensor:
        """weight * x / sqrt(mean(x^2) + eps), the mean being that of the element's own segment of its row.

        Computed in float32; [T, n] in x's dtype (arXiv 1910.07467).
        """
