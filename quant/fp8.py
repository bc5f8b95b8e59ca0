"""Weights in 8-bit floating point (e4m3, arXiv 2209.05433), a scale an output channel; one scale for a whole
tensor, as some checkpoints have, is the same scale in each channel.

Activations are never rounded: without instructions for it, a product widens the codes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from hybridserve.kernels.gemm.interface import ScaledWeight
from hybridserve.quant.scaled import ScaledFormat, divide_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hybridserve.kernels.registry import Backend

CODES = torch.float8_e4m3fn
LARGEST = torch.finfo(CODES).max


class Fp8Format(ScaledFormat):
    """A row's largest magnitude becomes 448, the largest number of e4m3."""

    name: ClassVar[str] = "fp8"
    code_dtype: ClassVar[torch.dtype] = CODES

    def _roundings(self, used: Mapping[str, Backend]) -> str:
        return "no FP8 instructions: codes are widened in every product; activations as they are"

    @classmethod
    def quantize_rows(cls, weight: torch.Tensor) -> ScaledWeight:
        quotients, scales = divide_rows(weight, LARGEST)
        return ScaledWeight(quotients.clamp_(-LARGEST, LARGEST).to(CODES), scales)  # more would be NaN
