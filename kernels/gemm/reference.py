"""The plainest definition of a projection, in float32. Knows tensors; knows no model and nothing of speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridserve.kernels.gemm.interface import GemmBackend, ScaledWeight, Weight, round_rows

if TYPE_CHECKING:
    import torch


class Reference(GemmBackend):
    name = "reference"
    copies_codes = "a plain copy of its whole weight"

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        y = product(x, weight)
        if bias is not None:
            y = y + bias.float()
        return y.to(x.dtype)


def product(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """x [T, in] times weight [out, in]: [T, out] in float32."""
    if not isinstance(weight, ScaledWeight):
        return x.float() @ weight.float().t()
    if not weight.int8_rows:
        return (x.float() @ weight.codes.float().t()) * weight.scales
    rounded, row_scales = round_rows(x)
    # whole numbers up to 2^53 are exact in float64, as they are in a machine's integers
    sums = rounded.double() @ weight.codes.double().t()
    return (sums * weight.scales * row_scales).float()
