"""Symmetric int8 weights, a scale an output channel (of each expert): `int8` keeps activations, `int8-w8a8`
rounds each row of them to int8 too.

Knows how numbers become codes; the sums are a backend's.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from hybridserve.kernels.gemm.interface import INT8_MAX, ScaledWeight
from hybridserve.quant.scaled import ScaledFormat, divide_rows


class Int8Format(ScaledFormat):
    """W8A16. A row's largest magnitude becomes 127, so no element is off by more than max|row| / 254."""

    name: ClassVar[str] = "int8"
    code_dtype: ClassVar[torch.dtype] = torch.int8

    @classmethod
    def quantize_rows(cls, weight: torch.Tensor) -> ScaledWeight:
        quotients, scales = divide_rows(weight, INT8_MAX)
        return ScaledWeight(quotients.round_().to(torch.int8), scales)


class Int8W8A8Format(Int8Format):
    """W8A8 with dynamic activations: a row's largest magnitude becomes 127, in every product anew."""

    name: ClassVar[str] = "int8-w8a8"
    int8_rows: ClassVar[bool] = True
