"""Projections for NVIDIA GPUs: one-byte weights by Triton, others by torch, whose library is the vendor's.

Knows tensors and tiles; the arithmetic is in `triton_kernels`. With one-byte weights a row's result depends
on no other row, and on their number only through the tile: in products of int8 and int8 not at all, else up
to float32 rounding of its sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from hybridserve.kernels.gemm.interface import GemmBackend, ScaledWeight, Weight
from hybridserve.kernels.gemm.tiles import num_splits, tile_for
from hybridserve.kernels.triton_support import cdiv, obstacle, power_of_2, rows_of

if TYPE_CHECKING:
    from types import ModuleType

    from hybridserve.kernels.registry import Capabilities

_GROUP = 8
"""Tiles of rows that take turns at the same outputs."""


class Triton(GemmBackend):
    name = "triton"
    can_be_recorded = True

    @classmethod
    def why_not(cls, capabilities: Capabilities) -> str | None:
        return obstacle(capabilities)

    def __init__(self) -> None:
        from hybridserve.kernels.gemm import triton_kernels

        self._kernels = triton_kernels

    def pack_scaled(self, weight: ScaledWeight) -> ScaledWeight:
        return weight._replace(codes=weight.codes.contiguous(), scales=weight.scales.contiguous())

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        if not isinstance(weight, ScaledWeight):
            return F.linear(x, weight, bias)
        num_rows, num_inputs = x.shape
        num_outputs = weight.shape[0]
        y = x.new_empty(num_rows, num_outputs)
        if not num_rows:
            return y
        x, row_scales = operand(self._kernels, x, weight)
        codes = rows_of(as_bits(weight.codes))
        tile = tile_for(num_rows, x.element_size())
        splits = num_splits(num_rows, num_outputs, num_inputs, tile)
        partial = y
        if splits > 1:
            kind = torch.int32 if weight.int8_rows else torch.float32
            partial = y.new_empty((splits, num_rows, num_outputs), dtype=kind)
        scales = weight.scales.contiguous()
        addend = scales if bias is None else bias.contiguous()
        kind_of = {"SPLITS": splits, "INT8_ROWS": weight.int8_rows, "HAS_BIAS": bias is not None}
        self._kernels.linear[(cdiv(num_rows, tile.rows) * cdiv(num_outputs, tile.outputs), splits)](
            *(x, row_scales, codes, scales, addend, y, partial),
            *(num_rows, num_outputs, num_inputs, x.stride(0), codes.stride(0)),
            FP8=codes.dtype == torch.uint8,
            GROUP=_GROUP,
            **kind_of,
            **tile.options,
        )
        if splits > 1:
            block = min(1024, power_of_2(num_outputs))
            self._kernels.add_splits[(num_rows, cdiv(num_outputs, block))](
                *(partial, row_scales, scales, addend, y, num_rows, num_outputs), BLOCK_N=block, **kind_of
            )
        return y


def operand(kernels: ModuleType, x: torch.Tensor, weight: Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, in] as it meets this weight, and what rows of products are to be multiplied by if it was
    rounded."""
    x = rows_of(x)
    if not (isinstance(weight, ScaledWeight) and weight.int8_rows):
        return x, x
    codes = x.new_empty(x.shape, dtype=torch.int8)
    scales = x.new_empty(len(x), dtype=torch.float32)
    kernels.round_rows[(len(x),)](
        *(x, codes, scales, x.shape[1], x.stride(0)),
        BLOCK=min(4096, power_of_2(x.shape[1], 128)),
        num_warps=8,
    )
    return codes, scales


def as_bits(codes: torch.Tensor) -> torch.Tensor:
    """Codes as a kernel takes them: not every GPU knows 8-bit floats, but all know bits."""
    return codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes
