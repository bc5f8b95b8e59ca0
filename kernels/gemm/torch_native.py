"""Projections by torch's matrix multiplication, for any device. Knows tensors; knows no model.

Two things need care on a CPU, both measured on two cores with AVX2:

- With few rows, torch reads a float32 weight at a third of the memory's speed if it multiplies x by the
  weight's transpose, and at nearly all of it if it multiplies the weight by x's transpose.
- Without half-precision instructions a half-precision weight is multiplied element by element. That is right
  for a row or three (the weight is read once, as it is) and up to 10 times slower than float32 for more.
  Those are multiplied in float32, a slice of the weight at a time: products of two half-precision numbers are
  exact in float32, and the weight is never held twice.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hybridserve.kernels.gemm.interface import GemmBackend

_FEW_ROWS_HALF = 3
"""Up to here reading a half-precision weight as it is beats widening it."""

_FEW_ROWS_FLOAT = 96
"""Up to here the weight goes first in a float32 product."""

_SMALL_WEIGHT = 1 << 17
"""A weight with fewer elements stays in cache: which operand goes first does not matter, a copy does."""

_SLICE_ELEMENTS = 1 << 18
"""Of a weight, widened at once: 1 MiB, which stays in cache between widening and multiplying."""


class TorchNative(GemmBackend):
    name = "torch_native"

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = matmul(x, weight)
        if bias is not None:
            y.add_(bias)
        return y if y.dtype == x.dtype else y.to(x.dtype)


def matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [M, in] times weight [out, in]: [M, out], in x's dtype or, not yet rounded to it, in float32."""
    if x.device.type == "cpu":
        num_rows = x.shape[0]
        if weight.dtype == torch.float32:
            if 0 < num_rows <= _FEW_ROWS_FLOAT and weight.numel() >= _SMALL_WEIGHT:
                return _weight_first(x, weight)
        elif num_rows > _FEW_ROWS_HALF and not _has_instructions(weight.dtype):
            return _widened(x, weight)
    return F.linear(x, weight)


def _has_instructions(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype != torch.float16 or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def _weight_first(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [M, in] and weight [out, in], both float32 -> [M, out]."""
    if x.shape[0] > 1:
        return torch.mm(weight, x.t()).t().contiguous()
    # a product with one column takes another, slower path
    return torch.mm(weight, torch.cat([x, x]).t())[:, 0].unsqueeze(0).contiguous()


def _widened(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [M, in] of any dtype times a half-precision weight [out, in]; [M, out] float32, not rounded."""
    num_outputs, num_inputs = weight.shape
    num_rows = x.shape[0]
    x = x.float()
    step = max(1, _SLICE_ELEMENTS // num_inputs)
    buffer = x.new_empty(min(step, num_outputs), num_inputs)
    weight_first = num_rows <= _FEW_ROWS_FLOAT
    y = x.new_empty(num_outputs, num_rows) if weight_first else x.new_empty(num_rows, num_outputs)
    for start in range(0, num_outputs, step):
        part = weight[start : start + step]
        wide = buffer[: part.shape[0]].copy_(part)
        if weight_first:
            torch.mm(wide, x.t(), out=y[start : start + step])
        else:
            torch.mm(x, wide.t(), out=y[:, start : start + step])
    return y.t().contiguous() if weight_first else y
