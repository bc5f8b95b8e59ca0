"""The plainest definition of a projection, in float32. Knows tensors; knows no model and nothing of speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridserve.kernels.gemm.interface import GemmBackend

if TYPE_CHECKING:
    import torch


class Reference(GemmBackend):
    name = "reference"

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = x.float() @ weight.float().t()
        if bias is not None:
            y = y + bias.float()
        return y.to(x.dtype)
